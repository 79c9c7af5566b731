"""What a fit costs, by stage, and the progress within a pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import NamedTuple

from torch import Tensor

from torch_lla_em.data import Batch, Data
from torch_lla_em.jacobian import Rows
from torch_lla_em.problem.passes import Fold, Layer, Pass, Passes, Sums


class Spent(NamedTuple):
    """Of one stage."""

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
        """Count what is spent inside as this stage's, and not as that around it."""
        self.stages()
        outer, self.running = self.running, name
        try:
            yield
        finally:
            self.stages()
            self.running = outer

    def restore(self, columns: float, stages: dict[str, Spent]) -> None:
        """Go on from what an earlier run has spent."""
        self.stages()
        for name, spent in self._stages.items():
            stages[name] = Spent(*(a + b for a, b in zip(stages.get(name, Spent()), spent)))
        self.columns, self._stages = columns, stages
        self._mark = time.monotonic(), columns

    def stages(self) -> dict[str, Spent]:
        """Return what every stage has taken so far."""
        now = time.monotonic(), self.columns
        before = self._stages.get(self.running, Spent())
        seconds, columns = (b + n - m for b, n, m in zip(before, now, self._mark))
        self._stages[self.running], self._mark = Spent(seconds, columns), now
        return dict(self._stages)


class Watched(Layer):
    """Reports after every batch which share of the current pass is done, if that is known."""

    def __init__(self, inner: Passes, data: Data, report: Callable[[float | None], None]):
        super().__init__(inner)
        self._data, self._report = data, report

    def around(self, fold: Fold, w: Tensor, task: Pass) -> Sums:
        """Return the sums."""
        done = 0.0

        def add(rows: Rows, batch: Batch, columns: Tensor, sums: Sums) -> None:
            nonlocal done
            task.add(rows, batch, columns, sums)
            done += len(columns) * len(batch.rows) / max(1, len(w))
            number = self._rows(batch) / self._data.group.size
            self._report(None if number == inf else min(1.0, done / number))

        return fold(w, task._replace(add=add))

    def _rows(self, batch: Batch) -> float:
        """Return the number of examples, from the number of batches in the first pass."""
        return self._data.num_rows or (self._data.num_batches() or inf) * len(batch.rows)
