"""What a fit spends, by stage, and what is left of it by how fast errors fall."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from torch_lla_em.data import Batch
from torch_lla_em.problem.passes import Fold, Layer, Pass, Passes, Sums

USUAL = 12
"""K-fold columns of a fit after the noise, where nothing is known yet: between 6 and 25."""

_BEFORE = "setting up", "noise"
_OF_NOISE = 2.5
# K-fold columns that are still to come while λ is far from its end
_AT_LEAST = 4

# of an error from one pass to the next, and what it is taken for at first
_RATES, _RATE = (0.1, 0.75), 0.4


class Spent(NamedTuple):
    """Of one stage."""

    seconds: float = 0.0
    columns: float = 0.0


class Cost:
    """Columns pushed through the data (K for a K-column pass) and seconds, by stage."""

    def __init__(self) -> None:
        self.columns = 0.0
        self.begun = 0.0
        """Of the pass under way, columns so far."""

        self.whole: float | None = None
        """Columns in all, as far as errors tell; None where they do not yet."""

        self.near = False
        """Whether λ is near enough to its end for errors there to tell."""

        self.column: float | None = None
        """Seconds of a column as first timed."""

        self._stages: dict[str, Spent] = {}
        self._running, self._mark = "setting up", (time.monotonic(), 0.0)
        self._rate = _RATE

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

    def falls(self, before: float, error: float) -> None:
        """Take note of how far one pass has brought an error down."""
        if 0 < error < math.inf and 0 < before < math.inf:
            now = min(max(error / before, _RATES[0]), _RATES[1])
            self._rate = (now * self._rate) ** 0.5

    def approach(self, error: float, goal: float, columns: float, after: float = 0.0) -> None:
        """Forecast passes of so many columns from an error to its goal, and others ``after``."""
        passes = math.log(max(error / goal, 1.0)) / -math.log(self._rate)
        self.whole = self.columns + columns * math.ceil(passes) + after

    def seconds_left(self, num_samples: int) -> float | None:
        """Return about how long the fit will go on; None before the first numbers."""
        stages, done = self.stages(), self.columns + self.begun
        spent = [s for name, s in stages.items() if name not in _BEFORE]
        seconds, columns = (sum(part) for part in zip(*spent)) if spent else (0.0, 0.0)
        columns += self.begun if self._running not in _BEFORE else 0.0
        each = self.column if columns < num_samples else seconds / columns
        if each is None:
            return None
        usual = (1 + USUAL) * num_samples
        whole = usual if self.whole is None else self.whole
        if not self.near:
            whole = max(whole, usual, done + _AT_LEAST * num_samples)
        # the noise comes in small groups of rows
        noise = (_OF_NOISE - 1) * max(0.0, num_samples - done)
        return each * (max(whole - done, 0.1 * num_samples) + noise)


class Watched(Layer):
    """Tells after every batch how far a pass has come."""

    def __init__(self, inner: Passes, cost: Cost, rows: float, tell: Callable[[], None]):
        super().__init__(inner)
        self._cost, self._rows, self._tell = cost, rows, tell

    def around(self, fold: Fold, w: Tensor, task: Pass) -> Sums:
        """Return the sums."""

        def add(batch: Batch, w: Tensor, sums: Sums) -> None:
            task.add(batch, w, sums)
            self._cost.begun += len(w) * len(batch.rows) / self._rows
            self._tell()

        self._cost.begun = 0.0
        found = fold(w, task._replace(add=add))
        self._cost.begun = 0.0
        return found
