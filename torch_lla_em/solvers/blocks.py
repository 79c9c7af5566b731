"""Blocks of vectors (m, P): inner products in float64, combinations, orthonormal bases."""

from __future__ import annotations

import torch
from torch import Tensor

_COLUMNS = 1 << 16


def gram(a: Tensor, b: Tensor) -> Tensor:
    """Return a bᵀ, shape (m, n), summed in float64."""
    if a.dtype == torch.float64:
        return a @ b.T
    pieces = zip(a.split(_COLUMNS, dim=1), b.split(_COLUMNS, dim=1))
    return sum(p.double() @ q.double().T for p, q in pieces)


def dots(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product of each pair of rows, shape (m,), in float64."""
    pieces = zip(a.split(_COLUMNS, dim=1), b.split(_COLUMNS, dim=1))
    return sum((p.double() * q).sum(1) for p, q in pieces)


def combine(coefficients: Tensor, rows: Tensor) -> Tensor:
    """Return the combinations of rows, (k, m) with (m, P) to (k, P)."""
    return coefficients.to(rows) @ rows


def orthonormalise(rows: Tensor, floor: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return an orthonormal basis (r, P) and coefficients (m, r) with rows = coefficients basis.

    Rank-revealing: rows of norm at most ``floor``, and directions that are linear
    combinations of others up to rounding, leave the basis.
    """
    norms = dots(rows, rows).sqrt()
    live = (norms > floor).nonzero()[:, 0]
    if not len(live):
        return rows[:0], norms.new_zeros(len(rows), 0)
    q, r = torch.linalg.qr((rows[live] / norms[live, None].to(rows)).T)
    u, singular, vh = torch.linalg.svd(r.double(), full_matrices=False)
    kept = singular > 10 * len(u) ** 0.5 * torch.finfo(rows.dtype).eps * singular[0]
    coefficients = norms.new_zeros(len(rows), int(kept.sum()))
    coefficients[live] = norms[live, None] * vh[kept].T * singular[kept]
    return combine(u[:, kept].T, q.T), coefficients
