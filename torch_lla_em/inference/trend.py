"""How the error of a fit falls from step to step."""

from __future__ import annotations

import math
import time

from torch_lla_em.inference.em import State

_STEPS = 4
"""Number of the last steps whose pace is expected of the next ones."""


class ErrorTrend:
    """Notes the error after every step; as a string it is the warning of a fit that ends early."""

    def __init__(self, tolerance: float):
        self._tolerance = tolerance
        self._points: list[tuple[float, float]] = []
        self._converged = False

    def note(self, state: State) -> None:
        """Note the state after a step."""
        self._points.append((time.monotonic(), max(*state.errors, 1e-300)))
        self._converged = state.converged

    @property
    def is_exact(self) -> bool:
        """Whether samples and mean are within the tolerance."""
        return self._points[-1][1] <= self._tolerance

    def seconds_left(self) -> float:
        """Return the seconds to the tolerance if the error decreases as in the last steps, else infinity."""
        (first, before), (last, error) = self._points[-_STEPS:][0], self._points[-1]
        if self.is_exact:
            return 0.0
        fall = math.log(before / error) if error < before < math.inf else 0.0
        return (last - first) * math.log(error / self._tolerance) / fall if fall else math.inf

    def __str__(self) -> str:
        number, left = len(self._points), self.seconds_left()
        words = (
            f"The budget is spent after {number} step{'s' * (number > 1)}. The numerical error is "
            f"{self._points[-1][1]:.2g} posterior standard deviations (tolerance {self._tolerance:.2g})"
        )
        words += "." if self._converged else ", and the prior precision has not converged."
        if 0 < left < math.inf:
            words += f" {'About' if self._converged else 'At least'} {left:.2g} s more are needed."
        return f"{words} With Compute(checkpoint=folder), the same fit continues from here."
