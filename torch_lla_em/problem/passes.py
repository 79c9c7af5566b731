"""Passes over the data: one verb, ``fold``, and the plain loop that everything else wraps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from torch_lla_em.data import Batch, Data, tensors_in
from torch_lla_em.jacobian import LinearModel, explained
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.problem.finite import (
    DERIVATIVE,
    INPUTS,
    LIKELIHOOD,
    Finite,
    all_finite,
    is_finite,
    is_moderate,
)
from torch_lla_em.runtime import attempt, is_shortage

# rounding of a batch against its pieces, well below what another batch does to a row
_SPLIT_ERROR = 1e-2

BLOCK, VECTOR, SCALAR, OF_ROWS = "block", "vector", "scalar", "of rows"
"""What is summed: a vector a column, (K, P); one vector, (P,); a number in float64; or what
a column says of every row, (K, N C), each row's own once."""

BY_COLUMN = BLOCK, OF_ROWS

Sums = dict[str, Tensor]
Add = Callable[..., None]
"""(rows, batch, columns w, sums): add what the batch has to say of these columns."""

T = TypeVar("T")


class Pass(NamedTuple):
    """One pass: what is summed, and how a batch adds to it."""

    kinds: dict[str, str]
    """BLOCK, VECTOR or SCALAR, by name."""

    add: Add
    at_most: float = inf
    """Rows at a time, cut at multiples of it, where the network takes rows alone."""

    may_overflow: bool = False
    """Whether a likelihood that is not finite is a step too long, which solvers know."""


Fold = Callable[[Tensor, Pass], Sums]


class Step(NamedTuple):
    """One batch of every rank that has one left."""

    num_rows: int

    fold: Fold
    """The verb of ``Passes``, over this batch alone."""


class Passes(Protocol):
    """What is asked of data. Layers around the plain loop keep these verbs."""

    def fold(self, w: Tensor, task: Pass) -> Sums:
        """Return the sums over all batches, for columns w: (K, P), or (K,) numbers of samples."""
        ...

    def steps(self) -> Iterator[Step]:
        """Yield the batches of an epoch."""
        ...


class Layer:
    """Something around a fold, over all batches or over one."""

    def __init__(self, inner: Passes):
        self.inner = inner

    def around(self, fold: Fold, w: Tensor, task: Pass) -> Sums:
        """Return ``fold(w, task)``, with whatever this layer is for."""
        raise NotImplementedError

    def fold(self, w: Tensor, task: Pass) -> Sums:
        """Return the sums over all batches."""
        return self.around(self.inner.fold, w, task)

    def steps(self) -> Iterator[Step]:
        """Yield the batches of an epoch."""
        for step in self.inner.steps():
            yield step._replace(fold=partial(self.around, step.fold))


