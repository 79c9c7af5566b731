"""The loop over the data: adds up batches in pieces that fit into memory, and sums over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import Batch, Data
from torch_lla_em.jacobian import LinearModel, NetworkState, Rows
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.runtime import DoesNotFit, release, report, shortage_of, suppressed

Kind = tuple[int | str, ...]
"""The shape of a sum, in which "K" are the columns and "P" the parameters; without "P" it is in float64."""

BLOCK: Kind = ("K", "P")
VECTOR: Kind = ("P",)
SCALAR: Kind = ()

_OUTPUTS = (
    "The network's outputs on batch {} are not finite. Remove examples with NaN or infinite inputs; if there are "
    "none, check the weights of the network."
)
_INFLUENCE = (
    "The network's outputs for an example change by {:.0%} with the other examples in its batch, and so do predictions. "
    "Let layers use running statistics, as BatchNorm with track_running_stats=True, or always predict with batches "
    "like those of the fit."
)
_IN_LATER_PASS = (
    "The network's outputs, or their derivatives, are not finite, although they were in the first "
    "pass over the data. Every pass must see the same data, without random augmentation; a layer "
    "without a derivative, for example a norm at 0, needs a small constant, as in sqrt(x + 1e-12)."
)

FEW = 8
"""Number of examples with which the network is probed, and its memory measured."""

# relative change by other examples of a batch that is taken for rounding
_SPLIT_ERROR = 1e-2

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

    columns: float = 1.0
    """What a column counts: a product with G is 1, one with J or its transpose half of it."""


class Limits(NamedTuple):
    """What a pass keeps to; replaced, never changed, if memory runs out."""

    device: torch.device
    """Device on which vectors are stored."""

    rows: float = inf
    columns: int | None = None
    """Largest numbers of examples, and of columns of a product, that are computed at once; None: all."""

    batch_rows: float = inf
    """Number of examples above which a batch is split, because larger batches are not cheaper."""

    group: int | None = None
    """Columns that are on the device at once, if vectors are stored elsewhere; None: all."""

    factors: float = 0.0
    """Bytes in which factors of J are kept from pass to pass."""


class Sweep:
    """Takes passes over the data; if memory runs out, with fewer columns at a time, then with fewer examples."""

    def __init__(self, linear_model: LinearModel, likelihood: Likelihood, data: Data):
        self.linear_model, self.data, self._likelihood = linear_model, data, likelihood
        self.limits = Limits(linear_model.network.device)
        """The limits of the plan, and those that were found when memory ran out."""

        self._alone: bool | None = None
        self._factors: dict[tuple[int, int], Rows] = {}
        """Factors of J of batches that are kept; they save a CNN three quarters of the time of a fit."""

        self.columns, self.stage = 0.0, "checking the network"
        """Columns that have gone through all data, and what the fit does now."""

        self._checks: list[tuple[Tensor, Exception | None]] = []
        """Whether tensors of this pass are finite, read once, at its end, and the errors if they are not."""

        self._begun_with = NetworkState(linear_model.network)
        self._seen: Rows | None = None
        self._report: Callable[[float | None], object] = bool
        self._loaded = 0
        """Number of examples of the current batch of the loader."""

    def __call__(self, w: Tensor, task: Pass, batch: Batch | None = None) -> Sums:
        """Return the sums over all batches of all ranks, or over one batch of each.

        The columns are w, (K, P), or the numbers of samples, (K,).
        """
        if task.kinds and len(w) > (self.limits.group or len(w)):
            return self._in_groups(w, task, batch)
        group = self.data.group
        if w.is_floating_point():  # the same on all ranks: rounding differs between machines
            w = group.from_first(w.to(self.linear_model.network.device))
        limits, sums, done = self.limits, self._zeros(w, task), 0
        try:
            for one in self.batches() if batch is None else [batch]:
                self._add(w, task, one, sums)
                done += len(one.rows)
                self.say(done if batch is None else 0)
        except Exception as error:
            self.data.fail(error)
            if isinstance(error, DoesNotFit):
                self.limits = limits
            raise
        if batch is None:  # a rank may have no examples
            wrong = torch.zeros((), dtype=torch.float64, device=self.linear_model.network.device)
            for fine, _ in self._checks:
                wrong += (~fine).to(wrong.device)
            if group.sum(wrong).item():  # one rank's error on all of them
                raise group.meet(self.fault(), _one_of) or FloatingPointError(_IN_LATER_PASS)
        share = 1.0 if batch is None else batch.step_rows / (self.data.facts.num_rows or 1)
        self.columns += task.columns * len(w) * share
        return {name: self._placed(group.sum(own), task.kinds[name]) for name, own in sums.items()}

    def _add(self, w: Tensor, task: Pass, batch: Batch, sums: Sums) -> None:
        """Add what a batch contributes, by pieces and columns."""
        pieces = self._pieces(batch, min(self.limits.rows, task.at_most))
        todo = [(piece, 0) for piece in pieces if len(piece.rows)]
        while todo:  # pieces of the batch, and how many of their columns are done
            piece, done = todo.pop(0)
            step = len(w) - done
            try:
                rows = self._rows(piece, inf if task.factored else step)
                step = min(step, (rows.columns if task.kinds else None) or step)
                for columns in w[done:].split(step):
                    here = slice(done, done + len(columns))
                    kinds = task.kinds
                    own = {n: s[here] if kinds[n] == BLOCK else s for n, s in sums.items()}
                    task.add(rows, piece, columns, own)
                    done += len(columns)
                continue
            except (RuntimeError, MemoryError) as error:
                shortage = shortage_of(error)
            rows = self._seen = None
            release()  # what the failed attempt held is free only outside of the handler
            self._halve(piece, min(step, self.limits.columns or step), shortage)
            todo[:0] = [(smaller, done) for smaller in self._pieces(piece, self.limits.rows)]

    def _rows(self, batch: Batch, columns: float) -> Rows:
        """Return the linear model at a batch, with factors of an earlier pass if they were kept."""
        model, limits = self.linear_model, self.limits
        if not batch.is_kept:
            return model.at(batch.inputs, columns, at_once=limits.columns)
        rows = self._factors.get(batch.place)
        if rows is None:
            keep = limits.factors > 0 and bool(model.factored)
            rows = model.at(batch.inputs, columns, keep, limits.columns)
            if keep and rows.nbytes < limits.factors:
                self.limits = limits._replace(factors=limits.factors - rows.nbytes)
                self._factors[batch.place] = rows
        return rows

    def _in_groups(self, w: Tensor, task: Pass, batch: Batch | None) -> Sums:
        """Return the sums by one pass for each group of columns, which are stored elsewhere."""
        found: dict[str, list[Tensor]] = {}
        for some in w.split(self.limits.group or len(w)):
            for name, own in self(some, task, batch).items():
                found.setdefault(name, []).append(own)
        kinds = task.kinds
        return {
            n: torch.cat(p) if kinds[n] == BLOCK else sum(p[1:], p[0]) for n, p in found.items()
        }

    def _placed(self, own: Tensor, kind: Kind) -> Tensor:
        """Return a sum where vectors are stored, or a number where it is."""
        is_near = "P" not in kind or own.device.type == self.limits.device.type
        return own if is_near else own.to(self.limits.device)

    def batches(self, in_step: bool = False) -> Iterator[Batch]:
        """Yield the batches of one pass, each inside the network's guard: other threads wait for one batch."""
        self._checks = []
        for whole in self.data.batches(in_step=in_step):
            with self.linear_model.network.guarded():
                if in_step and not len(whole.rows):
                    yield whole
                    continue
                self.probe(whole)
                self._loaded = len(whole.rows)
                for batch in [whole] if in_step else self._pieces(whole, self.limits.batch_rows):
                    yield self.aligned(batch)._replace(is_kept=whole.is_kept)
        if self.data.cache is None:  # there was no room for all batches
            self._factors.clear()
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

    def begin(self, stage: str, columns: float | None = None) -> None:
        """Begin another stage; ``columns`` are those of an earlier run."""
        self.stage, self.columns = stage, self.columns if columns is None else columns

    def watch(self, report: Callable[[float | None], object]) -> None:
        """Call a function with the finished share of every pass, if it is known."""
        self._report = report

    def probe(self, batch: Batch) -> None:
        """Check the derivatives of the network, at some of the first batch."""
        model, failures = self.linear_model, list[Exception]()
        if model.report is not None:
            return
        few = next(batch.split(FEW)).inputs
        try:
            try:
                model.probe(few)
            except Exception:
                with suppressed(failures), model.network.guarded():
                    model.outputs(few)
                if not failures:
                    raise
                model.probe(
                    batch.inputs
                )  # if the first axis of the inputs is not that of the examples
        except ValueError:  # which is raised for outputs that are not finite, too
            with model.network.guarded():
                self.expect_outputs(model.outputs(batch.inputs), batch)
            fault = self.fault()
            if fault is not None:
                raise fault from None
            raise

    def refuse_changes(self) -> None:
        """Raise an error if the weights have changed since the start of the fit.

        Call it before results are stored. It synchronises with the device.
        """
        if not self._begun_with.holds(self.linear_model.network):
            raise RuntimeError(
                "The network was changed during the fit. Do not change the network "
                "until fit returns, or fit a copy.deepcopy of it."
            )

    def few(self, batch: Batch, count: int) -> Batch:
        """Return some examples of a batch, all if examples depend on each other."""
        return next(batch.split(count)) if self.stand_alone(batch) else batch

    def _pieces(self, whole: Batch, at_most: float) -> list[Batch]:
        """Return the batch in pieces, or whole if examples depend on each other."""
        pieces = [whole] if len(whole.rows) <= at_most else list(whole.split(int(at_most)))
        return pieces if len(pieces) > 1 and self.stand_alone(whole) else [whole]

    def stand_alone(self, whole: Batch) -> bool:
        """Whether the outputs of two examples are the same alone as among four, or of one as among two."""
        model, size = self.linear_model, 2 if len(whole.rows) > 3 else 1
        if self._alone is None and len(whole.rows) > 1:
            piece, more = next(whole.split(size)), next(whole.split(2 * size))
            f: Any = None
            with model.network.guarded(), suppressed():  # inputs may have another first axis
                f = model.outputs(more.inputs)[: len(piece.rows)], model.outputs(piece.inputs)
            self._alone = f is not None and f[0].shape == f[1].shape
            if self._alone:
                change = ((f[1] - f[0]).norm() / f[0].norm()).item()
                self._alone = not change > max(_SPLIT_ERROR, 8 * model.rounding)
                if not self._alone:
                    report("log", _INFLUENCE.format(change))
        return bool(self._alone)

    def is_new(self, rows: Rows) -> bool:
        """Whether these examples were not processed before in this pass."""
        is_new, self._seen = self._seen is not rows, rows
        return is_new

    def say(self, rows: float = 0.0) -> None:
        """Report that the fit goes on, and how many examples of this pass are done, if it is within one."""
        data = self.data
        number = data.facts.num_rows or data.num_batches() * self._loaded
        self._report(min(1.0, rows * data.group.size / number) if rows and number else None)

    def _halve(self, piece: Batch, columns: int, shortage: str) -> None:
        """Halve the number of columns or examples that are processed at once; raise if not possible."""
        model, size = self.linear_model, (len(piece.rows) + 1) // 2
        if model.factored:
            self._factors.clear()
            self.limits = self.limits._replace(factors=0.0)
            model.leave_factors()
        elif columns > 1:
            report("log", f"Out of memory: continuing with {columns // 2} columns at a time.")
            self.limits = self.limits._replace(columns=columns // 2)
        elif len(self._pieces(piece, size)) == 1:
            raise DoesNotFit(no_room(piece, model.layout.size, shortage))
        else:
            report("log", f"Out of memory: continuing with at most {size} examples at a time.")
            self.limits = self.limits._replace(rows=size)

    def _zeros(self, w: Tensor, task: Pass) -> Sums:
        """Return sums that are 0, on the network's device."""
        model, sums = self.linear_model, Sums()
        sizes: dict[Any, int] = {"K": len(w), "P": model.layout.size}
        for name, kind in task.kinds.items():
            dtype = model.dtype if "P" in kind else torch.float64
            shape: list[Any] = [sizes.get(size, size) for size in kind]
            sums[name] = torch.zeros(shape, dtype=dtype, device=model.network.device)
        return sums

    def expect_finite(self, tensor: Tensor, fault: Exception | None = None) -> None:
        """Note whether a tensor is finite; if it is not, the pass ends with this error.

        The host does not wait for the device before the end of the pass.
        """
        # by their sum, which takes no memory
        total = tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))
        self._checks.append((total.isfinite(), fault))

    def expect_outputs(self, f: Tensor, batch: Batch) -> None:
        """Note whether the outputs of a batch are finite."""
        self.expect_finite(f, FloatingPointError(_OUTPUTS.format(batch.index)))

    def fault(self) -> Exception | None:
        """Return the first error of this pass about what is not finite; the host waits for it."""
        return next((fault for fine, fault in self._checks if fault and not fine), None)


def _one_of(faults: list[Exception | None]) -> Exception | None:
    """Return the first error of all ranks."""
    return next(filter(None, faults), None)


def no_room(piece: Batch, P: int, shortage: str) -> str:
    """Return the error message if one column of a piece that cannot be split does not fit."""
    return (
        f"One column of {len(piece.rows)} examples of batch {piece.index} does not fit into memory ({shortage}). It "
        f"needs a forward pass with its activations, and 2 P numbers ({2 * P * 4 / 1e9:.2g} GB for P = {P}). Use "
        'smaller batches or inputs, fewer parameters in the posterior (parameters="last_layer", or name patterns), '
        'fewer samples, or keep their vectors on the CPU (compute=Compute(vectors="cpu")).'
    )
