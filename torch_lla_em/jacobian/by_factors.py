"""The linear model at one batch by the factors of its Jacobian."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.jacobian.autodiff import ByAutodiff
from torch_lla_em.jacobian.calls import Piece
from torch_lla_em.jacobian.factors import Outer, Terms
from torch_lla_em.jacobian.rows import Rows, Weights

# numbers in the gradients of single rows that are held at once
_NUMBERS = 1 << 24

Gradients = Callable[[slice], Tensor]
"""Rows -> their own Jᵀu for one piece of a weight, (rows, K, *shape)."""


class ByFactors(Rows):
    """The linear model at a batch by factors, and by ``torch.func`` for the rest of the weights."""

    def __init__(
        self,
        weights: Weights,
        terms: Terms,
        rest: ByAutodiff | None = None,
        columns: int | None = None,
    ):
        """``columns``: how many are taken at once, at most; None: as many as are best."""
        sides = [terms.at_once, columns, *(() if rest is None else (rest.pushed, rest.pulled))]
        at_once = min((side for side in sides if side is not None), default=None)
        super().__init__(weights, (at_once, at_once))
        self.terms, self._rest = terms, rest
        pieces = [*terms.columns, *(p for t in terms.outer for p in (t.weight, t.bias) if p)]
        self._values = weights.values(tuple(dict.fromkeys(piece.name for piece in pieces)))
        self.nbytes = terms.nbytes

    @property
    def f(self) -> Tensor:
        """f(x), shape (B, ..., C)."""
        return self.terms.f

    def part(self, rows: slice, x: Any) -> ByFactors:
        """Return the linear model at some of the examples, whose inputs are x."""
        rest = None if self._rest is None else self._rest.part(rows, x)
        return ByFactors(self._weights, self.terms.part(rows), rest, self.columns)

    def row_squares(self, u: Tensor) -> dict[str, Tensor]:
        """Return Σ_n Σ_k (J_nᵀ u_nk)² by name, of the weights that have factors."""
        return _row_squares(self.terms, self._values, u)

    def push(self, w: Tensor) -> Tensor:
        """Return J w, shape (K, B, ..., C), of columns (K, P)."""
        parts = [self._push(directions) for directions in self._chunks(w)]
        Jw = parts[0] if len(parts) == 1 else torch.cat(parts)
        return Jw if self._rest is None else Jw + self._rest.push(w)

    def _push(self, directions: dict[str, Tensor]) -> Tensor:
        own = {name: directions[name].to(value) for name, value in self._values.items()}
        f, dense = self.f, self.terms.dense
        K = len(next(iter(own.values())))
        Jw = f.new_zeros(K, len(f), f[0].numel())
        if dense is not None:
            w = torch.cat([piece.get(own).reshape(K, -1) for piece in self.terms.columns], 1)
            Jw += (w.to(dense) @ dense.flatten(0, 1).mT).view(Jw.shape)
        for term in self.terms.outer:
            Jw += term.push(own).transpose(0, 1)
        return Jw.view(K, *f.shape)

    def _pull(self, u: Tensor) -> dict[str, Tensor]:
        total = {} if self._rest is None else self._rest._pull(u)
        K, dense = len(u), self.terms.dense
        u = u.reshape(K, len(self.f), -1)

        def add(piece: Piece, pulled: Tensor) -> None:
            if piece.part is None and piece.name not in total:
                total[piece.name] = pulled.reshape(K, *piece.shape)
                return
            if piece.name not in total:
                total[piece.name] = pulled.new_zeros(K, *self._values[piece.name].shape)
            piece.get(total).add_(pulled.reshape(K, *piece.shape))

        if dense is not None:
            pulled = u.flatten(1).to(dense) @ dense.flatten(0, 1)
            sizes = [piece.shape.numel() for piece in self.terms.columns]
            for piece, columns in zip(self.terms.columns, pulled.split(sizes, 1)):
                add(piece, columns)
        for term in self.terms.outer:
            for piece, pulled in term.pull(u.transpose(0, 1)):
                add(piece, pulled)
        return total


def _row_squares(x: Terms, weights: dict[str, Tensor], u: Tensor) -> dict[str, Tensor]:
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
