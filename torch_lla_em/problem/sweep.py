"""The loop over the data: adds up batches in pieces that fit into memory, and sums over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import Batch, Data, tensors_in
from torch_lla_em.jacobian import LinearModel, NetworkState, Rows
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.problem.pieces import FactorCache, Pieces
from torch_lla_em.runtime import DoesNotFit, release, report, shortage_of, suppressed

BLOCK, VECTOR, SCALAR = "block", "vector", "scalar"
"""Kinds of sums: a vector per column, (K, P); one vector, (P,); or a number in float64."""

_OUTPUTS = "The network's outputs on batch {} are not finite."
DERIVATIVE = (
    "The derivative of the network's outputs on batch {} is not finite, although the outputs are: "
    "some layer has no derivative there, for example a square root or a norm at 0. Use for "
    "example sqrt(x + 1e-12), or remove those examples."
)
LIKELIHOOD = (
    "The likelihood's curvature on batch {} is not finite: check the network's outputs and the "
    "targets of this batch for extreme values."
)
_INPUTS = "The inputs of batch {} hold NaN or infinite values: remove those examples."
_IN_LATER_PASS = (
    "The network's outputs, or their derivatives, are not finite, although they were in the first "
    "pass over the data. Every pass must see the same data, without random augmentation; a layer "
    "without a derivative, for example a norm at 0, needs a small constant, as in sqrt(x + 1e-12)."
)

FEW = 8
"""Number of examples with which the network is probed, and its memory measured."""

Kind = str | tuple[int, ...]
"""The kind of a sum: BLOCK, VECTOR, SCALAR, or the shape of a float64 tensor."""

Sums = dict[str, Tensor]
Add = Callable[[Rows, Batch, Tensor, Sums], None]
"""(rows, batch, columns w, sums): add what the batch contributes for these columns.

