"""The squared features of the g-prior: the same however the data are cut into batches."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from torch_lla_em.jacobian import LinearModel, Rows

# rows whose sum is squared where there are no factors
_GROUP_ROWS = 32
# outputs of a row up to which all columns of S are taken, also of fewer samples
_EXACT_OUTPUTS = 32


class RowSquares:
    """Adds up K times Σ_n diag(J_nᵀ H_n J_n), the squared features of all rows.

    By factors of J the gradients of single rows are known: the columns of S give the exact sum, or
    where a row has more outputs than there are samples, the draws S ε give one with next to no
    error. Other weights have sums over groups of 32 rows squared: the same expectation, since the
    noise of rows is independent. Groups go on from batch to batch.
    """

    def __init__(self, linear_model: LinearModel, num_samples: int):
        self._model, self._num_samples = linear_model, num_samples
        self._sums: dict[int, Tensor] = {}
        """Jᵀ S ε of each sample over the rows so far of the group under way."""

        self._position, self._opens = -1, True

    @property
    def rows_at_once(self) -> float:
        """Return how many rows a piece of a batch may have."""
        known = self._model.factored
        names = () if known is None or self._model.report is None else known.names
        return inf if set(names) == set(self._model.layout.names) else _GROUP_ROWS

    def columns(self, samples: Tensor, at: Tensor) -> Tensor | None:
        """Return this share of the unit columns, times √K; None for S ε of rows with many outputs."""
        size = at[0].numel()
        if size > max(self._num_samples, _EXACT_OUTPUTS):
            return None
        # no index of a list, which a GPU would be waited for
        eye = self._num_samples**0.5 * torch.eye(size, dtype=at.dtype, device=at.device)
        units = torch.cat([eye[k :: self._num_samples] for k in samples.tolist()])
        return units.view(-1, 1, *at.shape[1:]).expand(-1, *at.shape)

    def __call__(
        self, rows: Rows, position: int, samples: Tensor, products: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return what a batch adds for some of the samples, (P,).

        ``position``: rows of the pass before it; ``products``: S times ``columns``, and Jᵀ S ε.
        """
        own, product = products
        squares, layout = rows.row_squares(own), self._model.layout
        total, names = product.new_zeros(layout.size), tuple(squares)
        layout.add_(total, squares)
        if set(names) < set(layout.names):
            total += self._of_groups(position, samples.tolist(), product) * self._mask(names)
        return total

    def _of_groups(self, position: int, samples: list[int], product: Tensor) -> Tensor:
        """Return what the squares of sums over groups of rows grow by."""
        if position != self._position:  # else other samples of the same rows
            if position < self._position:
                self._sums.clear()
            group = position // _GROUP_ROWS
            self._opens = position == 0 or group != self._position // _GROUP_ROWS
            self._position = position
        if self._opens:
            grown, sums = product.square().sum(0), product.clone()
        else:
            before = torch.stack([self._sums[k] for k in samples])
            grown, sums = (product * (product + 2 * before)).sum(0), before + product
        self._sums.update(zip(samples, sums))
        return grown

    def _mask(self, names: tuple[str, ...]) -> Tensor:
        """Return which weights have no factors, (P,)."""
        layout = self._model.layout
        own = [name not in names for name in layout.names]
        return layout.expand(torch.tensor(own, device=self._model.network.device))
