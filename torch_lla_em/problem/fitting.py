"""The end of memory: a batch's work in pieces that fit, with the same result."""

from __future__ import annotations

import logging
from functools import partial
from math import inf
from typing import Any

from torch import Tensor

from torch_lla_em.data import Batch
from torch_lla_em.jacobian import Factors
from torch_lla_em.problem.graphs import Graphs
from torch_lla_em.problem.passes import BY_COLUMN, Fold, Layer, LocalPasses, Pass, Passes, Sums
from torch_lla_em.runtime import DoesNotFit, Interrupted, release, shortage_of

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

        self.graphs: Graphs | None = None
        """Of what kept batches add, where they are asked for."""

        self._factors: dict[tuple[int, int], Factors] = {}
        self._of: object = None

    @property
    def _keeps(self) -> bool:
        return self._of is not None and self.room > 0

    def take(self, columns: int | None, rows: int | None) -> None:
        """Take at most so many columns, and rows of a batch, at once."""
        if columns is not None:
            self._model.columns = min(columns, self._model.columns or columns)
        self.rows = min(self.rows, rows or inf)

    def around(self, fold: Fold, w: Tensor, task: Pass) -> Sums:
        """Return the sums, of each batch in pieces that fit."""
        before = self._model.columns, self.rows
        try:
            return fold(w, task._replace(add=partial(self._add, task)))
        except DoesNotFit:
            self._model.columns, self.rows = before
            raise

    def forget(self) -> None:
        """Give up what is kept for speed."""
        self._factors, self.room, self.graphs = {}, 0.0, None

    def _add(self, task: Pass, batch: Batch, w: Tensor, sums: Sums) -> None:
        """Add a batch in pieces; where memory ends, take less at once and add the rest."""
        blocks = [name for name, kind in task.kinds.items() if kind in BY_COLUMN]
        for piece in self._local.pieces(batch, self.rows):
            counted = self._local.data.num_outputs
            try:
                inputs = known = self._known(piece)
                if known is None:
                    inputs = self._model.prepare(piece.inputs, len(w), self._keeps)
                    self._keep(piece, inputs)
                # what is made anew with every pass lies elsewhere every time
                stays = self._of is not None and (known is not None or inputs is piece.inputs)
                piece_of = piece._replace(inputs=inputs)
                searching = self._local.finite.searching
                if self.graphs is None or task.fixed is None or not stays or searching:
                    task.add(piece_of, w, sums)
                else:
                    self.graphs.add(task, piece_of, w, sums)
                continue
            except (RuntimeError, MemoryError) as error:
                shortage = shortage_of(error)
                done = error.columns_done if blocks and isinstance(error, Interrupted) else 0
            release()  # what the failed attempt held is free only outside of the handler
            self._local.data.num_outputs = counted
            if done < len(w):
                self._halve(piece, len(w) - done, shortage)
                rest = {**sums, **{name: sums[name][done:] for name in blocks}}
                self._add(task, piece, w[done:], rest)

    def _known(self, piece: Batch) -> Factors | None:
        """Return the factors that are kept beside a kept batch."""
        kept = self._local.data.kept
        if kept is not self._of:
            self._factors, self._of = {}, kept
            if self.graphs is not None:
                self.graphs.clear()
        return self._factors.get(piece.place)

    def _keep(self, piece: Batch, inputs: Any) -> None:
        if isinstance(inputs, Factors) and self._keeps:
            self.room -= inputs.nbytes
            if self.room > 0:
                self._factors[piece.place] = inputs

    def _halve(self, piece: Batch, columns: int, shortage: str) -> None:
        """Take less at once from now on: factors, columns, then rows; raise where it is one."""
        model, at_once = self._model, min(self._model.columns_at_once, columns)
        if self.graphs is not None:
            logger.warning("Out of memory: from now on without CUDA graphs.")
            self.graphs = None
        elif model.factored is not None:
            self.forget()
            model.leave_factors()
        elif at_once > 1:
            logger.warning("Out of memory: from now on %d columns at a time.", at_once // 2)
            model.columns = at_once // 2
        elif model.path.shared:  # a shared forward pass holds two at once
            model.path = model.path._replace(shared=False)
        else:
            size = (len(piece.rows) + 1) // 2
            if len(self._local.pieces(piece, size)) == 1:
                raise DoesNotFit(no_room(piece, model.layout.size, shortage))
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
