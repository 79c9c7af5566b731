"""The wall-clock time that a fit may take."""

from __future__ import annotations

import time
from math import inf

from torch_lla_em.runtime.group import Group

# the next step is expected to take this multiple of the last one, since the span of directions grows
_GROWTH = 1.2


class Budget:
    """Decides after which step a fit ends; all ranks decide the same."""

    def __init__(self, seconds: float | None = None, group: Group = Group()):
        self._group = group
        self._end, self._stepped = inf, time.monotonic()
        if seconds is not None:
            self._end = self._stepped + seconds

    def left(self, spare: float = 0.0) -> float:
        """Return the seconds that are left on the slowest rank, less what each rank spares."""
        if self._end == inf:
            return inf
        least: float = self._group.meet(self._end - time.monotonic() - spare, min)
        return least

    def ends(self) -> bool:
        """Return whether the step after the one that ends now would exceed the budget."""
        began, self._stepped = self._stepped, time.monotonic()
        return self.left(_GROWTH * (self._stepped - began)) < 0
