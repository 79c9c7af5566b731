"""The end of memory: a batch's work in pieces that fit, with the same result."""

from __future__ import annotations

import logging
from functools import partial
from math import inf
from typing import Any

from torch import Tensor

from torch_lla_em.data import Batch
from torch_lla_em.jacobian import Rows
from torch_lla_em.problem.passes import BY_COLUMN, Fold, Layer, LocalPasses, Pass, Passes, Sums
from torch_lla_em.runtime import DoesNotFit, release, shortage_of

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

        self._factors: dict[tuple[int, int], Rows] = {}
        self._kept: Any = None
        """The pass whose batches they are of."""

        self._last: tuple[Batch, Rows] | None = None
        """The batch under way, and the linear model there."""

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
        finally:
            self._last = None

    def forget(self) -> None:
        """Give up what is kept for speed."""
        self._factors, self._last, self.room = {}, None, 0.0

    def _add(self, task: Pass, batch: Batch, w: Tensor, sums: Sums) -> None:
        """Add a batch in pieces; where memory ends, take less at once and add the rest."""
        blocks = [name for name, kind in task.kinds.items() if kind in BY_COLUMN]
        for piece in self._local.pieces(batch, self.rows):
            counted, done, step = self._local.data.num_outputs, 0, len(w)
            try:
                rows = self._rows(piece, len(w))
                step = (rows.columns if task.kinds else None) or len(w)
                for columns in w.split(step):
                    here = slice(done, done + len(columns))
                    own = {**sums, **{name: sums[name][here] for name in blocks}}
                    task.add(rows, piece, columns, own)
                    done += len(columns)
                continue
            except (RuntimeError, MemoryError) as error:
                shortage = shortage_of(error)
            rows = self._last = None
            release()  # what the failed attempt held is free only outside of the handler
            self._local.data.num_outputs = counted
            taken = min(step, len(w) - done, self._model.columns or step)
            self._halve(piece, taken, shortage)
            rest = {**sums, **{name: sums[name][done:] for name in blocks}}
            self._add(task, piece, w[done:], rest)

    def _rows(self, piece: Batch, columns: int) -> Rows:
        """Return the linear model at a piece of a batch, whose factors are found once."""
        whole, start = piece.whole or (piece, 0)
        if len(whole.rows) > self.rows:  # of other sizes in every pass
            whole, start = piece._replace(kept=None), 0
        if self._last is None or self._last[0] is not whole:
            self._last = whole, self._known(whole, columns)
        return self._last[1].part(slice(start, start + len(piece.rows)), piece.inputs)

    def _known(self, batch: Batch, columns: int) -> Rows:
        """Return the linear model at a batch, with factors where they are kept or worth finding."""
        if batch.kept is None:
            return self._model.at(batch.inputs, columns)
        if batch.kept is not self._kept:
            self._factors, self._kept = {}, batch.kept
        found = self._factors.get(batch.place)
        if found is None:
            found = self._model.at(batch.inputs, columns, keep=self.room > 0)
            if self.room > 0 and found.nbytes < inf:
                self.room -= found.nbytes
                if self.room > 0:
                    self._factors[batch.place] = found
        return found

    def _halve(self, piece: Batch, columns: int, shortage: str) -> None:
        """Take less than so many columns at once from now on; raise where that cannot be."""
        model = self._model
        if model.factored is not None:
            self.forget()
            model.leave_factors()
        elif columns > 1:
            logger.warning("Out of memory: from now on %d columns at a time.", columns // 2)
            model.columns = columns // 2
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
