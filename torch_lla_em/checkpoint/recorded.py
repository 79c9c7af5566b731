"""Checkpoints: the result of every pass is kept, so that a killed run goes on where it was.

Passes over the data are nearly all of the cost, and everything between them is a function
of their results. A run that is started again reads the passes that are there instead of
the data, and ends bitwise where an unbroken one would.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from torch_lla_em.checkpoint.partial_pass import PartialPass
from torch_lla_em.checkpoint.pass_log import PassLog
from torch_lla_em.checkpoint.shortages import Shortages
from torch_lla_em.data import Batch
from torch_lla_em.problem import (
    OUTPUTS,
    BatchProduct,
    Cotangent,
    NoiseFeatures,
    OtherOrderError,
    Problem,
    Rows,
    State,
    Work,
    is_finite,
)
from torch_lla_em.runtime import Leaving
from torch_lla_em.runtime import records as persistence

logger = logging.getLogger("torch_lla_em")

T = TypeVar("T")


class RecordedProblem(Problem):
    """A problem whose passes go through a log, in parts where they take long."""

    log: PassLog
    partial: PartialPass
    leaving: Leaving
    shortages: Shortages | None = None

    def record(self, log: PassLog, leaving: Leaving) -> None:
        """Begin to use a log; end at the next batch once it is time to leave."""
        self.log, self.leaving = log, leaving
        self.partial = PartialPass(log.folder / "partial.pt")
        if self.data.group.size == 1:
            self.shortages = Shortages(log)
            leaving.idle = lambda: self.partial.summed == self._read

    def ggn_product(self, w: Tensor) -> Tensor:
        """Return G w, shape (K, P)."""
        return self._recorded(w, lambda: {"Gw": super(RecordedProblem, self).ggn_product(w)})["Gw"]

    def loss_and_gradient(self, w: Tensor) -> tuple[float, Tensor]:
        """Return Σ_n -log p(y_n | J_n w) and its gradient, shape (P,)."""

        def compute() -> dict[str, Tensor]:
            loss, gradient = super(RecordedProblem, self).loss_and_gradient(w)
            return {"loss": torch.tensor(loss, dtype=torch.float64), "gradient": gradient}

        entry = self._recorded(w, compute)
        return entry["loss"].item(), entry["gradient"]

    def noise_features(self, num_samples: int, seed: int) -> NoiseFeatures:
        """Return η and s² from one pass, whose noise is keyed by (seed, row)."""

        def compute() -> dict[str, Tensor]:
            return super(RecordedProblem, self).noise_features(num_samples, seed)._asdict()

        entry = self._recorded(torch.tensor([num_samples, seed], device=self.device), compute)
        return NoiseFeatures(entry["eta"], entry["squares"])

    def rows(self) -> Tensor:
        """Return R, shape (N C, P), with G = RᵀR."""
        key = torch.zeros(1, device=self.device)
        return self._recorded(key, lambda: {"R": super(RecordedProblem, self).rows()})["R"]

    def kept(self, key: Tensor, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return what was computed at ``key``, from the log where it is there."""
        return self._recorded(key, compute)

    def lasts(self, run: Callable[[], object]) -> bool:
        """Run something, and return whether memory lasted, and did in a run before this one."""
        if self.shortages is None:
            return super().lasts(run)
        lasted = True

        def give_up() -> bool:
            nonlocal lasted
            lasted = False
            return True

        self.shortages.with_room(lambda: run() if lasted else None, give_up)
        return lasted

    def room(self) -> float:
        """Return the bytes that were free when the fit first asked here, so that it chooses alike."""
        free = self.free_memory()
        key = torch.zeros(1, device=self.device)
        known = self.kept(key, lambda: {"bytes": torch.tensor(free, dtype=torch.float64)})
        begun = known["bytes"].item()
        if free < begun / 2:
            logger.warning(
                "The fit had %.2g GB free here, half of which a Krylov basis may take, and goes on "
                "so; now there are %.2g GB. If memory ends, go on where there is as much, or begin "
                "anew in another folder.",
                begun / 1e9,
                free / 1e9,
            )
        return begun

    def _accumulate(self, sums: dict[str, Tensor], add: Work[None], rows: Rows) -> None:
        """Run a pass whose work on each batch adds to the sums, in place.

        Of several ranks none keeps a part of a pass, since others may go on with the run.
        """
        if self.data.group.size > 1:
            return super()._accumulate(sums, add, rows)

        def counted(batch: Batch, done: int) -> int:
            add(batch, done)
            return int(batch.rows[-1]) + 1

        with self._kept_when_left(sums):
            for reached in self._gone_on_with(sums, partial(self._over, counted), rows):
                if reached == self.data.rows_seen and self.partial.due():
                    self._keep(sums)

    def _minibatches(
        self, cotangent: Cotangent, state: State = None, rows: Rows = Rows(in_step=True)
    ) -> Iterator[tuple[int, BatchProduct]]:
        """Yield the steps of an epoch, and keep the state between them where it takes long."""
        if state is None or self.data.group.size > 1:
            yield from super()._minibatches(cotangent, state, rows)
            return
        spent = self.cost.columns
        sums = {**state, "columns": torch.zeros((), dtype=torch.float64)}

        def steps(rows: Rows) -> Iterator[tuple[int, BatchProduct]]:
            self.cost.columns = spent + sums["columns"].item()
            yield from super(RecordedProblem, self)._minibatches(cotangent, state, rows)

        with self._kept_when_left(sums):
            for step in self._gone_on_with(sums, steps, rows):
                yield step
                sums["columns"].fill_(self.cost.columns - spent)
                if self.partial.due():
                    self._keep(sums)

    def _gone_on_with(
        self, sums: dict[str, Tensor], sweep: Callable[[Rows], Iterator[T]], rows: Rows
    ) -> Iterator[T]:
        """Yield from a sweep that changes the sums in place, after the rows they are known of."""
        self.partial.next_part()
        outputs = self.data.num_outputs
        kept = self.partial.restore(self.log.position, sums, self.data)
        if kept is None:
            yield from sweep(rows)
            return
        try:
            yield from sweep(rows._replace(skipped=kept.rows.skipped, prefix=kept.rows.prefix))
        except OtherOrderError:  # a loader that shuffles: the sweep begins anew
            for name, total in kept.before.items():
                sums[name].copy_(total)
            self.data.num_outputs = outputs
            yield from sweep(rows)

    def _batches(self, rows: Rows) -> Iterator[Batch]:
        self.partial.summed = self.data.num_passes, rows.skipped
        for batch in super()._batches(rows):
            yield batch
            # after the last piece of a batch, when its sums have been made
            if self.data.group.size > 1 or int(batch.rows[-1]) + 1 == self.data.rows_seen:
                self.partial.summed = self._read
                if self.leaving.requested:
                    raise self.leaving.requested

    @property
    def _read(self) -> tuple[int, int]:
        """Passes so far, and rows of the one under way."""
        return self.data.num_passes, self.data.rows_seen

    @contextmanager
    def _kept_when_left(self, sums: dict[str, Tensor]) -> Iterator[None]:
        """Keep the sums of whole batches where somebody asked to leave."""
        try:
            yield
        except BaseException as error:
            asked = self.leaving.requested
            if asked and (error is asked or isinstance(error, Exception)) and self.leaving.idle():
                self._keep(sums)
            raise

    def _keep(self, sums: dict[str, Tensor]) -> None:
        """Write the sums over the rows so far, if they are worth it."""
        if not (self.log.writing and self.data.fingerprint and self.data.rows_seen):
            return
        if self._finite.first_fault(OUTPUTS) is None and all(map(is_finite, sums.values())):
            self.refuse_changed_weights()
            try:
                self.partial.write(self.log.position, sums, self.data)
            except OSError as error:
                self.log.give_up(error)

    def _recorded(self, key: Tensor, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        computed = False
        if self.shortages is not None:
            self.shortages.meet()

        def counted() -> dict[str, Tensor]:
            nonlocal computed
            computed = True
            self.partial.begin(self.log.asked)
            return {**compute(), "facts": persistence.to_bytes(self._facts())}

        entry = self.log.recorded(key, counted)
        if computed:  # what is kept may be of a pass that comes after those that were read
            self.partial.forget()
            self._warn_of_other_inputs()
        facts = persistence.from_bytes(entry.pop("facts"))
        self.cost.columns = facts.pop("columns")
        self.data.restore(facts)
        return entry

    def _warn_of_other_inputs(self) -> None:
        if self.log.warned or self.data.group.rank > 0 or self.data.tells_inputs:
            return
        self.log.warned = True
        logger.warning(
            "Nothing of the inputs is compared at a restart: they are in objects that say nothing, "
            "or in batches that are made in another way at every pass. The checkpoint would go on "
            "with other inputs unnoticed."
        )

    def _facts(self) -> dict[str, Any]:
        return {"columns": self.cost.columns, **self.data.facts()}
