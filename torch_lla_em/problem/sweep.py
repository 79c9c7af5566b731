"""The loop over the data: it processes batches in pieces that fit into memory, and sums over pieces
and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.data import Batch, Data
from torch_lla_em.jacobian import LinearModel, NetworkState, Pulled, Rows
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.problem.plan import Plan
from torch_lla_em.runtime import DoesNotFit, release, report, shortage_of, suppressed

Kind = tuple[int | str, ...]
"""The shape of a sum, in which "K" is the number of columns and "P" that of parameters. Sums
without "P" are in float64."""

BLOCK: Kind = ("K", "P")
VECTOR: Kind = ("P",)
"""A sum of squared gradients over examples; without factors of J, sums over a few examples are
squared."""

SCALAR: Kind = ()

OUTPUTS = (
    "The network's outputs on batch {} are not finite. Remove examples with NaN or infinite "
    "inputs; if there are none, check the weights of the network."
)
_INFLUENCE = (
    "The network's outputs for an example change by {:.0%} with the other examples in its batch, "
    "and so do predictions. Let layers use running statistics, such as BatchNorm with "
    "track_running_stats=True, or always predict with batches like those of the fit."
)
_IN_LATER_PASS = (
    "The network's outputs, or their derivatives, are not finite, although they were in the first "
    "pass over the data. Every pass must see the same data, without random augmentation; a layer "
    "without a derivative, for example a norm at 0, needs a small constant, as in sqrt(x + 1e-12)."
)
_NO_ROOM = (
    "One column of {} examples of batch {} does not fit into memory ({}). It needs a forward pass "
    "with its activations, and 2 P numbers ({:.2g} GB for P = {}). Use smaller batches or inputs, "
    'fewer parameters in the posterior (parameters="last_layer", or name patterns), fewer samples, '
    'or keep their vectors on the CPU (compute=Compute(vectors="cpu")).'
)

FEW = 8
"""Number of examples with which the network is probed, and its memory measured."""

# number of examples whose sum is squared if there are no factors
_GROUP_ROWS = 32
# largest relative change by the other examples of a batch that counts as rounding
_SPLIT_ERROR = 1e-2
Sums = dict[str, Tensor]
Contributions = Mapping[str, Tensor | Pulled]

Add = Callable[[Rows, Batch, Tensor], Contributions]
"""A function (rows, batch, columns w) -> contributions of the batch to the sums for these columns,
by name.