Whatever takes memory has to come before the first number is added."""


class Pass(NamedTuple):
    """One pass: the kinds of its sums, and the function that adds a batch."""

    kinds: dict[str, Kind]
    """Without sums, ``add`` gets all columns at once."""

    add: Add
    at_most: float = inf
    """Number of examples at a time, if the network can process them separately."""

    factored: bool = False
    """Whether factors of J are computed if possible, however few the columns are."""


Fold = Callable[[Tensor, Pass], Sums]
"""(columns w, pass) -> sums over one batch of every rank."""


class Limits(NamedTuple):
    """What a pass keeps to; replaced, never changed, if memory runs out."""

    device: torch.device
    """Device on which vectors are stored."""

    rows: float = inf
    """Largest number of examples that are processed at once."""

    columns: int | None = None
    """Largest number of columns of a product that are computed at once; None: all."""

    batch_rows: float = inf
    """Number of examples above which a batch is split, because larger batches are not cheaper."""

    group: int | None = None
    """Columns that are on the device at once, if vectors are stored elsewhere; None: all."""


class Sweep:
    """Takes passes over the data.

    Handles out-of-memory errors during a pass: it continues with fewer columns at a time, then with
    fewer examples. A reduction that did not help is undone.
    """

    def __init__(self, linear_model: LinearModel, likelihood: Likelihood, data: Data):
        self.linear_model, self.data, self._likelihood = linear_model, data, likelihood
        self.limits = Limits(linear_model.network.device)
        """The limits of the plan, and those that were found when memory ran out."""

        with torch.inference_mode(False):  # it is written to in place, whoever calls
            self._fine = torch.ones((), dtype=torch.bool, device=linear_model.network.device)
        """Whether all outputs of this pass are finite; read once, at its end."""

        self._expected: list[tuple[Exception, Tensor]] = []
        """Errors of this pass, and whether the tensors that they are about are finite."""

        self.pieces, self.factors = Pieces(linear_model), FactorCache(linear_model)
        self._begun_with = NetworkState(linear_model.network)
        self._seen: Rows | None = None
        self._loaded = 0
        """Number of examples of the current batch of the loader."""

        self.report: Callable[[float | None], None] | None = None
        """Function that is called with the finished share of a pass, if it is known."""

    def __call__(self, w: Tensor, task: Pass, batch: Batch | None = None) -> Sums:
        """Return the sums over all batches of all ranks, or over one batch of each.

        The columns are w, (K, P), or the numbers of samples, (K,).
        """
        if task.kinds and len(w) > (self.limits.group or len(w)):
            return self._in_groups(w, task, batch)
        if w.is_floating_point():  # the same on all ranks: rounding differs between machines
            w = self.data.group.from_first(w.to(self.linear_model.network.device))
        limits, sums, rows_done = self.limits, self._zeros(w, task), 0.0
        try:
            for one in self.batches() if batch is None else [batch]:
                pieces = self.pieces(one, min(self.limits.rows, task.at_most))
                todo = [(piece, 0) for piece in pieces if len(piece.rows)]
                while todo:  # pieces of the batch, and how many of their columns are done
                    piece, done = todo.pop(0)
                    step = len(w) - done
                    try:
                        own = inf if task.factored else step
                        rows = self.factors(piece, own, self.limits.columns)
                        step = min(step, (rows.columns if task.kinds else None) or step)
                        for columns in w[done:].split(step):
                            task.add(rows, piece, columns, _of(sums, task, done, len(columns)))
                            done += len(columns)
                            rows_done += len(piece.rows) * len(columns) / len(w)
                            self.say(rows_done if batch is None else 0)
                        continue
                    except (RuntimeError, MemoryError) as error:
                        shortage = shortage_of(error)
                    rows = self._seen = None
                    release()  # what the failed attempt held is free only outside of the handler
                    self._halve(piece, min(step, self.limits.columns or step), shortage)
                    todo[:0] = [(smaller, done) for smaller in self.pieces(piece, self.limits.rows)]
        except Exception as error:
            self.data.fail(error)
            if isinstance(error, DoesNotFit):
                self.limits = limits
            raise
        if batch is None and self.data.group.sum((~self._fine).double()).item():
            # one rank's error on all of them
            raise self.data.group.meet(self.fault(), _one_of) or FloatingPointError(_IN_LATER_PASS)
        group, kinds = self.data.group, task.kinds
        return {n: self._placed(group.sum(part), kinds[n]) for n, part in sums.items()}

    def _in_groups(self, w: Tensor, task: Pass, batch: Batch | None) -> Sums:
        """Return the sums by one pass for each group of columns, which are stored elsewhere."""
        found: Sums = {}
        step = self.limits.group or len(w)
        for start in range(0, len(w), step):
            some = slice(start, start + step)
            for name, own in self(w[some], task, batch).items():
                if task.kinds[name] != BLOCK:
                    found[name] = found[name] + own if name in found else own
                    continue
                if name not in found:
                    found[name] = own.new_empty(len(w), own.shape[1])
                found[name][some] = own
        return found

    def _placed(self, own: Tensor, kind: Kind) -> Tensor:
        """Return a sum where vectors are stored, or a number where it is."""
        is_near = kind not in (BLOCK, VECTOR) or own.device.type == self.limits.device.type
        return own if is_near else own.to(self.limits.device)

    def steps(self) -> Iterator[tuple[int, Fold]]:
        """Yield the number of examples of one batch per rank, and the pass over these batches."""
        for batch in self.batches(in_step=True):
            yield batch.step_rows or len(batch.rows), partial(self, batch=batch)

    def batches(self, in_step: bool = False) -> Iterator[Batch]:
        """Yield the batches of one pass, each inside the network's guard: other threads wait for one batch."""
        self._fine.fill_(True)
        self._expected.clear()
        for whole in self.data.batches(in_step=in_step):
            with self.linear_model.network.guarded():
                if in_step and not len(whole.rows):
                    yield whole
                    continue
                self.probe(whole)
                self._loaded = len(whole.rows)
                for batch in [whole] if in_step else self.pieces(whole, self.limits.batch_rows):
                    yield self.aligned(batch)._replace(is_kept=whole.is_kept)
        self.refuse_changes()

    def aligned(self, batch: Batch) -> Batch:
        """Return a batch with the axis of the outputs last in its targets and weights."""
        axis, w = self.linear_model.network.class_dim, batch.weights
        if w is not None and w.dim() > 1 and self._likelihood.elementwise:
            w = w.movedim(axis, -1) if -w.dim() <= axis < w.dim() else w
        return batch._replace(targets=self._likelihood.align(batch.targets, axis), weights=w)

    def take(self, limits: Limits) -> None:
        """Keep to these limits from now on."""
        self.limits = limits

    def watch(self, report: Callable[[float | None], None]) -> None:
        """Call a function with the finished share of every pass."""
        self.report = report

    def probe(self, batch: Batch) -> None:
        """Check the derivatives of the network, at the first batch."""
        if self.linear_model.report is None:
            try:
                self._probe(batch)
            except ValueError:  # which is raised for outputs that are not finite, too
                with self.linear_model.network.guarded():
                    self.expect_outputs(batch, self.linear_model.outputs(batch.inputs))
                fault = self.fault()
                if fault is not None:
                    raise fault from None
                raise

    def refuse_changes(self) -> None:
        """Raise an error if the weights have changed since the start of the fit.

        Call it before results are stored. It synchronises with the device.
        """
        changed = self._begun_with.changed(self.linear_model.network)
        if changed is not None:
            raise RuntimeError(
                f"The network's {changed!r} was changed during the fit. Do not change the network "
                "until fit returns, or fit a copy.deepcopy of it."
            )

    def _probe(self, batch: Batch) -> None:
        model, few, failures = self.linear_model, next(batch.split(FEW)), list[Exception]()
        try:
            model.probe(few.inputs)
        except Exception:
            with suppressed(failures), model.network.guarded():
                model.outputs(few.inputs)
            if not failures:
                raise
            model.probe(batch.inputs)  # if the first axis of the inputs is not that of the examples

    def is_new(self, rows: Rows) -> bool:
        """Whether these examples were not processed before in this pass."""
        is_new, self._seen = self._seen is not rows, rows
        return is_new

    def say(self, rows: float = 0.0) -> None:
        """Report that the fit goes on, and how many examples of this pass are done, if it is within one."""
        if self.report is not None:
            data = self.data
            number = data.facts.num_rows or data.num_batches() * self._loaded
            known = rows and number
            self.report(min(1.0, rows * data.group.size / number) if known else None)

    def _halve(self, piece: Batch, columns: int, shortage: str) -> None:
        """Halve the number of columns or examples that are processed at once; raise if not possible."""
        model = self.linear_model
        if model.factored:
            self.factors.forget()
            model.leave_factors()
        elif columns > 1:
            report("log", f"Out of memory: continuing with {columns // 2} columns at a time.")
            self.limits = self.limits._replace(columns=columns // 2)
        else:
            size = (len(piece.rows) + 1) // 2
            if len(self.pieces(piece, size)) == 1:
                raise DoesNotFit(no_room(piece, model.layout.size, shortage))
            report("log", f"Out of memory: continuing with at most {size} examples at a time.")
            self.limits = self.limits._replace(rows=size)

    def _zeros(self, w: Tensor, task: Pass) -> Sums:
        """Return sums that are 0, on the network's device."""
        model, sums = self.linear_model, Sums()
        named = {BLOCK: (len(w), model.layout.size), VECTOR: (model.layout.size,), SCALAR: ()}
        for name, kind in task.kinds.items():
            dtype = model.dtype if kind in (BLOCK, VECTOR) else torch.float64
            shape = named[kind] if isinstance(kind, str) else kind
            sums[name] = torch.zeros(shape, dtype=dtype, device=model.network.device)
        return sums

    def expect_finite(self, tensor: Tensor, fault: Exception | None = None) -> None:
        """Note whether a tensor is finite; if it is not, the pass ends with this error.

        The host does not wait for the device before the end of the pass.
        """
        self._expect(_all_finite(tensor), fault)

    def expect_outputs(self, batch: Batch, f: Tensor) -> None:
        """Note whether the outputs of a batch are finite, and if not, whether its inputs are."""
        fine = _all_finite(f)
        for x in tensors_in(batch.inputs):
            if x.is_floating_point():
                values = x.coalesce().values() if x.is_sparse else x
                own = values.isfinite().all()
                self._expect(fine | own, ValueError(_INPUTS.format(batch.index)))
        self._expect(fine, FloatingPointError(_OUTPUTS.format(batch.index)))

    def fault(self) -> Exception | None:
        """Return the first error of this pass about what is not finite; the host waits for it."""
        return next((fault for fault, fine in self._expected if not fine), None)

    def _expect(self, fine: Tensor, fault: Exception | None) -> None:
        self._fine.logical_and_(fine)
        if fault is not None:
            self._expected.append((fault, fine))


def _of(sums: Sums, task: Pass, start: int, count: int) -> Sums:
    """Return the sums for some of the columns."""
    here = slice(start, start + count)
    return {n: own[here] if task.kinds[n] == BLOCK else own for n, own in sums.items()}


def _one_of(faults: list[Exception | None]) -> Exception | None:
    """Return the first error of all ranks."""
    return next(filter(None, faults), None)


def _all_finite(tensor: Tensor) -> Tensor:
    """Return whether all entries are finite, shape (): by their sum, which takes no memory."""
    return tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32)).isfinite()


def no_room(piece: Batch, P: int, shortage: str) -> str:
    """Return the error message if one column of a piece that cannot be split does not fit."""
    rows = len(piece.rows)
    return (
        f"One column of {rows} row{'s' * (rows > 1)} of batch {piece.index} does not fit into "
        f"memory ({shortage}). It needs a forward pass with its activations, twice the largest of "
        f"them, and 2 P numbers for a direction and a gradient ({2 * P * 4 / 1e9:.2g} GB "
        f"for P = {P}). Use smaller batches or inputs, fewer parameters in the posterior "
        '(parameters="last_layer", or name patterns), fewer samples, or keep their vectors on '
        'the CPU (compute=Compute(vectors="cpu")).'
    )
