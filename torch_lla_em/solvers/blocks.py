"""Blocks of vectors (m, P): inner products in float64, combinations, orthonormal bases."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_lla_em.slices import over_slices, stacked_qr

_COLUMNS = 1 << 16


def gram(a: Tensor, b: Tensor) -> Tensor:
    """Return a bᵀ, shape (m, n), summed in float64."""
    if a.dtype == torch.float64:
        return over_slices(a @ b.T)
    pieces = zip(a.split(_COLUMNS, dim=1), b.split(_COLUMNS, dim=1))
    return over_slices(sum(p.double() @ q.double().T for p, q in pieces))


def dots(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product of each pair of rows, shape (m,), in float64."""
    pieces = zip(a.split(_COLUMNS, dim=1), b.split(_COLUMNS, dim=1))
    return over_slices(sum((p.double() * q).sum(1) for p, q in pieces))


def norm(rows: Tensor) -> Tensor:
    """Return the norm of all rows together, shape (), in float64."""
    return dots(rows.view(-1, rows.shape[-1]), rows.view(-1, rows.shape[-1])).sum().sqrt()


def combine(coefficients: Tensor, rows: Tensor) -> Tensor:
    """Return the combinations of rows, (k, m) with (m, P) to (k, P)."""
    return coefficients.to(rows) @ rows


def orthonormalise(rows: Tensor, floor: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return an orthonormal basis (r, P) and coefficients (m, r) with rows = coefficients basis.

    Rank-revealing: directions that are linear combinations of others up to rounding leave
    the basis. Rounding is ``floor`` in every direction, or relative to each row if 0.
    """
    norms = dots(rows, rows).sqrt()
    live = (norms > floor).nonzero()[:, 0]
    if not len(live):
        return rows[:0], norms.new_zeros(len(rows), 0)
    units = norms[live, None] if floor == 0 else torch.ones_like(norms[live, None])
    q, r = stacked_qr(*torch.linalg.qr((rows[live] / units.to(rows)).T))
    u, singular, vh = torch.linalg.svd(r.double(), full_matrices=False)
    relative = 10 * len(u) ** 0.5 * torch.finfo(rows.dtype).eps * singular[0]
    kept = singular > (relative if floor == 0 else floor)
    # what rounding must not turn round, so that another number of ranks finds the same basis:
    # the signs of either factors, and singular vectors of nearly equal values
    if kept.all():
        turn = torch.where(r.diagonal() < 0, -1, 1).diag().to(u)
        parts = turn @ r.double()
    else:
        signs = vh.gather(1, vh.abs().argmax(1, keepdim=True)).sign()
        turn, parts = (signs.T * u)[:, kept], (singular[:, None] * signs * vh)[kept]
    coefficients = norms.new_zeros(len(rows), turn.shape[1])
    coefficients[live] = units * parts.T
    return combine(turn.T, q.T), coefficients
