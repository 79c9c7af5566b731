"""Squared gradients of single rows, summed over rows, from the factors of their Jacobians."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from torch_lla_em.jacobian.calls import Piece
from torch_lla_em.jacobian.factors import Outer, Terms

# numbers in the gradients of single rows that are held at once
_NUMBERS = 1 << 24

Gradients = Callable[[slice], Tensor]
"""Rows -> their own Jᵀu for one piece of a weight, (rows, K, *shape)."""


def row_squares(x: Terms, weights: dict[str, Tensor], u: Tensor) -> dict[str, Tensor]:
    """Return Σ_n Σ_k (J_nᵀ u_nk)² by name, each of the shape of its weight, for u (K, B, ..., C)."""
    u = u.flatten(2).transpose(0, 1) if x.f.dim() > 1 else u[..., None].transpose(0, 1)
    terms: dict[str, list[tuple[Piece, Gradients, Outer | None]]] = {}
    for piece, gradients, alone in _terms(x, u):
        terms.setdefault(piece.name, []).append((piece, gradients, alone))
    return {name: _summed(weights[name], parts, u) for name, parts in terms.items()}


def _summed(weight: Tensor, parts: list, u: Tensor) -> Tensor:
    dtype = torch.promote_types(weight.dtype, torch.float32)
    piece, _, term = parts[0]
    if term is not None and len(parts) == 1 and piece.part is None:
        if not term.a.is_floating_point():
            return _of_table(term, u, torch.zeros_like(weight, dtype=dtype))
        # one product d aᵀ a row, whose square is the product of the squares
        d = _signals(term, u, slice(None)).to(dtype).square().sum(1)
        by = term.a.to(dtype).square() if piece is term.weight else d.new_ones(len(d), 1)
        return (d.mT @ by).reshape(weight.shape)
    total = torch.zeros_like(weight, dtype=dtype)
    step = max(1, _NUMBERS // max(1, u.shape[1] * weight.numel()))
    for start in range(0, len(u), step):
        rows = slice(start, min(len(u), start + step))
        each = u.new_zeros(rows.stop - start, u.shape[1], *weight.shape, dtype=dtype)
        for piece, gradients, _ in parts:
            own = each if piece.part is None else each[:, :, piece.part]
            own += gradients(rows).reshape(own.shape)
        total += each.square_().sum((0, 1))
    return total


def _of_table(term: Outer, u: Tensor, total: Tensor) -> Tensor:
    """Add the squares of a table's entries to the total: only those that a row looks up are not 0."""
    step = max(1, _NUMBERS // max(1, u.shape[1] * term.a.shape[1] * total.shape[1]))
    for start in range(0, len(u), step):
        rows = slice(start, min(len(u), start + step))
        d, a = _signals(term, u, rows).unflatten(2, (-1, term.a.shape[1])), term.a[rows]
        same = a[:, :, None] == a[:, None, :]
        # places that look up the same entry are summed, and counted at the first of them
        sums = d.to(total) @ same[:, None].to(total)
        is_first = ~same.tril(-1).any(2)
        squares = (sums.square().sum(1) * is_first[:, None]).mT
        total.index_add_(0, a.flatten(), squares.flatten(0, 1))
    return total


def _terms(x: Terms, u: Tensor) -> Iterator[tuple[Piece, Gradients, Outer | None]]:
    """Yield every piece of a weight, and the outer product that is all of its gradient, if any."""
    if x.dense is not None:
        sizes, start = [piece.shape.numel() for piece in x.columns], 0
        for piece, size in zip(x.columns, sizes):
            columns = slice(start, start + size)
            start += size
            yield piece, partial(_of_columns, x.dense[:, :, columns], u), None
    for term in x.outer:
        alone = term if term.a.dim() == 2 else None
        if term.weight is not None:
            yield term.weight, partial(_of_weight, term, u), alone
        if term.bias is not None:
            yield term.bias, partial(_of_bias, term, u), alone


def _signals(term: Outer, u: Tensor, rows: slice) -> Tensor:
    """Return Bᵀu of some rows, (rows, K, groups × channels × places)."""
    d = u[rows] if term.b is None else u[rows].to(term.b) @ term.b[rows]
    return d.to(term.a) if term.a.is_floating_point() else d


def _of_columns(J: Tensor, u: Tensor, rows: slice) -> Tensor:
    return u[rows].to(J) @ J[rows]


def _of_weight(term: Outer, u: Tensor, rows: slice) -> Tensor:
    d, a = _signals(term, u, rows), term.a[rows]
    if not a.is_floating_point():  # a lookup of rows a of a table
        d = d.unflatten(2, (-1, a.shape[1])).mT
        table = d.new_zeros(*d.shape[:2], *term.weight.shape)
        return table.scatter_add_(2, a[:, None, :, None].expand_as(d), d)
    if a.dim() == 2:
        return torch.einsum("bko,bi->bkoi", d, a)
    d = d.unflatten(2, (a.shape[1], -1, a.shape[3]))
    return torch.einsum("bkgot,bgit->bkgoi", d, a)


def _of_bias(term: Outer, u: Tensor, rows: slice) -> Tensor:
    d = _signals(term, u, rows)
    if term.a.dim() == 2:
        return d
    return d.unflatten(2, (term.a.shape[1], -1, term.a.shape[3])).sum(-1)
