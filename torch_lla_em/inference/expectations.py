"""H of every example, fixed or in expectation under the posterior, and the loss that belongs to it.

``FixedH`` evaluates the loss, its gradient and H at given outputs. ``ExpectedH`` averages them over
draws of Gaussian outputs h_n ~ N(m_n, Σ_k d_nk d_nkᵀ / K), where d_nk are the outputs J_n w_k of the
posterior samples: m_n + Σ_k d_nk ε_k / √K is a draw, so no covariance is ever factorised. ``DrawnH`` does
the same for many classes, without (C, C) blocks.

A rank has H, means and draws of its own examples only, N below.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from torch_lla_em.data import Share
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.problem import Loss

# number of functions times outputs that are in memory at once
_NUMBERS = 1 << 22
# number of entries of blocks that are in memory in float64 at once
_ENTRIES = 1 << 20
_JITTER = 1e-9

DRAWS, FEWEST_DRAWS, DRAWS_IN_ALL = {False: 128, True: 16}, 4, 16_000
"""Largest number of draws per example, and that for many classes, the smallest number, and that for all examples."""

COPIES = 6
"""Copies of H that must fit."""

# row sums of blocks relative to their diagonals, up to which they are rounding errors of zeros
_ALIKE = 1e-3
# number of examples whose random numbers are drawn at once, on every rank
_DRAWN = 1 << 12


class FixedH:
    """The loss and its gradient at given outputs, and H, which is given by the outputs it is taken at."""

    moves = False
    """Whether H follows the posterior."""

    def __init__(self, loss: Loss, like: Tensor, share: Share):
        self._loss, self._elementwise = loss, loss.likelihood.elementwise
        self._share = share
        self.shape = like.shape
        """(N, ..., C)."""

    def first(self, f: Tensor) -> Tensor:
        """Return the first H, for the outputs f at which a fixed one is evaluated."""
        return f

    def curvature(self, mean: Tensor, deviations: Tensor | None) -> Tensor:
        """Return H at outputs (N, ..., C) and, if it moves, at their draws (S, N, ..., C)."""
        return mean

    def deviations(self, pushed: Tensor) -> Tensor | None:
        """Return draws of the outputs less their mean, for J w_k (N, ..., C, K); None without draws."""
        return None

    def product(self, H: Tensor, Jw: Tensor, rows: slice | Tensor = slice(None)) -> Tensor:
        """Return H J w for columns J w, (n C, k), of these examples."""
        H = H[rows]
        if not len(H):
            return Jw
        return self._loss.part(rows).product(H, Jw.T.reshape(-1, *H.shape)).flatten(1).T

    def root(self, H: Tensor, noise: Tensor) -> Tensor:
        """Return S ε, (K, N, ..., C), with S Sᵀ = H."""
        return self._loss.root(H, noise) if len(H) else noise

    def loss(self, mean: Tensor, deviations: Tensor | None) -> float:
        """Return Σ E[-log p(y | h)] of all ranks, for means (N, ..., C) and deviations (S, N, ..., C) or 0."""
        total = 0.0
        for rows, f in self._pieces(mean, deviations):
            total += self._loss.part(rows).value(f).item() / len(f)
        return self._share.add(total, mean)

    def slope(self, mean: Tensor, deviations: Tensor | None) -> Tensor:
        """Return E[∇loss], (N, ..., C)."""
        pieces = self._pieces(mean, deviations)
        found = [self._loss.part(rows).gradient(f).mean(0) for rows, f in pieces]
        return torch.cat(found) if found else torch.empty_like(mean)

    def _pieces(self, mean: Tensor, deviations: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
        """Yield examples with their draws, (2 S, n, ..., C), or with their means (1, n, ..., C)."""
        functions = 1 if deviations is None else 2 * len(deviations)
        step = max(1, _NUMBERS // (functions * self.shape[1:].numel()))
        for start in range(0, len(mean), step):
            rows = slice(start, start + step)
            if deviations is None:
                yield rows, mean[None, rows]
            else:
                moved = deviations[:, rows]
                f = moved.new_empty(2, *moved.shape)
                torch.add(mean[rows], moved, out=f[0])
                torch.sub(mean[rows], moved, out=f[1])
                yield rows, f.flatten(0, 1)


class ExpectedH(FixedH):
    """The loss, its gradient and its H for all examples, averaged over S draws and their mirror images.

    H is given by its blocks, (N, ..., C, C), or by its diagonal, (N, ..., C), if the likelihood is
    elementwise. Every example has draws of its own, so that a fit cannot adapt to errors that all
    examples share. They are the same at every call, so that two posteriors can be compared, and for
    any number of ranks.
    """

    moves = True

    def __init__(self, loss: Loss, like: Tensor, share: Share, seed: int, num: int):
        super().__init__(loss, like, share)
        self._seed, self._num = seed, num
        self._noise = like.new_zeros(0)

    def first(self, f: Tensor) -> Tensor:
        """Return the average of H at outputs 0 and at the outputs f."""
        H = self.curvature(torch.zeros_like(f), None)
        H += self.curvature(f, None)
        return H.mul_(0.5)

    def curvature(self, mean: Tensor, deviations: Tensor | None) -> Tensor:
        """Return E[H], (N, ..., C, C), or its diagonal."""
        H = self._empty(mean)
        for rows, f in self._pieces(mean, deviations):
            H[rows] = self._loss.part(rows).expected_hessian(f)
        return H

    def deviations(self, pushed: Tensor) -> Tensor:
        """Return draws of the outputs less their mean, (S, N, ..., C), for J w_k (N, ..., C, K)."""
        *sites, _, K = pushed.shape
        if self._noise.shape[:-1] != (*sites, K):
            self._noise = self._drawn(K, pushed)
        return (pushed @ self._noise).movedim(-1, 0).contiguous()

    def product(self, H: Tensor, Jw: Tensor, rows: slice | Tensor = slice(None)) -> Tensor:
        """Return H J w for columns J w, (n C, k), of these examples."""
        H = H[rows]
        if self._elementwise:
            return Jw * H.reshape(-1, 1)
        return (H @ Jw.reshape(*H.shape[:-1], Jw.shape[-1])).flatten(0, -2)

    def root(self, H: Tensor, noise: Tensor) -> Tensor:
        """Return S ε, (K, N, ..., C), with S Sᵀ = H."""
        if self._elementwise:
            return H.clamp_min(0).sqrt() * noise
        found = torch.empty_like(noise)
        for rows in _in_memory(H):
            u = noise[:, rows].movedim(0, -2) @ root_of(H[rows]).mT
            found[:, rows] = u.movedim(-2, 0)
        return found

    def _drawn(self, K: int, like: Tensor) -> Tensor:
        """Return random numbers of this rank's examples, (N, ..., K, S), from those of all."""
        generator = torch.Generator("cpu").manual_seed(self._seed)  # the same on every device
        shape = *self.shape[1:-1], K, self._num
        found = [like.new_zeros(0, *shape)]
        for numbers in torch.arange(self._share.total, device="cpu").split(_DRAWN):
            size, dtype = (len(numbers), *shape), torch.float32
            drawn = torch.randn(size, generator=generator, dtype=dtype, device="cpu")
            own, _ = self._share.find(numbers)
            found.append(drawn[own].to(like).div_(K**0.5))
        return torch.cat(found)

    def _empty(self, like: Tensor) -> Tensor:
        """Return room for H."""
        own = () if self._elementwise else (self.shape[-1],)
        return like.new_empty(*self.shape, *own)


