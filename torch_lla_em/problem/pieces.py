"""Pieces of batches, for networks whose outputs for an example do not depend on the others."""

from __future__ import annotations

from math import inf

from torch_lla_em.data import Batch
from torch_lla_em.jacobian import LinearModel
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
