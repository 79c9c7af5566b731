"""The one loop over the data: what every batch adds, in pieces that fit, summed over ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import Batch, Data
from torch_lla_em.jacobian import LinearModel, NetworkState, Rows, explained, layer_of
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.problem.finite import OUTPUTS, Finite, all_finite, is_finite, is_moderate, require
from torch_lla_em.problem.pieces import KeptRows, Pieces
from torch_lla_em.problem.placement import Vectors
from torch_lla_em.runtime import DoesNotFit, is_shortage, release, shortage_of

logger = logging.getLogger("torch_lla_em")

BLOCK, VECTOR, SCALAR, OF_ROWS = "block", "vector", "scalar", "of rows"
"""What is summed: a vector a column, (K, P); one vector, (P,); a number in float64; or what
a column says of every example, (K, N C), each example's own once."""

_BY_COLUMN = BLOCK, OF_ROWS

# how many examples the probe looks at
_FEW = 8

Sums = dict[str, Tensor]
Add = Callable[[Rows, Batch, Tensor, Sums], None]
"""(rows, batch, columns w, sums): add what the batch contributes for these columns.

Whatever takes memory has to come before the first number is added."""


class Pass(NamedTuple):
    """One pass: what is summed, and how a batch adds to it."""

    kinds: dict[str, str]
    """BLOCK, VECTOR, SCALAR or OF_ROWS, by name; of none, all columns come at once."""

    add: Add
    look: Add | None = None
    """What raises at a batch where something is not finite."""

    at_most: float = inf
    """Rows at a time, cut at multiples of it, where the network takes rows alone."""

    squares: bool = False
    """Whether the squares of single rows are needed, which takes factors where there are any."""


Fold = Callable[[Tensor, Pass], Sums]
"""(columns w, pass) -> sums over one batch of every rank."""