class DrawnH(ExpectedH):
    """The same for many classes: H is given by the draws that it averages, and not by (C, C) blocks.

    They are stored as a mean and S deviations, (N, S + 1, ..., C). Between two steps it is these outputs
    that are averaged, and not H; the fixed point, where H is that of the posterior's own draws, is the same.
    """

    def first(self, f: Tensor) -> Tensor:
        """Return the average of H at outputs 0 and at the outputs f."""
        half = 0.5 * f
        return torch.stack([half] * (self._num + 1), 1)

    def curvature(self, mean: Tensor, deviations: Tensor | None) -> Tensor:
        """Return the mean and the deviations, (N, S + 1, ..., C)."""
        if deviations is None:
            deviations = torch.zeros_like(mean).expand(self._num, *mean.shape)
        return torch.stack([mean, *deviations], 1)

    def product(self, H: Tensor, Jw: Tensor, rows: slice | Tensor = slice(None)) -> Tensor:
        """Return H J w for columns J w, (n C, k), of these examples."""
        H, loss, found = H[rows], self._loss.part(rows), torch.empty_like(Jw)
        u, to = (part.view(len(H), *self.shape[1:], Jw.shape[1]) for part in (Jw, found))
        for some, f in self._pieces(H[:, 0], H[:, 1:].movedim(1, 0)):
            to[some] = loss.part(some).averaged_product(f, u[some])
        return found

    def root(self, H: Tensor, noise: Tensor) -> Tensor:
        """Return S ε, (K, N, ..., C), with S Sᵀ = H."""
        found = torch.empty_like(noise)
        for some, f in self._pieces(H[:, 0], H[:, 1:].movedim(1, 0)):
            u = self._loss.part(some).averaged_root(f, noise[:, some].movedim(0, -1))
            found[:, some] = u.movedim(-1, 0)
        return found


def draws_for(sites: float, many: bool = False) -> int:
    """Return the number of draws for each of so many sites, of many classes or not."""
    return min(DRAWS[many], max(FEWEST_DRAWS, math.ceil(DRAWS_IN_ALL / max(sites, 1))))


def takes_draws(likelihood: Likelihood, classes: int, outputs: float, memory: float) -> bool:
    """Return whether H is stored as draws, since blocks for ``outputs`` bytes of outputs take too much memory."""
    if (
        likelihood.elementwise
        or classes <= DRAWS[True] + 1
        or not likelihood.keeps_functions(classes)
    ):
        return False
    return COPIES * outputs * classes > memory / 2


def entries_of(likelihood: Likelihood, classes: int, sites: float, many: bool) -> float:
    """Return the entries of a moving H for each output, as draws of ``many`` classes or in blocks."""
    if likelihood.elementwise:
        return 1.0
    return draws_for(sites, many) + 1.0 if many else float(classes)


def replace_by_roots(blocks: Tensor) -> None:
    """Replace blocks (N, ..., C, C) by R with R Rᵀ = blocks, as ``root_of`` does."""
    for rows in _in_memory(blocks):
        blocks[rows] = root_of(blocks[rows])


def _in_memory(blocks: Tensor) -> Iterator[slice]:
    """Yield slices of examples whose blocks are in memory in float64 at once."""
    step = max(1, _ENTRIES // blocks.shape[1:].numel())
    for start in range(0, len(blocks), step):
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
    is_softmax = exact.sum(-1).abs().sum() <= _ALIKE * diagonal.sum()
    diagonal += max(_JITTER, 10 * numbers.eps) * size
    root, info = torch.linalg.cholesky_ex(exact)
    failed = info > 0
    if failed.any():  # rounded more coarsely than their own size
        failed &= exact.isfinite().all(-1).all(-1)
        values, vectors = torch.linalg.eigh(exact[failed])
        root[failed] = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    found: Tensor = (root - is_softmax * root.mean(-2, keepdim=True)).to(blocks)
    return found
