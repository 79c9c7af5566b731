"""The linear model at one batch by the factors of its Jacobian."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_lla_em.jacobian.autodiff import ByAutodiff
from torch_lla_em.jacobian.calls import Piece
from torch_lla_em.jacobian.factors import Terms
from torch_lla_em.jacobian.row_squares import row_squares
from torch_lla_em.jacobian.rows import Rows, Weights


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
        return row_squares(self.terms, self._values, u)

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
