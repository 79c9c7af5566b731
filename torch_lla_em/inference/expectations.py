"""Expectations under Gaussian outputs h_n ~ N(m_n, R_n R_nᵀ), with separate draws per example."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.runtime import normals

_STREAM = 2
# number of functions times outputs times classes that are in memory at once
_NUMBERS = 1 << 22
# number of examples whose covariances are in memory in float64 at once
_EXAMPLES = 256
_JITTER = 1e-9


class Expectations:
    """The loss, its gradient and its H for all examples, averaged over S draws and their mirror images.

    Without draws H is fixed, and given by the outputs at which it is evaluated, (N, ..., C); otherwise
    by its blocks, (N, ..., C, C).

    Every example has draws of its own, so that a fit cannot adapt to errors that all examples share.
    The draws are the same at every call, so that two posteriors can be compared.
    """

    def __init__(self, likelihood: Likelihood, targets: Tensor, like: Tensor, seed: int, num: int):
        self._likelihood, self._targets = likelihood, targets
        self.shape = like.shape
        """(N, ..., C)."""

        mask = likelihood.mask(targets)
        self._mask = None if mask is None else mask.unsqueeze(-1).to(like)
        self._noise = like.new_zeros(num, *like.shape)
        if num:
            rows = torch.arange(len(like), device=like.device)
            noise = normals(seed, _STREAM, range(num), rows, like[0].numel())
            self._noise = noise.to(like).view(num, *like.shape)

    def loss(self, mean: Tensor, root: Tensor | None) -> float:
        """Return Σ E[-log p(y | h)], for means (N, ..., C) and roots (N, ..., C, C) or 0."""
        total = 0.0
        for rows, f in self._pieces(mean, root):
            log_prob = self._likelihood.log_prob(f, self._targets[rows])
            total -= log_prob.sum(dtype=torch.float64).item() / len(f)
        return total

    def slope(self, mean: Tensor, root: Tensor | None) -> Tensor:
        """Return E[∇loss], (N, ..., C)."""
        parts = [
            self._likelihood.gradient(f, self._targets[rows]).mean(0)
            for rows, f in self._pieces(mean, root)
        ]
        return self._masked(torch.cat(parts))

    def curvature(self, mean: Tensor, root: Tensor | None) -> Tensor:
        """Return E[H], (N, ..., C, C)."""
        blocks = torch.cat([self._blocks(f) for _, f in self._pieces(mean, root)])
        return blocks if self._mask is None else blocks * self._mask.unsqueeze(-1)

    def product(self, H: Tensor, Jw: Tensor) -> Tensor:
        """Return H J w for columns J w, (N C, k)."""
        if len(self._noise):
            return (H @ Jw.reshape(*self.shape, -1)).flatten(0, -2)
        u = self._likelihood.hessian_product(H, Jw.T.reshape(-1, *self.shape))
        return self._masked(u).flatten(1).T

    def root(self, H: Tensor, noise: Tensor) -> Tensor:
        """Return S ε, (K, N, ..., C), with S Sᵀ = H."""
        if len(self._noise):
            return by_row(root_of(H), noise)
        u = self._likelihood.hessian_sqrt_product(H, noise)
        return u if self._mask is None else u * self._mask.sqrt()

    def _masked(self, u: Tensor) -> Tensor:
        """Return u times the weights of sites, which are 0 for sites that do not count."""
        return u if self._mask is None else u * self._mask

    def _blocks(self, f: Tensor) -> Tensor:
        C = f.shape[-1]
        unit = torch.eye(C, dtype=f.dtype, device=f.device).view(C, *(1,) * (f.dim() - 2), C)
        total = f.new_zeros(C, *f.shape[1:])
        for part in f:
            u = unit.expand(C, *part.shape)
            total += self._likelihood.hessian_product(part, u)
        return (total / len(f)).movedim(0, -1)

    def _pieces(self, mean: Tensor, root: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
        """Yield examples with their draws, (2 S, n, ..., C), or with their means if there is no root."""
        entries = 2 * max(1, len(self._noise)) * self.shape[1:].numel() * self.shape[-1]
        step = max(1, _NUMBERS // entries)
        for start in range(0, len(mean), step):
            rows = slice(start, start + step)
            if root is None:
                yield rows, mean[None, rows]
                continue
            moved = by_row(root[rows], self._noise[:, rows])
            yield rows, torch.cat([mean[rows] + moved, mean[rows] - moved])


def by_row(blocks: Tensor, u: Tensor) -> Tensor:
    """Return the products of every example's block, (N, ..., C, C), with vectors (k, N, ..., C)."""
    return (u.movedim(0, -2) @ blocks.mT).movedim(-2, 0)


def root_of(blocks: Tensor) -> Tensor:
    """Return R with R Rᵀ = blocks (..., C, C), which may be singular, or indefinite by rounding."""
    exact, numbers = 0.5 * (blocks + blocks.mT).double(), torch.finfo(blocks.dtype)
    diagonal = exact.diagonal(dim1=-2, dim2=-1)
    size = diagonal.mean(-1, keepdim=True).clamp_min(numbers.tiny / numbers.eps)
    diagonal += max(_JITTER, 10 * numbers.eps) * size
    root, info = torch.linalg.cholesky_ex(exact)
    failed = (info > 0) & exact.isfinite().all(-1).all(-1)
    if failed.any():  # rounded more coarsely than their own size
        values, vectors = torch.linalg.eigh(exact[failed])
        root[failed] = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    found: Tensor = root.to(blocks)
    return found


def root_of_covariance(samples: Tensor) -> Tensor:
    """Return R with R Rᵀ = E[h hᵀ] for every example, (N, ..., C, C), from samples h (N, ..., C, K).

    Outputs that vary together have covariances that are singular up to the rounding of float32.
    """
    parts = (part.double() for part in samples.split(_EXAMPLES))
    return torch.cat([root_of(h @ h.mT / h.shape[-1]).to(samples) for h in parts])
