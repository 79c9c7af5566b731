"""H, the Hessian of the loss in the outputs, for every example of this rank, in four forms with the
same methods.

``product`` multiplies by H, and ``root`` by S with S Sᵀ = H. ``values``, which a checkpoint stores,
has one row for every example.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.problem.loss import Loss

ENTRIES = 1 << 20
"""Largest number of entries in memory at once, in float64 or for all draws of some examples."""


DRAWS = 16_000
"""Number of draws of all examples together. With 2,000 examples, 8 draws for each gave an NLL that
was 1 % higher, and 32 the same NLL."""

COPIES = 6
"""Number of copies of H that must fit into memory."""


class Diagonal(NamedTuple):
    """Diagonal H, of a likelihood that is a product over outputs."""

    values: Tensor
    """(N, ..., C)."""

    def product(self, Jw: Tensor, rows: slice | Tensor = slice(None)) -> Tensor:
        """Return H J w for columns J w, (n C, k), of these examples."""
        return Jw * self.values[rows].reshape(-1, 1)

    def diagonal(self, rows: slice) -> Tensor:
        """Return the diagonal of H of these examples, (n, ..., C)."""
        return self.values[rows]

    def root(self, epsilon: Tensor, rows: slice = slice(None)) -> Tensor:
        """Return S ε, (K, n, ..., C), with S Sᵀ = H of these examples."""
        return self.values[rows].clamp_min(0).sqrt() * epsilon


class Blocks(NamedTuple):
    """H for a few coupled outputs, as a matrix for each example."""

    values: Tensor
    """(N, ..., C, C)."""

    def product(self, Jw: Tensor, rows: slice | Tensor = slice(None)) -> Tensor:
        """Return H J w for columns J w, (n C, k), of these examples."""
        H = self.values[rows]
        return (H @ Jw.reshape(*H.shape[:-1], Jw.shape[-1])).flatten(0, -2)

    def diagonal(self, rows: slice) -> Tensor:
        """Return the diagonal of H of these examples, (n, ..., C)."""
        return self.values[rows].diagonal(dim1=-2, dim2=-1)

    def root(self, epsilon: Tensor, rows: slice = slice(None)) -> Tensor:
        """Return S ε, (K, n, ..., C), with S Sᵀ = H of these examples."""
        H, root = self.values[rows], torch.empty_like(epsilon)
        for some in parts_of(len(H), H[:1].numel()):
            u = epsilon[:, some].movedim(0, -2) @ root_of(H[some]).mT
            root[:, some] = u.movedim(-2, 0)
        return root


class AtOutputs(NamedTuple):
    """H at given outputs, for any likelihood; no block is ever computed."""

    values: Tensor
    """(N, ..., C)."""

    loss: Loss

    def product(self, Jw: Tensor, rows: slice | Tensor = slice(None)) -> Tensor:
        """Return H J w for columns J w, (n C, k), of these examples."""
        f, loss, product = self.values[rows], self.loss.part(rows), torch.empty_like(Jw)
        u, to = Jw.view(*f.shape, Jw.shape[1]), product.view(*f.shape, Jw.shape[1])
        for some in parts_of(len(f), f[:1].numel()):
            part = loss.part(some).product(f[some], u[some].movedim(-1, 0))
            to[some] = part.movedim(0, -1)
        return product

    def diagonal(self, rows: slice) -> Tensor:
        """Return the diagonal of H of these examples, (n, ..., C)."""
        f, loss = self.values[rows], self.loss.part(rows)
        if loss.likelihood.is_softmax:
            return Draws(loss.roots_of_probabilities(f[None])).diagonal(slice(None))
        elementwise, parts = loss.likelihood.elementwise, [f[:0]]
        for some in parts_of(len(f), f[:1].numel() * f.shape[-1]):
            H = loss.part(some).expected_hessian(f[None, some])
            parts.append(H if elementwise else H.diagonal(dim1=-2, dim2=-1))
        return torch.cat(parts)

    def root(self, epsilon: Tensor, rows: slice = slice(None)) -> Tensor:
        """Return S ε, (K, n, ..., C), with S Sᵀ = H of these examples."""
        f, loss, root = self.values[rows], self.loss.part(rows), torch.empty_like(epsilon)
        for some in parts_of(len(f), f[:1].numel()):
            root[:, some] = loss.part(some).root(f[some], epsilon[:, some])
        return root


class Draws(NamedTuple):
    """H for many classes: the average of diag(p) - p pᵀ over draws of their probabilities p.

    A step to another H averages the probabilities of each draw. If outputs were averaged instead, H
    would be too small on the way, and λ would fall with it.
    """

    values: Tensor
    """√(w / S) p, (N, ..., S, C), for an example's weight w."""

    def product(self, Jw: Tensor, rows: slice | Tensor = slice(None)) -> Tensor:
        """Return H J w for columns J w, (n C, k), of these examples."""
        P = self.values[rows]
        mean = diagonal_of(P)
        u = Jw.view(*mean.shape, Jw.shape[1])
        # H maps constants to 0; relative to the likeliest class nothing cancels where p is near 1
        likeliest = mean.argmax(-1)[..., None, None].expand(*u.shape[:-2], 1, u.shape[-1])
        u = u - u.gather(-2, likeliest)
        within = ((P @ u).mT @ P).mT  # a third of the time of P.mT @ (P @ u) for one column
        return u.mul_(mean.unsqueeze(-1)).sub_(within).view_as(Jw)

    def diagonal(self, rows: slice) -> Tensor:
        """Return the diagonal of H of these examples, (n, ..., C)."""
        P = self.values[rows]
        return diagonal_of(P) - P.square().sum(-2)

    def root(self, epsilon: Tensor, rows: slice = slice(None)) -> Tensor:
        """Return S ε, (K, n, ..., C), with S Sᵀ = H of these examples."""
        drawn, root = self.values[rows], torch.empty_like(epsilon)
        for some in parts_of(len(drawn), drawn[:1].numel()):
            # H = D - Pᵀ P with D = diag(mean p). With A = D^-½ Pᵀ and I - AᵀA = L Lᵀ, which is
            # S × S, it has the root D^½ (I - A (I + L)⁻¹ Aᵀ); 1e-13 exceeds the rounding of an
            # eigenvalue that is 0
            P = drawn[some].double()
            size = diagonal_of(P).sqrt().unsqueeze(-1)
            A = P.mT / size.clamp_min(torch.finfo(P.dtype).tiny)
            eye = torch.eye(P.shape[-2], dtype=P.dtype, device=P.device)
            L = torch.linalg.cholesky((1 + 1e-13) * eye - A.mT @ A)
            inner = torch.linalg.solve_triangular(eye + L, eye.expand_as(L), upper=False)
            A, inner, size = A.to(epsilon), inner.to(epsilon), size.to(epsilon)
            columns = epsilon[:, some].movedim(0, -1)
            u = size * (columns - A @ (inner @ (A.mT @ columns)))
            # H maps constants to 0, also after rounding
            root[:, some] = (u - u.mean(-2, keepdim=True)).movedim(-1, 0)
        return root


