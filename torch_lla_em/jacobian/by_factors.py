"""The linear model at one batch by the factors of its Jacobian."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_lla_em.jacobian.autodiff import ByAutodiff
from torch_lla_em.jacobian.factors import Terms
from torch_lla_em.jacobian.rows import Rows, Weights
from torch_lla_em.jacobian.terms import row_squares


class ByFactors(Rows):
    """The linear model at a batch by factors, and by ``torch.func`` for the rest of the weights."""

    def __init__(
        self,
        weights: Weights,
        terms: Terms,
        rest: ByAutodiff | None = None,
        columns: int | None = None,
    ):
        """``columns``: the largest number of columns at once; None: the best number."""
        sides = [terms.at_once, columns, *(() if rest is None else (rest.pushed, rest.pulled))]
        at_once = min((side for side in sides if side is not None), default=None)
        super().__init__(weights, (at_once, at_once))
        self.terms, self._rest = terms, rest
        names = dict.fromkeys(name for term in terms.parts for name in term.names)
        self._values = weights.values(tuple(names))
        self.nbytes = terms.nbytes

    @property
    def f(self) -> Tensor:
        """f(x), shape (B, ..., C)."""
        return self.terms.f

    def row_squares(self, u: Tensor) -> dict[str, Tensor]:
        """Return Σ_n Σ_k (J_nᵀ u_nk)² by name, of the weights that have factors."""
        u = u.reshape(*u.shape[:2], self.f[0].numel()).transpose(0, 1)
        parts = self.terms.parts
        return {name: row_squares(parts, value, name, u) for name, value in self._values.items()}

    def push(self, w: Tensor) -> Tensor:
        """Return J w, shape (K, B, ..., C), of columns (K, P)."""
        parts = [self._push(directions) for directions in self._chunks(w)]
        Jw = parts[0] if len(parts) == 1 else torch.cat(parts)
        return Jw if self._rest is None else Jw + self._rest.push(w)

    def _push(self, directions: dict[str, Tensor]) -> Tensor:
        own = {name: directions[name].to(value) for name, value in self._values.items()}
        K, f = len(next(iter(own.values()))), self.f
        Jw = f.new_zeros(K, len(f), f[0].numel())
        for term in self.terms.parts:
            Jw += term.push(own).transpose(0, 1)
        return Jw.view(K, *f.shape)

    def _pull(self, u: Tensor) -> dict[str, Tensor]:
        total = {} if self._rest is None else self._rest._pull(u)
        K = len(u)
        u = u.reshape(K, len(self.f), self.f[0].numel()).transpose(0, 1)
        for term in self.terms.parts:
            for name, pulled in zip(term.names, term.pull(u)):
                pulled = pulled.reshape(K, *self._values[name].shape)
                total[name] = pulled if name not in total else total[name].add_(pulled)
        return total
