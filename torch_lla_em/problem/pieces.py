"""Batches in pieces of fewer rows, where the network takes rows alone."""

from __future__ import annotations

from math import inf

from torch_lla_em.data import Batch
from torch_lla_em.jacobian import LinearModel
from torch_lla_em.runtime import attempt, is_shortage

# rounding of a batch against its pieces, well below what another batch does to a row
_SPLIT_ERROR = 1e-2


class Pieces:
    """Cuts batches, once it has been seen that rows do not depend on each other."""

    def __init__(self, linear_model: LinearModel):
        self._model = linear_model
        self._alone: bool | None = None
        self.influence = 0.0
        """By how much the outputs of a row change with the others, relative, if they do."""

    def __call__(self, whole: Batch, at_most: float, aligned: bool = False) -> list[Batch]:
        """Return the batch in pieces, or whole where the network does not take rows alone.

        ``aligned``: cut where multiples of ``at_most`` rows of the pass have gone by.
        """
        first = at_most - whole.position % at_most if aligned and at_most < inf else at_most
        if len(whole.rows) <= first:
            return [whole]
        pieces = list(whole.split(int(at_most), int(first)))
        return pieces if len(pieces) > 1 and self.stand_alone(whole, int(at_most)) else [whole]

    def stand_alone(self, whole: Batch, size: int) -> bool:
        """Whether rows have the same outputs with as many others, or half as many, beside them."""

        def compare() -> bool:
            piece, more = next(whole.split(size)), next(whole.split(2 * size))
            try:
                f = self._model.outputs(more.inputs)[: len(piece.rows)]
                alone = self._model.outputs(piece.inputs)
            except Exception as error:
                if is_shortage(error):
                    raise
                return False  # of shapes: inputs that only look as if they went by rows
            if alone.shape != f.shape:
                return False
            change = ((alone - f).norm() / f.norm()).item()
            rounding = max(_SPLIT_ERROR, 8 * self._model.rounding)  # of half precision, perhaps
            self.influence = change if change > rounding else 0.0
            return not self.influence

        while self._alone is None:
            answer, shortage = attempt(compare)
            if shortage is None or size == 1:
                self._alone = bool(answer)
            size //= 2
        return self._alone
