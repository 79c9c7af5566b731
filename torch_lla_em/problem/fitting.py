"""The end of memory: a batch's work in pieces that fit, with the same result."""

from __future__ import annotations

import logging
from math import inf
from typing import Any

from torch import Tensor

from torch_lla_em.data import Batch
from torch_lla_em.jacobian import Factors
from torch_lla_em.problem.passes import BY_COLUMN, Add, Fold, Layer, LocalPasses, Pass, Passes, Sums
from torch_lla_em.runtime import DoesNotFit, Interrupted, is_shortage, release, words_of

logger = logging.getLogger("torch_lla_em")


class Fitting(Layer):
    """The one handler of memory's end inside a pass, and the one place that halves.

    First columns, then rows, where the network takes rows alone. What was found is kept, unless
    it was in vain: there may be more room later.
    """

    def __init__(self, inner: Passes, local: LocalPasses):
        super().__init__(inner)
        self._local, self._model = local, local.linear_model
        self.rows = inf
        """Rows of a batch at once."""

        self.room = 0.0
        """Bytes that factors of the Jacobian may take, while their batches are kept."""

        self._factors: dict[tuple[int, int], Factors] = {}
        self._of: object = None

    def take(self, columns: int | None, rows: int | None) -> None:
        """Take at most so many columns, and rows of a batch, at once."""
        if columns is not None:
            self._model.columns = min(columns, self._model.columns or columns)
        self.rows = min(self.rows, rows or inf)

    def around(self, fold: Fold, w: Tensor, task: Pass) -> Sums:
        """Return the sums, of each batch in pieces that fit."""
        blocks = [name for name, kind in task.kinds.items() if kind in BY_COLUMN]

        def add(batch: Batch, w: Tensor, sums: Sums) -> None:
            for piece in self._local.pieces(batch, self.rows):
                add_piece(piece, w, sums)

        def add_piece(piece: Batch, w: Tensor, sums: Sums) -> None:
            done, shortage = self._attempt(task.add, piece, w, sums)
            if shortage is None:
                return
            done = done if blocks else 0
            w, sums = w[done:], {**sums, **{name: sums[name][done:] for name in blocks}}
            if self._halves_columns(len(w)):
                add_piece(piece, w, sums)
            else:
                self._halve_rows(piece, shortage)
                add(piece, w, sums)

        before = self._model.columns, self.rows
        try:
            return fold(w, task._replace(add=add))
        except DoesNotFit:
            self._model.columns, self.rows = before
            raise

    def _attempt(self, add: Add, piece: Batch, w: Tensor, sums: Sums) -> tuple[int, str | None]:
        """Return the columns that were added, and what the allocator said if not all were."""
        counted = self._local.data.num_outputs
        try:
            if len(w):
                add(piece._replace(inputs=self._prepared(piece, len(w))), w, sums)
            return len(w), None
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, DoesNotFit) or not is_shortage(error):
                raise
            done = error.columns_done if isinstance(error, Interrupted) else 0
            shortage = words_of(error)
        release()  # what the failed attempt held is free only outside of the handler
        self._local.data.num_outputs = counted
        return done, shortage

    def _prepared(self, piece: Batch, columns: int) -> Any:
        """Return what several products at a piece share; factors are kept as its batch is."""
        kept = self._local.data.kept
        if kept is not self._of:
            self._factors, self._of = {}, kept
        if piece.place in self._factors:
            return self._factors[piece.place]
        keep = kept is not None and self.room > 0
        inputs = self._model.prepare(piece.inputs, columns, keep)
        if keep and isinstance(inputs, Factors):
            self.room -= inputs.nbytes
            if self.room > 0:
                self._factors[piece.place] = inputs
        return inputs

    def _halves_columns(self, left: int) -> bool:
        if self._model.factored is not None:
            self._factors, self.room = {}, 0.0
            self._model.leave_factors()
            return True
        columns = min(self._model.columns_at_once, left)
        if columns == 1 and not self._model.path.shared:
            return False
        if columns == 1:  # a shared forward pass holds two at once
            self._model.path = self._model.path._replace(shared=False)
            return True
        logger.warning("Out of memory: from now on %d columns at a time.", columns // 2)
        self._model.columns = columns // 2
        return True

    def _halve_rows(self, piece: Batch, shortage: str) -> None:
        size = (len(piece.rows) + 1) // 2
        if len(self._local.pieces(piece, size)) == 1:
            raise DoesNotFit(no_room(piece, self._model.layout.size, shortage))
        logger.warning("Out of memory: from now on at most %d rows of a batch at a time.", size)
        self.rows = size


def no_room(piece: Batch, P: int, shortage: str) -> str:
    """Return what is said where one column of a piece that cannot be cut does not fit."""
    rows = len(piece.rows)
    return (
        f"One column of {rows} row{'s' * (rows > 1)} of batch {piece.index} does not fit into "
        f"memory ({shortage}). It takes a forward pass that keeps its activations, twice their "
        f"largest, and 2 P numbers for a direction and a gradient ({2 * P * 4 / 1e9:.2g} GB "
        f"for P = {P}). What helps: smaller batches or inputs; fewer random weights "
        '(parameters="last_layer", or name patterns); fewer samples, or their vectors on the '
        'CPU (compute=Compute(vectors="cpu")).'
    )
