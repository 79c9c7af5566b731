"""Expectation maximisation: the iteration, and the bound that it climbs.

For any distribution q over the hidden variables z,

    log p(X | θ) = L(q, θ) + KL(q ‖ p(z | X, θ)),   L(q, θ) = E_q[log p(X, z | θ) − log q(z)].

The E-step sets the divergence to zero, the M-step raises the bound L, so log p(X | θ)
never falls. A step that keeps this promise can be held to it: see ``iterate``.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from torch import Tensor

from torch_lla_em.inference.e_step import EStep
from torch_lla_em.inference.evidence import log_evidences
from torch_lla_em.inference.mackay import Estimate, Hyperparameters, MStep, Step, warn_unsettled

SAMPLE_TOLERANCE = 0.1
MODE_TOLERANCE = 0.03
"""Bounds the relative error of w_lin; ‖w_lin‖² was then right to 0.2 % where measured."""

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


class Info(NamedTuple):
    """What is told of a step: where its expectations were taken, and what they are."""

    step: int
    hyper: Hyperparameters
    """λ and σ of the E-step."""

    effective_dim: Estimate
    """γ, () or (blocks,), with its standard error over samples."""

    squared_norm: Tensor
    """‖w_lin / scale‖², () or (blocks,)."""

    loss: float
    """Σ_n -log p(y_n | J_n w_lin)."""

    log_evidence: Estimate
    """Of the E-step's λ and σ; NaN where it would cost passes."""

    mode_error: float
    sample_error: float
    columns: float
    """Columns pushed through the data since the start (K for a K-column pass)."""

    seconds: float


class State(NamedTuple):
    """What EM goes on with."""

    hyper: Hyperparameters
    """λ and σ at which the next E-step is taken."""

    step: Step | None = None
    """The last step of λ and σ; None at the start."""

    info: Info | None = None
    """Of the step that led here; None at the start."""

    @property
    def settled(self) -> bool:
        """Whether λ and σ have settled, so that no step is left to take."""
        return self.step is not None and self.step.settled


def em(e_step: EStep, m_step: MStep, start: State, max_steps: int = 20) -> Iterator[State]:
    """Repeat E-step and M-step until λ moves by less than its own Monte Carlo error.

    ``start`` may be the last state of an earlier run, whose steps count too.
    """
    cost = m_step.problem.cost
    begin = time.monotonic() - (0.0 if start.info is None else start.info.seconds)

    def advance(old: State) -> State:
        at = old.hyper
        found = e_step.expect(at, SAMPLE_TOLERANCE, MODE_TOLERANCE)
        step = m_step(at, found, old.step)
        evidences = log_evidences(found.loss, at.precision, found.squared_norm, found.log_dets)
        info = Info(
            step.number,
            at,
            Estimate.of(found.effective_dims),
            found.squared_norm,
            found.loss,
            Estimate.of(evidences),
            found.mode_error,
            found.sample_error,
            cost.columns,
            time.monotonic() - begin,
        )
        return State(step.hyper, step, info)

    taken = 0 if start.step is None else start.step.number
    left = 0 if start.settled else max(0, max_steps - taken)
    # true EM is exact where the posterior is Gaussian, so that the evidence never falls
    exact = m_step.update == "em" and m_step.problem.likelihood.is_quadratic
    objective = _log_evidence if exact and e_step.knows_evidence else None
    state = start
    for state in iterate(
        advance, start, max_steps=left, settled=lambda _, new: new.settled, objective=objective
    ):
        yield state
    if state.step is not None and not state.settled:
        warn_unsettled(max_steps, state.step.moved)


def _log_evidence(state: State) -> float:
    return -math.inf if state.info is None else state.info.log_evidence.value.item()
