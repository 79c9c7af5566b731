"""Pieces of batches, and the linear model at them, whose factors are kept from pass to pass."""

from __future__ import annotations

from math import inf
from typing import Any

from torch_lla_em.data import Batch
from torch_lla_em.jacobian import LinearModel, Rows
from torch_lla_em.runtime import is_shortage

# rounding of a batch against its pieces, well below what another batch does to an example
_SPLIT_ERROR = 1e-2


class Pieces:
    """Cuts batches, once it is known that examples do not depend on each other."""

    def __init__(self, linear_model: LinearModel):
        self._model = linear_model
        self._alone: bool | None = None
        self.influence = 0.0
        """The relative change of the outputs for an example with the others, if they change."""

    def __call__(self, whole: Batch, at_most: float, aligned: bool = False) -> list[Batch]:
        """Return the batch in pieces, or whole where examples depend on each other.

        ``aligned``: cut where multiples of ``at_most`` rows of the pass have gone by.
        """
        first = at_most - whole.position % at_most if aligned and at_most < inf else at_most
        if len(whole.rows) <= first:
            return [whole]
        pieces = list(whole.split(int(at_most), int(first)))
        return pieces if len(pieces) > 1 and self.stand_alone(whole) else [whole]

    def stand_alone(self, whole: Batch) -> bool:
        """Whether examples have the same outputs with others beside them; of one, not known yet."""
        if self._alone is None and len(whole.rows) > 1:
            with self._model.network.guarded():
                self._alone = self._compare(whole)
        return bool(self._alone)

    def _compare(self, whole: Batch) -> bool:
        """Compare two examples with four, or one with two: the fewer, the more one changes."""
        size = 2 if len(whole.rows) > 3 else 1
        piece, more = next(whole.split(size)), next(whole.split(2 * size))
        try:
            f = self._model.outputs(more.inputs)[: len(piece.rows)]
            alone = self._model.outputs(piece.inputs)
        except Exception as error:
            if is_shortage(error):
                raise
            return False  # of shapes: inputs that only look as if they went by examples
        if alone.shape != f.shape:
            return False
        change = ((alone - f).norm() / f.norm()).item()
        rounding = max(_SPLIT_ERROR, 8 * self._model.rounding)  # of half precision, perhaps
        self.influence = change if change > rounding else 0.0
        return not self.influence


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
