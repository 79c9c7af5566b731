"""The result of every pass is kept, so that a killed run goes on where it was.

Passes over the data are nearly all of the cost, and everything between them is a function
of their results. A run that is started again reads the passes that are there instead of
the data, and ends where an unbroken one would: to rounding, where factors of J were kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from torch_lla_em.checkpoint.log import Log
from torch_lla_em.checkpoint.partial import Partial
from torch_lla_em.problem import Layer, Pass, Problem, Record, State, Step, Sums
from torch_lla_em.runtime import records

logger = logging.getLogger("torch_lla_em")

T = TypeVar("T")


class Recorded(Layer, Record):
    """Looks every pass up in a log, else has it made and writes it."""

    def __init__(self, problem: Problem, log: Log, partial: Partial):
        super().__init__(problem.passes)
        self._log, self._partial = log, partial
        self._data, self._cost, self._space = problem.data, problem.cost, problem.space
        self._device, self._group = problem.device, problem.data.group

    def fold(self, w: Tensor, task: Pass) -> Sums:
        """Return the sums over all batches."""
        return self.kept(w, lambda: self.inner.fold(w, task))

    def steps(self, state: State = None) -> Iterator[Step]:
        """Yield the batches of an epoch, whose state the epoch's own entry keeps."""
        yield from self.inner.steps(state)

    def kept(self, key: Tensor, compute: Callable[[], Sums]) -> Sums:
        """Return what was computed at ``key``, from the log where it is there."""
        asked, computed = self._mark(key), False

        def counted() -> Sums:
            nonlocal computed
            computed = True
            self._partial.begin(asked)
            return {**compute(), "facts": records.to_bytes(self._facts())}

        entry = self._log.recorded(asked, self._device, counted)
        if computed:  # what is kept of a part may be of a pass after those that were read
            self._partial.forget()
            self._warn_of_other_inputs()
        facts = records.from_bytes(entry.pop("facts"))
        self._cost.columns = facts.pop("columns")
        self._log.position = facts.pop("position")
        self._data.restore(facts)
        return entry

    def attempt(self, run: Callable[[], T]) -> tuple[T | None, str | None]:
        """Return the result, or that memory ended; if it did at first, it is not tried again."""
        tried: list[tuple[T | None, str | None]] = []

        def compute() -> Sums:
            tried.append(super(Recorded, self).attempt(run))
            return {"lasted": torch.tensor(tried[0][1] is None, device="cpu")}

        place = self._log.position
        lasted = bool(self.kept(torch.zeros(1, device="cpu"), compute)["lasted"])
        if lasted and not tried:
            self._log.position = place + 1  # where the passes in it begin
            return run(), None
        return tried[0] if tried else (None, "as it did at first")

    def _mark(self, key: Tensor) -> Tensor:
        """Return two numbers that tell one place where a pass is taken from another."""
        total = torch.stack([key.double().sum(), key.double().square().sum()])
        if key.is_floating_point() and key.device == self._device:
            total = self._space.sum(total)
        return torch.stack([total[0], total[1].sqrt()]).cpu()

    def _facts(self) -> dict[str, object]:
        position = self._log.position
        return {"columns": self._cost.columns, "position": position, **self._data.facts()}

    def _warn_of_other_inputs(self) -> None:
        if self._log.warned or self._data.group.rank > 0 or self._data.tells_inputs:
            return
        self._log.warned = True
        logger.warning(
            "Nothing of the inputs is compared at a restart: they are in objects that say nothing, "
            "or in batches that are made in another way at every pass. The checkpoint would go on "
            "with other inputs unnoticed."
        )
