"""The outputs at which the Hessian H is evaluated, and the squared features diag(Jᵀ H J)."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from torch_lla_em.data import Batch, Data
from torch_lla_em.jacobian import LinearModel, Rows

# entries of J w at the point that are kept: 256 MB in float32
_OUTPUTS_KEPT = 1 << 26
# examples whose sum is squared where there are no factors
_GROUP_ROWS = 32
# outputs of an example up to which all columns of S are taken, also of fewer samples
_EXACT_OUTPUTS = 32


class Point:
    """Returns the outputs at which H is evaluated, for each batch."""

    def __init__(self, data: Data, w: Tensor | None = None):
        self._data = data
        self.w = w
        """The w of J w, (1, P), on the network's device; None: the network's own outputs."""

        self._known: dict[tuple[int, int], Tensor] = {}
        self._last: tuple[Rows, Tensor] | None = None

    def of(self, rows: Rows) -> Tensor:
        """Return the outputs at which H is evaluated, (B, ..., C)."""
        return rows.f if self.w is None else rows.push(self.w)[0]

    def missing(self, rows: Rows, batch: Batch) -> Tensor | None:
        """Return w if its product with J is needed first, for ``note``, else None."""
        is_last = self._last is not None and self._last[0] is rows
        return None if is_last or self._kept(batch) is not None else self.w

    def note(self, rows: Rows, batch: Batch, Jw: Tensor) -> None:
        """Keep J w of a batch: for its next columns, and for later passes if there is memory."""
        self._last = rows, Jw
        held = sum(map(torch.numel, self._known.values())) + Jw.numel()
        if batch.is_kept and held <= _OUTPUTS_KEPT:
            self._known[batch.place] = Jw.clone()

    def outputs(self, rows: Rows, batch: Batch) -> Tensor:
        """Return the outputs at which H is evaluated, after ``missing`` and ``note``."""
        known = self._kept(batch)
        if known is None and self._last is not None and self.w is not None:
            known = self._last[1]
        return rows.f if known is None else known

    def _kept(self, batch: Batch) -> Tensor | None:
        return None if not batch.is_kept else self._known.get(batch.place)


class RowSquares:
    """Adds up K times Σ_n diag(J_nᵀ H_n J_n), the squared features of all examples.

    By factors of J the gradients of single examples are known: the columns of S give the exact sum,
    or where an example has more outputs than there are samples, the draws S ε give one with next to
    no error. Other weights have the squares of sums over up to 32 examples: the same expectation,
    since the draws of examples are independent.
    """

    def __init__(self, linear_model: LinearModel, num_samples: int):
        self._model, self._num_samples = linear_model, num_samples

    @property
    def rows_at_once(self) -> float:
        """Return the largest number of examples of a piece."""
        known = set(self._model.factored) if self._model.report is not None else set()
        return inf if known == set(self._model.layout.names) else _GROUP_ROWS

    def columns(self, samples: Tensor, at: Tensor) -> Tensor | None:
        """Return this share of the unit columns, times √K; None for S ε of rows with many outputs."""
        size = at[0].numel()
        if size > max(self._num_samples, _EXACT_OUTPUTS):
            return None
        # no index of a list, which a GPU would be waited for
        eye = self._num_samples**0.5 * torch.eye(size, dtype=at.dtype, device=at.device)
        units = torch.cat([eye[k :: self._num_samples] for k in samples.tolist()])
        return units.view(-1, 1, *at.shape[1:]).expand(-1, *at.shape)

    def __call__(self, rows: Rows, own: Tensor, product: Tensor) -> Tensor:
        """Return what a batch adds for some of the samples, (P,), from S times ``columns`` and Jᵀ S ε."""
        layout = self._model.layout
        squares, total = rows.row_squares(own), product.square().sum(0)
        for name, block in zip(layout.names, total.split(layout.sizes)):
            if name in squares:
                block.copy_(squares[name].flatten())
        return total
