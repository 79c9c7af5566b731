"""The linear model at each batch, with its factors kept from pass to pass where they have room."""

from __future__ import annotations

from math import inf
from typing import Any

from torch_lla_em.data import Batch
from torch_lla_em.jacobian import LinearModel, Rows


class KeptRows:
    """Finds the linear model at pieces of batches, once for all pieces of a batch."""

    def __init__(self, linear_model: LinearModel):
        self._model = linear_model
        self.room = 0.0
        """Bytes that factors of the Jacobian may take, while their batches are kept."""

        self.known: dict[tuple[int, int], Rows] = {}
        self._pass: Any = None
        """The kept pass whose batches they are of."""

        self._last: tuple[Batch, Rows] | None = None
        """The batch under way, and the linear model there."""

    def __call__(self, piece: Batch, at_most: float, columns: float) -> Rows:
        """Return the linear model at a piece of at most so many rows, for so many columns."""
        whole, start = piece.whole or (piece, 0)
        if len(whole.rows) > at_most:  # of other sizes in every pass
            whole, start = piece._replace(kept=None), 0
        if self._last is None or self._last[0] is not whole:
            self._last = whole, self._found(whole, columns)
        return self._last[1].part(slice(start, start + len(piece.rows)), piece.inputs)

    def let_go(self) -> None:
        """Let go of the batch under way."""
        self._last = None

    def forget(self) -> None:
        """Give up all that is kept, for good."""
        self.known, self._last, self.room = {}, None, 0.0

    def _found(self, batch: Batch, columns: float) -> Rows:
        if batch.kept is None:
            return self._model.at(batch.inputs, columns)
        if batch.kept is not self._pass:
            self.known, self._pass = {}, batch.kept
        rows = self.known.get(batch.place)
        if rows is None:
            keep = self.room > 0 and self._model.factored is not None
            rows = self._model.at(batch.inputs, columns, keep)
            if keep and rows.nbytes < inf:
                self.room -= rows.nbytes
                if self.room > 0:
                    self.known[batch.place] = rows
        return rows
