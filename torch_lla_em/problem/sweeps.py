"""Passes over the data: every batch inside the network's guard, checked, and in pieces that fit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from math import inf
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from torch_lla_em.data import Batch, Data, Identity, map_tensors
from torch_lla_em.jacobian import LinearModel
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.problem.finite import (
    DERIVATIVE,
    LIKELIHOOD,
    OUTPUTS,
    Finite,
    is_finite,
    is_moderate,
)
from torch_lla_em.runtime import DoesNotFit, attempt, is_shortage

# rounding of a batch against its pieces, well below what another batch does to a row
_SPLIT_ERROR = 1e-2

logger = logging.getLogger("torch_lla_em")

T = TypeVar("T")
Work = Callable[[Batch, int], T]
"""(batch, columns of it that are done) -> whatever is to come of it."""


class Rows(NamedTuple):
    """Which rows of a pass are worked on, and how many at once."""

    skipped: int = 0
    """Rows at the start that are only counted."""

    at_most: float = inf
    """Rows of a batch at a time, where the network takes rows alone."""

    prefix: Identity | None = None
    """What the skipped rows must be."""

    whole: bool = False
    """Whether this rank takes the batches of all."""

    in_step: bool = False
    """Whether ranks go batch by batch together, with empty ones where they have no more."""


class OtherOrderError(Exception):
    """The rows to be skipped are not those that were skipped before."""


class Sweeps:
    """Passes of a linear model over its data, whose work on a batch is given from outside."""

    def __init__(self, linear_model: LinearModel, likelihood: Likelihood, data: Data):
        self.linear_model = linear_model
        self.likelihood = likelihood
        self.data = data
        self._versions = linear_model.network.versions()
        self._sizes = linear_model.network.sizes()
        self._finite = Finite()
        self._splits: bool | None = None

    def _summed(
        self,
        sums: dict[str, Tensor],
        add: Work[None],
        rows: Rows,
        w: Tensor | None = None,
        may_overflow: bool = False,
    ) -> None:
        """Run a pass that adds to the sums; name the batch where vectors among them are not finite.

        Where w is beyond all measure, or where a likelihood at J w ``may_overflow``, solvers know.
        """
        self._accumulate(sums, add, rows)
        vectors, hidden = [total for total in sums.values() if total.dim()], False
        if not all(map(is_finite, vectors)) and (w is None or is_moderate(w)):
            self._finite.refuse(DERIVATIVE)
            if not may_overflow:
                self._finite.refuse(LIKELIHOOD)
            hidden = self._finite.first_fault(LIKELIHOOD) is None
        if self.data.group.meet("sums that are not finite", hidden, any):
            self._search(vectors, add, rows)

    def _search(self, vectors: list[Tensor], add: Work[None], rows: Rows) -> None:
        """Run a pass once more, to find the batch whose Jᵀ u is not finite."""
        for total in vectors:
            total.zero_()

        def checked(batch: Batch, done: int) -> None:
            add(batch, done)
            if not all(map(is_finite, vectors)) and self._finite.first_fault(LIKELIHOOD) is None:
                raise FloatingPointError(DERIVATIVE.format(batch.index))

        for _ in self._over(checked, rows):
            pass
        for total in vectors:  # as they were
            total.fill_(float("nan"))

    def _accumulate(self, sums: dict[str, Tensor], add: Work[None], rows: Rows) -> None:
        """Run a pass whose work on each batch adds to the sums, in place."""
        for _ in self._over(add, rows):
            pass

    def _over(self, work: Work[T], rows: Rows = Rows()) -> Iterator[T]:
        """Yield ``work`` on every batch of a pass, or on its halves where it does not fit."""
        for batch in self._batches(rows):
            yield from self._worked(batch, work)

    def _worked(self, batch: Batch, work: Work[T], done: int = 0) -> Iterator[T]:
        pieces = self._pieces(batch, self.linear_model.rows_at_once)
        if len(pieces) > 1:
            for piece in pieces:
                yield from self._worked(piece, work, done)
            return

        def run() -> T:
            inputs = self.linear_model.prepare(batch.inputs)
            return work(batch._replace(inputs=inputs), done)

        counted = self.data.num_outputs
        try:
            result, shortage = attempt(run)
        except DoesNotFit as error:
            done, shortage = done + error.columns_done, str(error)
        if shortage is None:
            yield result
            return
        self.data.num_outputs = counted
        size = (len(batch.rows) + 1) // 2
        halves = self._pieces(batch, size)
        if len(halves) == 1:
            raise DoesNotFit(self._no_room(batch, shortage))
        logger.warning("Out of memory: from now on at most %d rows of a batch at a time.", size)
        self.linear_model.rows_at_once = size
        for half in halves:
            yield from self._worked(half, work, done)

    def _batches(self, rows: Rows) -> Iterator[Batch]:
        """Yield the batches of one pass after the skipped rows, inside the network's guard."""
        self._finite.clear()
        self._refuse_new_versions()
        with self.linear_model.network.guarded():
            for whole in self.data.batches(rows.whole, rows.in_step):
                if rows.in_step and not len(whole.rows):
                    yield whole
                    continue
                self._probe(whole)
                if rows.skipped and self._skips(whole, rows):
                    continue
                for batch in self._pieces(whole, rows.at_most):
                    if self.data.num_passes == 0:
                        _check_finite(batch)
                    yield batch._replace(targets=self._align(batch.targets))
        self.refuse_changed_weights()
        self._finite.refuse(OUTPUTS)

    def _probe(self, batch: Batch) -> None:
        if self.linear_model.report is None:
            _check_finite(batch)
            self.linear_model.probe(batch.inputs)

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

    def _skips(self, whole: Batch, rows: Rows) -> bool:
        end = int(whole.rows[-1]) + 1
        if rows.prefix is None or end < rows.skipped:
            return end <= rows.skipped
        if int(whole.rows[0]) >= rows.skipped:
            return False
        read = self.data.fingerprint
        if end > rows.skipped or read is None or not read.repeats(rows.prefix):
            raise OtherOrderError
        return True

    def _no_room(self, batch: Batch, shortage: str) -> str:
        rows, P = len(batch.rows), self.size
        return (
            f"One column of {rows} row{'s' * (rows > 1)} of batch {batch.index} does not fit into "
            f"memory ({shortage}). It takes a forward pass that keeps its activations, twice their "
            f"largest, and 2 P numbers for a direction and a gradient ({2 * P * 4 / 1e9:.2g} GB "
            f"for P = {P}). What helps: smaller batches or inputs; fewer random weights "
            '(parameters="last_layer", or name patterns); fewer samples, or their vectors on the '
            'CPU (compute=Compute(vectors="cpu")).'
        )

    def _pieces(self, whole: Batch, at_most: float) -> list[Batch]:
        """Return the batch in pieces, or whole where the network does not take rows alone."""
        if len(whole.rows) <= at_most:
            return [whole]
        pieces = list(whole.split(int(at_most)))
        if len(pieces) > 1 and self._splits is None:
            self._splits = self._rows_stand_alone(whole, int(at_most))
        return pieces if self._splits else [whole]

    def _rows_stand_alone(self, whole: Batch, size: int) -> bool:
        """Whether rows have the same outputs with as many others, or half as many, beside them."""

        def compare() -> bool:
            piece, more = next(whole.split(size)), next(whole.split(2 * size))
            f = self.linear_model.outputs(more.inputs)[: len(piece.rows)]
            try:
                alone = self.linear_model.outputs(piece.inputs)
            except RuntimeError as error:
                if is_shortage(error):
                    raise
                return False  # of shapes: inputs that only look as if they went by rows
            if alone.shape != f.shape:
                return False
            return bool((alone - f).norm() <= _SPLIT_ERROR * f.norm() or not f.isfinite().all())

        answer, shortage = attempt(compare)
        if shortage is not None and size > 1:
            return self._rows_stand_alone(whole, size // 2)
        return bool(answer)

    def _inspect(self, batch: Batch, f: Tensor) -> None:
        """Note whether outputs are finite; in the first pass, check targets against them."""
        finite = torch.isfinite(f).all()
        self._finite.note(batch.index, OUTPUTS, finite)
        if self.data.num_passes == 0:
            self.data.num_outputs += f.numel()
        if self.data.num_passes == 0 and finite:
            try:
                self.likelihood.check(f, batch.targets)
            except (TypeError, ValueError) as error:
                raise type(error)(f"Batch {batch.index}: {error}") from None

    def _align(self, targets: Tensor) -> Tensor:
        """Move the classes of elementwise targets last, where those of the outputs are.

        Small integers become int64, and truth values numbers where every output has one.
        """
        if (targets.dtype == torch.bool and self.likelihood.elementwise) or targets.dtype in (
            torch.uint8,
            torch.int8,
            torch.int16,
            torch.int32,
        ):
            targets = targets.long()
        class_dim = self.linear_model.network.class_dim
        if self.likelihood.elementwise and -targets.dim() <= class_dim < targets.dim():
            return targets.movedim(class_dim, -1)
        return targets


def _check_finite(batch: Batch) -> None:
    def check(tensor: Tensor) -> None:
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ValueError(
                f"The inputs of batch {batch.index} hold NaN or infinite values: remove those rows."
            )

    map_tensors(check, batch.inputs)
