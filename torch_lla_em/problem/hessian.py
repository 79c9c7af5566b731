"""H, the Hessian of the loss in the outputs, of every example of this rank: three forms with the same methods.

``product`` multiplies by H, ``root`` by S with S Sᵀ = H, ``towards`` goes a part of the way to another H of the same form;
``values`` has one row for every example, which is what a checkpoint stores.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.problem.loss import Loss

ENTRIES = 1 << 20
"""Numbers that are in memory at once in float64, or for all draws of some examples."""


class Diagonal(NamedTuple):
    """H of a likelihood whose outputs have targets of their own."""

    values: Tensor
    """(N, ..., C)."""

    def product(self, Jw: Tensor, rows: slice | Tensor = slice(None)) -> Tensor:
        """Return H J w for columns J w, (n C, k), of these examples."""
        return Jw * self.values[rows].reshape(-1, 1)

    def root(self, noise: Tensor) -> Tensor:
        """Return S ε, (K, N, ..., C), with S Sᵀ = H."""
        return self.values.clamp_min(0).sqrt() * noise

    def towards(self, other: Any, share: float) -> Diagonal:
        """Return H after a share of the way to another one."""
        return Diagonal(self.values.lerp(other.values, share))


class Blocks(NamedTuple):
    """H of coupled outputs that are few."""

    values: Tensor
    """(N, ..., C, C)."""

    def product(self, Jw: Tensor, rows: slice | Tensor = slice(None)) -> Tensor:
        """Return H J w for columns J w, (n C, k), of these examples."""
        H = self.values[rows]
        return (H @ Jw.reshape(*H.shape[:-1], Jw.shape[-1])).flatten(0, -2)

    def root(self, noise: Tensor) -> Tensor:
        """Return S ε, (K, N, ..., C), with S Sᵀ = H."""
        found = torch.empty_like(noise)
        for rows in parts_of(len(self.values), self.values[:1].numel()):
            u = noise[:, rows].movedim(0, -2) @ root_of(self.values[rows]).mT
            found[:, rows] = u.movedim(-2, 0)
        return found

    def towards(self, other: Any, share: float) -> Blocks:
        """Return H after a share of the way to another one."""
        return Blocks(self.values.lerp(other.values, share))


class Draws(NamedTuple):
    """H at given outputs, or averaged over draws of them and their mirror images; no block is ever computed.

    Between two steps the outputs are averaged, and not H; the fixed point is the same.
    """

    values: Tensor
    """The mean and S deviations, (N, 1 + S, ..., C)."""

    loss: Loss

    def product(self, Jw: Tensor, rows: slice | Tensor = slice(None)) -> Tensor:
        """Return H J w for columns J w, (n C, k), of these examples."""
        own, loss = self.values[rows], self.loss.part(rows)
        found = torch.empty_like(Jw)
        shape = len(own), *own.shape[2:], Jw.shape[1]
        u, to = Jw.view(shape), found.view(shape)
        for some, f in functions(own[:, 0], own[:, 1:].movedim(1, 0)):
            if len(f) == 1:
                to[some] = loss.part(some).product(f[0], u[some].movedim(-1, 0)).movedim(0, -1)
            else:
                to[some] = loss.part(some).averaged_product(f, u[some])
        return found

    def root(self, noise: Tensor) -> Tensor:
        """Return S ε, (K, N, ..., C), with S Sᵀ = H."""
        found = torch.empty_like(noise)
        for some, f in functions(self.values[:, 0], self.values[:, 1:].movedim(1, 0)):
            loss = self.loss.part(some)
            if len(f) == 1:
                found[:, some] = loss.root(f[0], noise[:, some])
            else:
                found[:, some] = loss.averaged_root(f, noise[:, some].movedim(0, -1)).movedim(-1, 0)
        return found

    def towards(self, other: Any, share: float) -> Draws:
        """Return H after a share of the way to another one."""
        return self._replace(values=self.values.lerp(other.values, share))


Hessian = Diagonal | Blocks | Draws


def functions(mean: Tensor, deviations: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Yield some examples with their draws, (2 S, n, ..., C), or without deviations with their means (1, n, ..., C)."""
    count = 0 if deviations is None else len(deviations)
    for rows in parts_of(len(mean), max(1, 2 * count) * mean[:1].numel()):
        if deviations is None or not count:
            yield rows, mean[None, rows]
        else:
            moved = deviations[:, rows]
            yield rows, torch.cat([mean[rows] + moved, mean[rows] - moved])


def parts_of(examples: int, numbers: int) -> Iterator[slice]:
    """Yield slices of examples with so many numbers each, which are in memory at once; an empty one of none."""
    step = max(1, ENTRIES // max(1, numbers))
    for start in range(0, max(1, examples), step):
        yield slice(start, start + step)


def root_of(blocks: Tensor) -> Tensor:
    """Return R with R Rᵀ = blocks (..., C, C), which may be singular, or indefinite by rounding.

    Blocks of a softmax do not change if all outputs are moved alike. R has no component in that
    direction either: over millions of examples what is added to the diagonal would count there.
    """
    exact, numbers = blocks.double(), torch.finfo(blocks.dtype)
    exact = 0.5 * (exact + exact.mT)
    diagonal = exact.diagonal(dim1=-2, dim2=-1)
    size = diagonal.mean(-1, keepdim=True).clamp_min(numbers.tiny / numbers.eps)
    is_softmax = exact.sum(-1).abs().sum() <= 1e-3 * diagonal.sum()
    diagonal += max(1e-9, 10 * numbers.eps) * size
    root, info = torch.linalg.cholesky_ex(exact)
    failed = info > 0
    if failed.any():  # rounded more coarsely than their own size
        failed &= exact.isfinite().all(-1).all(-1)
        values, vectors = torch.linalg.eigh(exact[failed])
        root[failed] = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    found: Tensor = (root - is_softmax * root.mean(-2, keepdim=True)).to(blocks)
    return found
