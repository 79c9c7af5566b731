"""What a fit has reached when its budget of time is spent, and what more time would give."""

from __future__ import annotations

import time
from math import exp, inf, log
from typing import Any

from torch_lla_em.inference.records import State, Statistics

_STEPS = 4
"""Number of the last steps whose pace is expected of the next ones."""

_ROUGH = 0.5
"""Error relative to posterior standard deviations above which variances should not be used."""


class Forecast:
    """Notes the error after every step; as a string it is the warning of a fit that ends early."""

    def __init__(self, tolerance: float):
        self._tolerance = tolerance
        self._times: list[float] = []
        self._errors: list[float] = []
        self._state: State | None = None

    def note(self, state: State) -> None:
        """Note the state after a step."""
        self._state = state
        self._times.append(time.monotonic())
        self._errors.append(max(_found(state).error, 1e-300))

    @property
    def is_exact(self) -> bool:
        """Whether samples and mean are within the tolerance."""
        return self._errors[-1] <= self._tolerance

    def seconds_left(self) -> float:
        """Return the seconds to the tolerance if the error decreases as in the last steps, else infinity."""
        if self.is_exact:
            return 0.0
        errors, times = self._errors[-_STEPS:], self._times[-_STEPS:]
        fall = log(errors[0] / errors[-1])
        return (
            (times[-1] - times[0]) * log(errors[-1] / self._tolerance) / fall if fall > 0 else inf
        )

    def __str__(self) -> str:
        state, left = self._state, self.seconds_left()
        if state is None or state.before is None:
            return "The budget is spent."
        found, number = _found(state), len(self._errors)
        words = (
            f"The budget of the fit is spent after {number} step{'s' * (number > 1)}. The numerical error of the "
            f"samples is {found.sample_error:.2g} posterior standard deviations, and that of the mean "
            f"{found.mode_error:.2g} (tolerance {self._tolerance:.2g})."
        )
        if state.converged:
            words += " The prior precision has converged."
        else:
            moved = (state.precision / state.before).log().abs().max().item()
            words += f" The prior precision has not converged: it changed by a factor of {exp(moved):.2g}"
            words += " in the last step."
        if found.sample_error > _ROUGH:
            words += " Do not use the variances yet."
        if left == inf:
            words += " The time that is still needed is not known."
        elif left:
            least = "about" if state.converged else "at least"
            words += f" To reach the tolerance, {least} {left:.2g} s more are needed."
        return words + " With a `checkpoint` folder, the same call of fit continues from here."


def _found(state: State) -> Statistics:
    """Return the result of the last E-step of a state after a step."""
    found: Any = state.statistics
    known: Statistics = found
    return known