def diagonal_of(P: Tensor) -> Tensor:
    """Return w times the mean of p, (..., C), from √(w / S) p, (..., S, C)."""
    return (P.sum(-1, keepdim=True).mT @ P).squeeze(-2)


Hessian = Diagonal | Blocks | AtOutputs | Draws


def towards(H: Hessian, other: Hessian, share: float) -> Hessian:
    """Return H moved by a share of the way to another one of the same form."""
    return H._replace(values=H.values.lerp(other.values, share))


def form_of_H(
    likelihood: Likelihood, classes: int, sites: float, nbytes: float, memory: float
) -> tuple[bool, int, float]:
    """Choose how an H that moves is stored. Return whether it is stored as draws, the number of
    draws of each site, and the number of entries for each output.

    Draws are chosen for more than 32 classes if blocks exceed the memory; outputs have ``nbytes``.
    """
    is_large = classes > 32 and COPIES * nbytes * classes > memory / 2
    many = likelihood.is_softmax and is_large
    draws = min(16 if many else 128, max(4, math.ceil(DRAWS / max(1, sites))))
    return many, draws, 1.0 if likelihood.elementwise else 2.0 * draws if many else float(classes)


def functions(mean: Tensor, deviations: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of examples with their draws, (2 S, n, ..., C); without deviations, with their
    means, (1, n, ..., C)."""
    count = 0 if deviations is None else len(deviations)
    for rows in parts_of(len(mean), max(1, 2 * count) * mean[:1].numel()):
        if deviations is None or not count:
            yield rows, mean[None, rows]
        else:
            moved = deviations[:, rows]
            yield rows, torch.cat([mean[rows] + moved, mean[rows] - moved])


def parts_of(examples: int, numbers: int) -> Iterator[slice]:
    """Yield slices of examples that fit into memory at once, for the given number of entries of an
    example. Without examples it is one empty slice."""
    step = max(1, ENTRIES // max(1, numbers))
    for start in range(0, max(1, examples), step):
        yield slice(start, start + step)


def root_of(blocks: Tensor) -> Tensor:
    """Return R with R Rᵀ = blocks (..., C, C), which may be singular, or indefinite because of
    rounding.

    The blocks of a softmax are zero in the direction that changes all outputs equally. R has no
    component in that direction either; otherwise the number that is added to the diagonal would
    matter over millions of examples.
    """
    exact, numbers = blocks.double(), torch.finfo(blocks.dtype)
    exact = 0.5 * (exact + exact.mT)
    diagonal = exact.diagonal(dim1=-2, dim2=-1)
    size = diagonal.mean(-1, keepdim=True).clamp_min(numbers.tiny / numbers.eps)
    is_softmax = exact.sum(-1).abs().sum() <= 1e-3 * diagonal.sum()
    diagonal += max(1e-9, 10 * numbers.eps) * size
    root, info = torch.linalg.cholesky_ex(exact)
    failed = info > 0
    if failed.any():  # the rounding errors of these blocks exceed their size
        failed &= exact.isfinite().all(-1).all(-1)
        values, vectors = torch.linalg.eigh(exact[failed])
        root[failed] = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    centred: Tensor = torch.where(is_softmax, root - root.mean(-2, keepdim=True), root).to(blocks)
    return centred