class Sweep:
    """Takes passes over the data.

    The only handler of memory that runs out in a pass: it takes fewer columns at once from then
    on, then fewer rows, and goes on where it was. What did not help is taken back.
    """

    def __init__(
        self, linear_model: LinearModel, likelihood: Likelihood, data: Data, vectors: Vectors
    ):
        self.linear_model, self.data, self.vectors = linear_model, data, vectors
        self._likelihood = likelihood
        self.finite = Finite(linear_model.network.device)
        """Whether the pass under way is."""

        self.pieces, self.kept = Pieces(linear_model), KeptRows(linear_model)
        self._begun_with = NetworkState(linear_model.network, exact=False)
        self.rows = inf
        """Rows of a batch at once."""

        self.batch_rows = inf
        """Rows beyond which a batch is taken as several, because they are no cheaper together."""

        self.columns: int | None = None
        """Columns on the device at once, where vectors live elsewhere; None: all of them."""

        self._seen: Rows | None = None
        self._loaded = 0
        """Rows of the loader's batch that is under way."""

        self.report: Callable[[float | None], None] | None = None
        """Called with the share of a pass that is done, if that is known."""

    def take(self, columns: int | None, rows: int | None) -> None:
        """Take at most so many columns, and rows of a batch, at once."""
        if columns is not None:
            self.linear_model.columns = min(columns, self.linear_model.columns or columns)
        self.rows = min(self.rows, rows or inf)

    def __call__(self, w: Tensor, task: Pass, batch: Batch | None = None) -> Sums:
        """Return the sums over all batches of all ranks, or over one of each, where vectors live.

        For columns w, (K, P), or the numbers of samples, (K,). Where vectors live beside the
        device, or in slices on the ranks, a group of columns after the other takes a pass.
        """
        vectors, step = self.vectors, self.columns or len(w)
        if vectors.group is not None:  # no rank ever holds more than its share of the vectors
            step = min(step, -(-len(w) // vectors.group.size))
        w = self._agreed(w)
        found: Sums = {}
        for start in range(0, len(w), step):
            columns = slice(start, start + step)
            near = vectors.visiting(w[columns]) if w.is_floating_point() else w[columns]
            for name, own in self.over(near, task, batch).items():
                kind = task.kinds[name]
                sliced = vectors.group is not None and kind in (BLOCK, VECTOR)
                own = vectors.sum(own) if sliced else self.data.group.sum(own)
                if kind not in _BY_COLUMN:
                    own = own.to(vectors.device) if kind == VECTOR else own
                    found[name] = found[name] + own if start else own
                elif len(near) == len(w) and own.device.type == vectors.device.type:
                    found[name] = own
                else:
                    if not start:
                        found[name] = vectors.home(len(w), own.shape[1])
                    found[name][columns] = own
        return found

    def over(self, w: Tensor, task: Pass, batch: Batch | None = None) -> Sums:
        """Return the sums over this rank's batches, or over one, where the network is."""
        limits, sums, rows_done = (self.linear_model.columns, self.rows), self._zeros(w, task), 0
        try:
            for one in self.batches(task.at_most) if batch is None else [batch]:
                todo = [(piece, 0) for piece in self.pieces(one, self.rows) if len(piece.rows)]
                while todo:  # pieces of the batch, and how many of their columns are done
                    piece, done = todo.pop(0)
                    step, counted = len(w) - done, self.data.num_outputs
                    try:
                        rows = self.kept(piece, self.rows, inf if task.squares else step)
                        step = min(step, (rows.columns if task.kinds else None) or step)
                        for columns in w[done:].split(step):
                            task.add(rows, piece, columns, _of(sums, task, done, len(columns)))
                            done += len(columns)
                        continue
                    except (RuntimeError, MemoryError) as error:
                        shortage = shortage_of(error)
                    rows = self._seen = None
                    self.kept.let_go()
                    release()  # what the failed attempt held is free only outside of the handler
                    self.data.num_outputs = counted
                    self._halve(piece, min(step, self.linear_model.columns or step), shortage)
                    todo[:0] = [(smaller, done) for smaller in self.pieces(piece, self.rows)]
                rows_done += len(one.rows)
                self._say(rows_done if batch is None else 0)
        except DoesNotFit:
            self.linear_model.columns, self.rows = limits
            raise
        finally:
            self.kept.let_go()
        if batch is None and task.look is not None:
            self._name_fault(w, task, sums)
        return sums

    def steps(self) -> Iterator[tuple[int, Fold]]:
        """Yield the rows of one batch of every rank, and the pass over them; ranks go together."""
        for batch in self.batches(in_step=True):
            yield batch.step_rows or len(batch.rows), partial(self, batch=batch)

    def batches(self, at_most: float = inf, in_step: bool = False) -> Iterator[Batch]:
        """Yield the batches of one pass, inside the network's guard."""
        self.finite.fine.fill_(True)
        position, class_dim = 0, self.linear_model.network.class_dim
        with self.linear_model.network.guarded():
            for whole in self.data.batches(in_step=in_step):
                if in_step and not len(whole.rows):
                    yield whole
                    continue
                self.probe(whole)
                whole, self._loaded = whole._replace(position=position), len(whole.rows)
                position += len(whole.rows)
                for part in [whole] if in_step else self.pieces(whole, self.batch_rows):
                    start = 0
                    for batch in self.pieces(part, at_most, aligned=True):
                        targets = self._likelihood.align(batch.targets, class_dim)
                        yield batch._replace(targets=targets, whole=(part, start))
                        start += len(batch.rows)
        self.refuse_changes()

    def probe(self, batch: Batch) -> None:
        """Have the network's derivatives checked, the first time."""
        if self.linear_model.report is None:
            try:
                with explained(self.linear_model.network, batch.inputs):
                    self._probe(batch)
            except ValueError:  # of outputs, perhaps
                with self.linear_model.network.guarded():
                    require(batch, OUTPUTS, self.linear_model.outputs(batch.inputs))
                raise

    def refuse_changes(self) -> None:
        """Raise where the weights are no longer those that the fit began with.

        It waits for the device, and is to be called before anything is kept.
        """
        changed = self._begun_with.changed(self.linear_model.network)
        if changed is not None:
            raise RuntimeError(
                f"The network's {changed!r} was changed while it was being fitted: leave the network "
                "alone until fit returns, or fit a copy.deepcopy of it."
            )

    def _probe(self, batch: Batch) -> None:
        model, few = self.linear_model, next(batch.split(_FEW))
        try:
            model.probe(few.inputs)
        except Exception as error:
            in_network = layer_of(error, model.network) is not None and not is_shortage(error)
            if len(few.rows) == len(batch.rows) or not in_network:
                raise
            model.probe(batch.inputs)  # inputs that only look as if they went by examples

    def is_new(self, rows: Rows) -> bool:
        """Whether these rows have not been asked for before this."""
        is_new, self._seen = self._seen is not rows, rows
        return is_new

    def _say(self, rows: int) -> None:
        """Report that so many rows of this pass are done."""
        if self.report is not None:
            data = self.data
            number = data.num_rows or (data.num_batches() or 0) * self._loaded
            known = rows and number
            self.report(min(1.0, rows * data.group.size / number) if known else None)

    def _halve(self, piece: Batch, columns: int, shortage: str) -> None:
        """Take less than so many columns at once from now on; raise where that cannot be."""
        model = self.linear_model
        if model.factored is not None:
            self.kept.forget()
            model.leave_factors()
        elif columns > 1:
            logger.warning("Out of memory: from now on %d columns at a time.", columns // 2)
            model.columns = columns // 2
        elif model.path.shared:  # a shared forward pass holds two at once
            model.path = model.path._replace(shared=False)
        else:
            size = (len(piece.rows) + 1) // 2
            if len(self.pieces(piece, size)) == 1:
                raise DoesNotFit(no_room(piece, model.layout.size, shortage))
            logger.warning("Out of memory: from now on at most %d rows of a batch at a time.", size)
            self.rows = size

    def _zeros(self, w: Tensor, task: Pass) -> Sums:
        """Return sums of nothing, where the network is."""
        device, P = self.linear_model.network.device, self.linear_model.layout.size
        shapes = {BLOCK: (len(w), P), VECTOR: (P,), OF_ROWS: (len(w), self.data.num_outputs)}
        return {
            name: torch.zeros((), dtype=torch.float64, device=device)
            if kind == SCALAR
            else torch.zeros(shapes[kind], dtype=self.linear_model.dtype, device=device)
            for name, kind in task.kinds.items()
        }

    def _agreed(self, w: Tensor) -> Tensor:
        """Return w, or rank 0's where another machine's rounding has led to other bits."""
        group = self.data.group
        if group.size == 1 or self.vectors.group is not None or not w.is_floating_point():
            return w
        mark = [w.double().sum().item(), w.double().norm().item()]
        alike = group.meet(f"a pass at {tuple(w.shape)}", repr(mark), lambda m: len(set(m)) == 1)
        return w if alike else group.from_first(w)

    def _name_fault(self, w: Tensor, task: Pass, sums: Sums) -> None:
        """Name the batch at fault where sums are not finite; w beyond all measure, solvers know."""
        vectors, fine = [total for total in sums.values() if total.dim()], self.finite.fine
        moderate = is_moderate(w) if w.is_floating_point() else torch.ones_like(fine)
        # read at once, as the host waits each time
        fine, known, *finite = torch.stack([fine, moderate, *map(all_finite, vectors)]).tolist()
        fault = not fine or (known and not (all(finite) or all(map(is_finite, vectors))))
        if self.data.group.meet("sums that are not finite", fault, any):
            self.over(w, Pass({}, task.look, at_most=task.at_most))


def _of(sums: Sums, task: Pass, start: int, count: int) -> Sums:
    """Return the sums for some of the columns."""
    here = slice(start, start + count)
    return {n: own[here] if task.kinds[n] in _BY_COLUMN else own for n, own in sums.items()}


def no_room(piece: Batch, P: int, shortage: str) -> str:
    """Return the message where one column of a piece that cannot be cut does not fit."""
    rows = len(piece.rows)
    return (
        f"One column of {rows} row{'s' * (rows > 1)} of batch {piece.index} does not fit into "
        f"memory ({shortage}). It takes a forward pass that keeps its activations, twice their "
        f"largest, and 2 P numbers for a direction and a gradient ({2 * P * 4 / 1e9:.2g} GB "
        f"for P = {P}). What helps: smaller batches or inputs; fewer random weights "
        '(parameters="last_layer", or name patterns); fewer samples, or their vectors on the '
        'CPU (compute=Compute(vectors="cpu")).'
    )
