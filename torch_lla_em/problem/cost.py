"""What a fit spends, by stage, and how far the pass under way has come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from torch_lla_em.data import Batch
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
        self._running, self._mark = "setting up", (time.monotonic(), 0.0)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count what is spent inside as this stage's, and not as that around it."""
        self.stages()
        outer, self._running = self._running, name
        try:
            yield
        finally:
            self.stages()
            self._running = outer

    def stages(self) -> dict[str, Spent]:
        """Return what every stage has taken so far."""
        now = time.monotonic(), self.columns
        before = self._stages.get(self._running, Spent())
        seconds, columns = (b + n - m for b, n, m in zip(before, now, self._mark))
        self._stages[self._running], self._mark = Spent(seconds, columns), now
        return dict(self._stages)


class Watched(Layer):
    """Tells after every batch how many columns of a pass are done, and of how many."""

    def __init__(self, inner: Passes, rows: float, tell: Callable[[float, int], None]):
        super().__init__(inner)
        self._rows, self._tell = rows, tell

    def around(self, fold: Fold, w: Tensor, task: Pass) -> Sums:
        """Return the sums."""
        done = 0.0

        def add(batch: Batch, columns: Tensor, sums: Sums) -> None:
            nonlocal done
            task.add(batch, columns, sums)
            done += len(columns) * len(batch.rows) / self._rows
            self._tell(done, len(w))

        return fold(w, task._replace(add=add))
