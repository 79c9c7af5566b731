"""Splits batches into pieces, and stores the Jacobian factors of batches between passes."""

from __future__ import annotations

from math import inf

from torch_lla_em.data import Batch
from torch_lla_em.jacobian import LinearModel, Rows
from torch_lla_em.runtime import suppressed

# tolerance for rounding when outputs of a batch and of its pieces are compared
_SPLIT_ERROR = 1e-2


class Pieces:
    """Splits batches, if the outputs of an example do not depend on the others in its batch."""

    def __init__(self, linear_model: LinearModel):
        self._model = linear_model
        self._alone: bool | None = None
        self.influence = 0.0
        """The relative change of the outputs for an example with the others, if they change."""

    def __call__(self, whole: Batch, at_most: float) -> list[Batch]:
        """Return the batch in pieces, or whole if examples depend on each other."""
        if len(whole.rows) <= at_most:
            return [whole]
        pieces = list(whole.split(int(at_most)))
        return pieces if len(pieces) > 1 and self.stand_alone(whole) else [whole]

    def stand_alone(self, whole: Batch) -> bool:
        """Whether the outputs of an example are the same without the others in its batch."""
        if self._alone is None and len(whole.rows) > 1:
            with self._model.network.guarded():
                self._alone = self._compare(whole)
        return bool(self._alone)

    def _compare(self, whole: Batch) -> bool:
        """Compare the outputs of two examples with those among four, or of one with those among two."""
        size = 2 if len(whole.rows) > 3 else 1
        piece, more = next(whole.split(size)), next(whole.split(2 * size))
        f = alone = None
        with suppressed():  # the first axis of the inputs may not be that of the examples
            f = self._model.outputs(more.inputs)[: len(piece.rows)]
            alone = self._model.outputs(piece.inputs)
        if f is None or alone is None or alone.shape != f.shape:
            return False
        change = ((alone - f).norm() / f.norm()).item()
        rounding = max(_SPLIT_ERROR, 8 * self._model.rounding)
        self.influence = change if change > rounding else 0.0
        return not self.influence


class FactorCache:
    """Returns the linear model at a batch, and stores its Jacobian factors between passes."""

    def __init__(self, linear_model: LinearModel):
        self._model = linear_model
        self.room = 0.0
        """Memory in bytes that the stored Jacobian factors may use, as the plan has decided."""

        self._left = 0.0
        """The part of it that is not used."""

        self.known: dict[tuple[int, int], Rows] = {}

    def __call__(self, batch: Batch, columns: float, at_once: int | None) -> Rows:
        """Return the linear model at a batch, for so many columns, so many of them at once."""
        if not batch.is_kept:
            return self._model.at(batch.inputs, columns, at_once=at_once)
        rows = self.known.get(batch.place)
        if rows is None:
            keep = self._left > 0 and bool(self._model.factored)
            rows = self._model.at(batch.inputs, columns, keep, at_once)
            if keep and rows.nbytes < inf:
                self._left -= rows.nbytes
                if self._left > 0:
                    self.known[batch.place] = rows
        return rows

    def allow(self, room: float) -> None:
        """Store factors in so many bytes."""
        self.room = self._left = room

    def forget(self) -> None:
        """Drop all stored factors, and store none from now on."""
        self.known, self.room, self._left = {}, 0.0, 0.0