The sweep adds them after the call has returned, so that nothing counts twice if memory runs out
during the call."""


class Sweep:
    """Takes passes over the data. If memory runs out, it continues with fewer columns at a time,
    then with fewer examples."""

    def __init__(
        self,
        linear_model: LinearModel,
        likelihood: Likelihood,
        data: Data,
        state: NetworkState | None = None,
    ):
        self.linear_model, self.data, self._likelihood = linear_model, data, likelihood
        self.plan = Plan(linear_model.network.device)
        """The plan, with the limits that were found when memory ran out."""

        self._alone: bool | None = None
        self._factors: dict[tuple[int, int], Rows] = {}
        """Factors of J of batches that are kept. For a CNN they save three quarters of the time of
        a fit."""

        self.columns = 0.0
        """Number of columns that have been multiplied in passes over all data."""

        self._checks: list[tuple[Tensor, Exception | None]] = []
        """Whether tensors of this pass are finite, with the errors if they are not; read once, at
        the end of the pass."""

        self.begun_with = NetworkState(linear_model.network) if state is None else state
        """The state of the network at the start, which must not change until the end."""

        self._after_batch: Callable[[], None] | None = None

    def __call__(
        self,
        w: Tensor,
        kinds: dict[str, Kind],
        add: Add,
        batch: Batch | None = None,
        weight: float = 1.0,
    ) -> Sums:
        """Return sums of these kinds over all batches of all ranks, or over one batch of each.

        The columns are w, (K, P), or the numbers of samples, (K,). Without sums, ``add`` gets all
        columns at once. ``weight`` is the cost of a column: 1 for a product with G, and one half
        for a product with J or its transpose.
        """
        model, group, plan = self.linear_model, self.data.group, self.plan
        if kinds and len(w) > (plan.group or len(w)):  # one pass for each group of columns
            parts = [self(some, kinds, add, batch, weight) for some in w.split(plan.group or 1)]
            every = {name: [part[name] for part in parts] for name in kinds}
            return {
                name: torch.cat(own) if kinds[name] == BLOCK else torch.stack(own).sum(0)
                for name, own in every.items()
            }
        if w.is_floating_point():  # the same on all ranks: rounding differs between machines
            w = group.from_first(w.to(model.network.device))
        sizes: dict[Any, Any] = {"K": len(w), "P": model.layout.size}
        near, sums = model.network.device, Sums()
        for name, kind in kinds.items():
            dtype = model.dtype if "P" in kind else torch.float64
            shape = [sizes.get(size, size) for size in kind]
            sums[name] = torch.zeros(shape, dtype=dtype, device=near)
        try:
            for one in self.batches() if batch is None else [batch]:
                self._add(w, add, one, sums, kinds)
                if self._after_batch is not None:
                    self._after_batch()
        except Exception as error:
            self.data.fail(error)
            if isinstance(error, DoesNotFit):
                self.plan = plan
            raise
        if batch is None:  # a rank may have no examples
            wrong = torch.zeros((), dtype=torch.float64, device=near)
            for fine, _ in self._checks:
                wrong += (~fine).to(near)
            if group.sum(wrong).item():  # the error of one rank is raised on all ranks
                faults = group.meet(self.fault(), list)
                raise next(filter(None, faults), FloatingPointError(_IN_LATER_PASS))
        share = 1.0 if batch is None else batch.step_rows / (self.data.facts.num_rows or 1)
        self.columns += weight * len(w) * share
        for name in kinds:
            sums[name] = group.sum(sums[name])
            if "P" in kinds[name]:
                sums[name] = sums[name].to(self.plan.device)
        return sums

    def _add(self, w: Tensor, add: Add, batch: Batch, sums: Sums, kinds: dict[str, Kind]) -> None:
        """Add the contributions of a batch, by pieces and columns."""
        model, at_most = self.linear_model, self.plan.rows
        by_example = VECTOR in kinds.values()
        if by_example and {*model.factored} != {*model.layout.names}:
            at_most = min(at_most, _GROUP_ROWS)
        todo = [(piece, 0) for piece in self.pieces(batch, at_most) if len(piece.rows)]
        rows: Rows | None = None
        while todo:  # pieces of the batch, with the number of their columns that are done
            piece, done = todo.pop(0)
            step = len(w) - done
            try:
                rows = self._rows(piece, inf if by_example or model.is_last_layer else step)
                step = min(step, (rows.columns if kinds else None) or step)
                for columns in w[done:].split(step):
                    here = slice(done, done + len(columns))
                    views = {n: s[here] if kinds[n] == BLOCK else s for n, s in sums.items()}
                    _sum_up(views, add(rows, piece, columns))
                    done += len(columns)
                continue
            except (RuntimeError, MemoryError) as error:
                shortage = shortage_of(error)
            rows = None
            release()  # what the failed attempt held is free only outside of the handler
            self._halve(piece, min(step, self.plan.columns or step), shortage)
            todo[:0] = [(smaller, done) for smaller in self.pieces(piece, self.plan.rows)]

    def _rows(self, batch: Batch, columns: float) -> Rows:
        """Return the linear model at a batch, with factors of an earlier pass if they were kept."""
        model, plan = self.linear_model, self.plan
        if batch.is_kept and batch.place in self._factors:
            return self._factors[batch.place]
        keep = batch.is_kept and plan.factors > 0 and bool(model.factored)
        rows = model.at(batch.inputs, columns, keep, plan.columns)
        if keep and rows.nbytes < plan.factors:
            self.plan = plan._replace(factors=plan.factors - rows.nbytes)
            self._factors[batch.place] = rows
        return rows

    def _halve(self, piece: Batch, columns: int, shortage: str) -> None:
        """Reduce memory: leave factors, or halve the number of columns or examples that are
        processed at once; raise if neither is possible."""
        model, size = self.linear_model, (len(piece.rows) + 1) // 2
        if model.factored:
            self._factors.clear()
            self.plan = self.plan._replace(factors=0.0)
            model.leave_factors()
        elif columns > 1:
            report("log", f"Out of memory: continuing with {columns // 2} columns at a time.")
            self.plan = self.plan._replace(columns=columns // 2)
        elif len(self.pieces(piece, size)) == 1:
            raise self._no_room(piece, shortage)
        else:
            report("log", f"Out of memory: continuing with at most {size} examples at a time.")
            self.plan = self.plan._replace(rows=size)

    def _no_room(self, piece: Batch, shortage: str) -> DoesNotFit:
        """Return the error for a piece that cannot be made smaller."""
        P = self.linear_model.layout.size
        words = _NO_ROOM.format(len(piece.rows), piece.index, shortage, 8 * P / 1e9, P)
        return DoesNotFit(words)

    def batches(self, in_step: bool = False) -> Iterator[Batch]:
        """Yield the batches of one pass, each inside the network's guard: other threads wait for
        one batch."""
        self._checks = []
        for whole in self.data.batches(in_step):
            with self.linear_model.network.guarded():
                if not len(whole.rows):
                    yield whole
                    continue
                self.probe(whole)
                for batch in self.pieces(whole, inf if in_step else self.plan.rows):
                    yield self.aligned(batch)._replace(is_kept=whole.is_kept)
        if self.data.kept is None:  # there was no room for all batches
            self._factors.clear()
        self.refuse_changes()

    def aligned(self, batch: Batch) -> Batch:
        """Return a batch with the axis of the outputs last in its targets and weights."""
        axis, w = self.linear_model.network.class_dim, batch.weights
        if w is not None and w.dim() > 1 and self._likelihood.elementwise:
            w = w.movedim(axis, -1) if -w.dim() <= axis < w.dim() else w
        return batch._replace(targets=self._likelihood.align(batch.targets, axis), weights=w)

    def take(self, plan: Plan) -> None:
        """Use this plan from now on."""
        self.plan = plan

    def resume(self, columns: float) -> None:
        """Continue counting columns from the number of an earlier run."""
        self.columns = columns

    def watch(self, after_batch: Callable[[], None]) -> None:
        """Call a function after every batch, for example to show progress."""
        self._after_batch = after_batch

    def probe(self, batch: Batch, anew: bool = False) -> None:
        """Check the derivatives of the network at some examples of the first batch, inside the
        network's guard."""
        if self.linear_model.ways is not None and not anew:
            return
        few = next(batch.split(FEW)) if self.stand_alone(batch) else batch
        try:
            self.linear_model.probe(few.inputs)
        except FloatingPointError:
            raise FloatingPointError(OUTPUTS.format(batch.index)) from None
        except (RuntimeError, MemoryError) as error:
            raise self._no_room(few, shortage_of(error)) from None

    def refuse_changes(self) -> None:
        """Raise an error if the weights have changed since the start of the fit.

        Call it before results are stored. It synchronises with the device.
        """
        if not self.begun_with.holds(self.linear_model.network):
            raise RuntimeError(
                "The network was changed during the fit. Do not change the network "
                "until fit returns, or fit a copy.deepcopy of it."
            )

    def pieces(self, whole: Batch, at_most: float) -> list[Batch]:
        """Return the batch in pieces, or whole if examples depend on each other."""
        pieces = [whole] if len(whole.rows) <= at_most else list(whole.split(int(at_most)))
        return pieces if len(pieces) > 1 and self.stand_alone(whole) else [whole]

    def stand_alone(self, whole: Batch) -> bool:
        """Whether examples do not influence each other: the outputs of two examples are the same in
        a batch of two as in a batch of four (or of one example in batches of one and two)."""
        model, size = self.linear_model, 2 if len(whole.rows) > 3 else 1
        if self._alone is None and len(whole.rows) > 1:
            piece, more = next(whole.split(size)), next(whole.split(2 * size))
            outputs, self._alone = model.network.outputs, False
            with model.network.guarded(), suppressed():  # inputs may have another first axis
                f, alone = outputs(more.inputs)[: len(piece.rows)], outputs(piece.inputs)
                if f.shape == alone.shape:
                    change = ((alone - f).norm() / f.norm()).item()
                    self._alone = not change > max(_SPLIT_ERROR, 8 * model.rounding)
                    if not self._alone:
                        report("log", _INFLUENCE.format(change))
        return bool(self._alone)

    def expect_finite(self, tensor: Tensor, fault: Exception | None = None) -> None:
        """Note whether a tensor is finite; if it is not, the pass ends with this error.

        The host does not wait for the device before the end of the pass.
        """
        # the sum is tested, which takes no memory
        total = tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))
        self._checks.append((total.isfinite(), fault))

    def fault(self) -> Exception | None:
        """Return the first error of this pass about values that are not finite. It synchronises
        with the device."""
        return next((fault for fine, fault in self._checks if fault and not fine), None)


def _sum_up(sums: Sums, contributions: Contributions) -> None:
    """Add all contributions to sums by name; after an error, none of them is added."""
    parts: list[tuple[Tensor, Tensor]] = []
    for name, part in contributions.items():
        total = sums[name]
        if isinstance(part, Pulled):
            parts += part.parts(total)
        else:
            parts.append((total, part.to(total.device, total.dtype)))
    # all memory is allocated before the first number is added
    for total, part in parts:
        total += part