class LocalPasses:
    """The loop over this process's batches, inside the network's guard, and what it checks."""

    def __init__(self, linear_model: LinearModel, likelihood: Likelihood, data: Data):
        self.linear_model, self.data = linear_model, data
        self._likelihood = likelihood
        self.finite = Finite(linear_model.network.device)
        """Whether the pass under way is."""

        self._versions = linear_model.network.versions()
        self._sizes = linear_model.network.sizes()
        self._alone: bool | None = None
        self.influence = 0.0
        """By how much outputs depend on the other rows of a batch, relative; 0 within rounding."""

    def fold(self, w: Tensor, task: Pass) -> Sums:
        """Return the sums over all batches, where the network is."""
        sums = self.zeros(len(w), task.kinds)
        for batch in self.batches(task.at_most):
            task.add(batch, w, sums)
        self._name_fault(w, task, sums)
        return sums

    def steps(self) -> Iterator[Step]:
        """Yield the batches of an epoch; of several ranks, all go together."""

        def fold(batch: Batch, w: Tensor, task: Pass) -> Sums:
            sums = self.zeros(len(w), task.kinds)
            if len(batch.rows):
                task.add(batch, w, sums)
            return sums

        for batch in self.batches(in_step=True):
            yield Step(batch.step_rows or len(batch.rows), partial(fold, batch))

    def zeros(self, columns: int, kinds: dict[str, str]) -> Sums:
        """Return sums of nothing, where the network is."""
        model = self.linear_model
        device, P = model.network.device, model.layout.size
        shapes = {
            BLOCK: (columns, P),
            VECTOR: (P,),
            SCALAR: (),
            OF_ROWS: (columns, self.data.num_outputs),
        }
        return {
            name: torch.zeros(
                shapes[kind], dtype=torch.float64 if kind == SCALAR else model.dtype, device=device
            )
            for name, kind in kinds.items()
        }

    def batches(self, at_most: float = inf, in_step: bool = False) -> Iterator[Batch]:
        """Yield the batches of one pass, inside the network's guard."""
        self.finite.fine.fill_(True)
        position = 0
        with self.linear_model.network.guarded():
            for whole in self.data.batches(in_step=in_step):
                if in_step and not len(whole.rows):
                    yield whole
                    continue
                self.probe(whole)
                whole, start = whole._replace(position=position), 0
                position += len(whole.rows)
                for batch in self.pieces(whole, at_most, aligned=True):
                    self._check_inputs(batch)
                    class_dim = self.linear_model.network.class_dim
                    targets = self._likelihood.align(batch.targets, class_dim)
                    yield batch._replace(targets=targets, whole=(whole, start))
                    start += len(batch.rows)
        self.refuse_changed_weights()

    def probe(self, batch: Batch) -> None:
        """Have the network's derivatives checked, the first time."""
        if self.linear_model.report is None:
            try:
                with explained(self.linear_model.network, batch.inputs):
                    self.linear_model.probe(batch.inputs)
            except ValueError:  # of outputs, perhaps
                with self._searching():
                    self._check_inputs(batch)
                raise

    def _check_inputs(self, batch: Batch) -> None:
        for tensor in tensors_in(batch.inputs) if self.finite.searching else ():
            if tensor.is_floating_point():
                self.finite.check(batch.index, INPUTS, tensor)

    def pieces(self, whole: Batch, at_most: float, aligned: bool = False) -> list[Batch]:
        """Return the batch in pieces, or whole where the network does not take rows alone.

        ``aligned``: cut where multiples of ``at_most`` rows of the pass have gone by.
        """
        first = at_most - whole.position % at_most if aligned and at_most < inf else at_most
        if len(whole.rows) <= first:
            return [whole]
        pieces = list(whole.split(int(at_most), int(first)))
        return pieces if len(pieces) > 1 and self.rows_stand_alone(whole, int(at_most)) else [whole]

    def rows_stand_alone(self, whole: Batch, size: int) -> bool:
        """Whether rows have the same outputs with as many others, or half as many, beside them."""

        def compare() -> bool:
            piece, more = next(whole.split(size)), next(whole.split(2 * size))
            try:
                f = self.linear_model.outputs(more.inputs)[: len(piece.rows)]
                alone = self.linear_model.outputs(piece.inputs)
            except Exception as error:
                if is_shortage(error):
                    raise
                return False  # of shapes: inputs that only look as if they went by rows
            if alone.shape != f.shape:
                return False
            error = ((alone - f).norm() / f.norm()).item()
            self.influence = error if error > _SPLIT_ERROR else 0.0
            return not self.influence

        while self._alone is None:
            answer, shortage = attempt(compare)
            if shortage is None or size == 1:
                self._alone = bool(answer)
            size //= 2
        return self._alone

    def refuse_changed_weights(self) -> None:
        """Raise where the weights are no longer those that the fit began with.

        It reads all of them, and waits for the device: to be asked before anything is kept.
        """
        self._refuse_new_versions()
        if not torch.equal(self.linear_model.network.sizes(), self._sizes):
            raise RuntimeError(
                "The network's weights were changed through `.data`, or exchanged, while it was "
                "being fitted: leave the network alone until fit returns."
            )

    def _refuse_new_versions(self) -> None:
        for name, version in self.linear_model.network.versions().items():
            if version != self._versions.get(name):
                raise RuntimeError(
                    f"The network's {name!r} was changed while it was being fitted: leave the "
                    "network alone until fit returns, or fit a copy.deepcopy of it."
                )

    def _name_fault(self, w: Tensor, task: Pass, sums: Sums) -> None:
        """Name the batch at fault where sums are not finite; w beyond all measure, solvers know."""
        vectors, fine = _vectors(sums), self.finite.fine
        moderate = is_moderate(w) if w.is_floating_point() else torch.ones_like(fine)
        # read at once, as the host waits each time
        fine, known, *finite = torch.stack([fine, moderate, *map(all_finite, vectors)]).tolist()
        fault = not fine or (known and not (all(finite) or all(map(is_finite, vectors))))
        if not self.data.group.meet("sums that are not finite", fault, any):
            return
        sums = self.zeros(len(w), task.kinds)
        with self._searching(LIKELIHOOD if task.may_overflow else None):
            for batch in self.batches(task.at_most):
                task.add(batch, w, sums)
                for total in _vectors(sums) if known and not self.finite.met else ():
                    self.finite.check(batch.index, DERIVATIVE, total)

    @contextmanager
    def _searching(self, excused: str | None = None) -> Iterator[None]:
        self.finite.searching, self.finite.excused, self.finite.met = True, excused, False
        try:
            yield
        finally:
            self.finite.searching = False


def _vectors(sums: Sums) -> list[Tensor]:
    return [total for total in sums.values() if total.dim()]
