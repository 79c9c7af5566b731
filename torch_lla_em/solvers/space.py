"""Blocks of vectors (m, P): inner products in float64, combinations, orthonormal bases."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torch_lla_em.runtime import NUMBERS

# smallest relative singular value that products of vectors resolve in float64
_RESOLVED = 2e-8
# number of entries that are summed in float32; the rounding error grows with this number
_SUMMED = 4096


def dots(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product of each pair of rows, shape (m,), in float64."""
    total = torch.zeros(len(a), dtype=torch.float64, device=a.device)
    for piece in _pieces(a, b):
        total += (a[:, piece].double() * b[:, piece]).sum(1)
    return total


def dot(a: Tensor, b: Tensor) -> float:
    """Return the inner product of two vectors (P,)."""
    return dots(a[None], b[None]).item()


def norm(rows: Tensor) -> float:
    """Return the norm of all rows together."""
    rows = rows.view(-1, rows.shape[-1])
    return dots(rows, rows).sum().sqrt().item()


def gram(a: Tensor, b: Tensor) -> Tensor:
    """Return a bᵀ, shape (m, n), summed in float64."""
    if a.dtype == b.dtype == torch.float64:
        return a @ b.T
    total = torch.zeros(len(a), len(b), dtype=torch.float64, device=a.device)
    for piece in _pieces(a, b):
        total.addmm_(a[:, piece].double(), b[:, piece].double().T)
    return total


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """Return a bᵀ, (m, n), for orthogonalisation, with an error at the level of the vectors'
    rounding.

    Pieces in float32 are summed in float64: three times as fast as ``gram``.
    """
    if torch.float64 in (a.dtype, b.dtype):
        return gram(a, b)
    total = torch.zeros(len(a), len(b), dtype=torch.float64, device=a.device)
    for start in range(0, a.shape[1], _SUMMED):
        piece = slice(start, start + _SUMMED)
        total += a[:, piece].float() @ b[:, piece].float().T
    return total


def orthonormalise(
    rows: Tensor, images: Tensor | None = None, floor: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return an orthonormal basis (r, P), its images, and coefficients (m, r), rows = coefficients
    basis.

    Directions that are linear combinations of others up to rounding are dropped. The level of
    rounding is ``floor`` in every direction, or relative to each row if ``floor`` is 0. With
    ``images`` M x of the rows, for a symmetric, positive definite M, the basis is orthonormal in
    the inner product ⟨a, M b⟩.
    """
    plain = images is None
    images = rows if images is None else images
    norms = dots(rows, images).clamp_min(0).sqrt()
    live = (norms > floor).nonzero()[:, 0]
    if not len(live):
        return rows[:0].clone(), rows[:0].clone(), norms.new_zeros(len(rows), 0)
    units = torch.ones_like(norms[live]) if plain and floor else norms[live]
    rows_of = [rows] if plain else [rows, images]
    if len(live) < len(rows):
        rows_of = [block[live] for block in rows_of]
    products = gram(rows_of[0], rows_of[-1]) / torch.outer(units, units)
    squares, vectors = torch.linalg.eigh(products)
    singular = squares.clamp_min(0).sqrt()
    eps = torch.finfo(rows.dtype).eps
    least = 10 * len(live) ** 0.5 * max(eps, _RESOLVED) * singular[-1]
    # images are rounded, so products with them are no longer exactly inner products
    kept = singular > (max(least, floor) if plain else 16 * eps**0.5)
    # neither factor depends on rounding, so the basis does not depend on the number of ranks
    if kept.all():
        parts = torch.linalg.cholesky(products)
        turn = torch.linalg.inv(parts)
    else:
        vectors = vectors * vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()
        parts, turn = (vectors * singular)[:, kept], (vectors / singular)[:, kept].T
    coefficients = norms.new_zeros(len(rows), turn.shape[0])
    coefficients[live] = units[:, None] * parts
    turned = [(turn / units).to(block) @ block for block in rows_of]
    # the basis of nearly dependent vectors is orthonormal only up to rounding
    left = torch.linalg.cholesky(overlap(turned[0], turned[-1]))
    turn = torch.linalg.inv(left).to(rows)
    for block in turned:
        for piece in _pieces(block, block):
            block[:, piece] = turn @ block[:, piece]
    return turned[0], turned[-1], coefficients @ left


def add_combined(total: Tensor, coefficients: Tensor, rows: Tensor, factor: float = 1.0) -> None:
    """Add the combinations of rows, times a factor, to vectors (k, P), in place."""
    coefficients = coefficients.to(total)
    if rows.dtype == total.dtype:
        total.addmm_(coefficients, rows, alpha=factor)
        return
    for piece in _pieces(total, rows):
        total[:, piece].addmm_(coefficients, rows[:, piece].to(total.dtype), alpha=factor)


def _pieces(*blocks: Tensor) -> Iterator[slice]:
    """Yield the columns of blocks in pieces that need little memory in another precision."""
    size, step = blocks[0].shape[1], max(1, NUMBERS // max(1, sum(map(len, blocks))))
    for start in range(0, size, step):
        yield slice(start, start + step)
