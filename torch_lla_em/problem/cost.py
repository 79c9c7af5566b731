"""The cost of a fit, by stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Spent(NamedTuple):
    """Seconds and columns of one stage."""

    seconds: float = 0.0
    columns: float = 0.0


class Cost:
    """Columns pushed through the data (K for a K-column pass) and seconds, by stage."""

    def __init__(self) -> None:
        self.columns = 0.0
        self._stages: dict[str, Spent] = {}
        self.running, self._mark = "setting up", (time.monotonic(), 0.0)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Assign the cost of the block to this stage, and not to the stage around it."""
        self.stages()
        outer, self.running = self.running, name
        try:
            yield
        finally:
            self.stages()
            self.running = outer

    def restore(self, columns: float, stages: dict[str, Spent]) -> None:
        """Add the cost of an earlier run."""
        self.stages()
        for name, spent in self._stages.items():
            stages[name] = Spent(*(a + b for a, b in zip(stages.get(name, Spent()), spent)))
        self.columns, self._stages = columns, stages
        self._mark = time.monotonic(), columns

    def stages(self) -> dict[str, Spent]:
        """Return the cost of every stage so far."""
        now = time.monotonic(), self.columns
        before = self._stages.get(self.running, Spent())
        seconds, columns = (b + n - m for b, n, m in zip(before, now, self._mark))
        self._stages[self.running], self._mark = Spent(seconds, columns), now
        return dict(self._stages)
