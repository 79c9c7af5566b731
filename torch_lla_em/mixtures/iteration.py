"""Expectation maximisation: the iteration of a mixture, and the bound that it raises.

For any distribution q over the hidden variables z,

    log p(X | θ) = L(q, θ) + KL(q ‖ p(z | X, θ)),   L(q, θ) = E_q[log p(X, z | θ) − log q(z)].

The E-step sets the divergence to zero, the M-step raises the bound L, so log p(X | θ)
never falls. A step that keeps this promise can be held to it: see ``iterate``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from torch import Tensor

S = TypeVar("S")


class BoundWarning(UserWarning):
    """An objective that should never fall has fallen, or is not a number."""


def iterate(
    step: Callable[[S], S],
    state: S,
    *,
    max_steps: int,
    settled: Callable[[S, S], bool],
    objective: Callable[[S], float] | None = None,
    rounding: float = 1e-9,
) -> Iterator[S]:
    """Yield the state after each step, until ``settled(old, new)`` or ``max_steps``.

    Give an ``objective`` only where the step promises ascent: a fall by more than
    ``rounding`` · max(1, |objective|) then raises a ``BoundWarning``. A start whose
    objective is not known yet may report −∞.
    """
    if max_steps < 0:
        raise ValueError(f"max_steps must be 0 or more, not {max_steps}.")
    value = None if objective is None else float(objective(state))
    for number in range(1, max_steps + 1):
        old, state = state, step(state)
        if objective is not None:
            before, value = value, float(objective(state))
            _check_ascent(number, before, value, rounding)
        yield state
        if settled(old, state):
            return


def _check_ascent(number: int, before: float, after: float, rounding: float) -> None:
    if math.isnan(after):
        fault = f"The objective is not a number after step {number} (it was {before:.10g})."
    elif after < before - rounding * max(1.0, abs(before)):
        fault = (
            f"The objective fell in step {number}, from {before:.10g} to {after:.10g} "
            f"(by {before - after:.3g}), though its step promises ascent."
        )
    else:
        return
    remedy = " Check that every pass sees the same data, or compute in double precision."
    warnings.warn(fault + remedy, BoundWarning, stacklevel=3)


class Evidence(NamedTuple):
    """log p(X | θ), split into a lower bound and the divergence that it leaves."""

    lower_bound: Tensor
    """L(q, θ), shape ()."""

    divergence: Tensor
    """KL(q ‖ p(z | X, θ)), shape ()."""


def split_evidence(log_joint: Tensor, q: Tensor) -> Evidence:
    """Split log p(X | θ) at q(z), for log p(x, z | θ) with one row per datum, shape (N, K)."""
    log_posterior = log_joint.log_softmax(-1)
    return Evidence(_expected_ratio(q, log_joint), -_expected_ratio(q, log_posterior))


def _expected_ratio(q: Tensor, log_p: Tensor) -> Tensor:
    """Return Σ q (log p − log q), where states that q excludes count for nothing."""
    return (q * (log_p - q.log())).where(q > 0, 0.0).sum()
