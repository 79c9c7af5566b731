"""Expectation maximisation: the iteration, and the bound that it climbs.

For any distribution q over the hidden variables z,

    log p(X | θ) = L(q, θ) + KL(q ‖ p(z | X, θ)),   L(q, θ) = E_q[log p(X, z | θ) − log q(z)].

The E-step sets the divergence to zero, the M-step raises the bound L, so log p(X | θ)
never falls. A step that keeps this promise can be held to it: see ``iterate``.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from torch_lla_em.inference.e_step import EStep, Expectation, Hyperparameters
from torch_lla_em.inference.evidence import log_evidences
from torch_lla_em.inference.mackay import (
    Estimate,
    em_noise,
    em_update,
    function_space_Mackay_update,
    mackay_noise,
    resolved,
)
from torch_lla_em.inference.prior import Prior
from torch_lla_em.problem import Problem

SAMPLE_TOLERANCE = 0.1
MODE_TOLERANCE = 0.03
"""Bounds the relative error of w_lin; ‖w_lin‖² was then right to 0.2 % where measured."""

S = TypeVar("S")

logger = logging.getLogger("torch_lla_em")


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
    """λ and σ of the M-step: where the next E-step is taken."""

    plain: Tensor | None = None
    """log λ of the M-step before acceleration; None at the start."""

    change: float = math.inf
    """The largest |Δ log| of λ and σ², over what Monte Carlo error lets it mean."""

    info: Info | None = None
    """Of the step that led here; None at the start."""

    settled: bool = False
    """Whether λ and σ have settled, so that no step is left to take."""

    @property
    def num_steps(self) -> int:
        """Steps so far."""
        return 0 if self.info is None else self.info.step


@dataclass(frozen=True)
class MStep:
    """New hyper-parameters from expectations at the old ones."""

    problem: Problem
    prior: Prior
    update: str = "mackay"
    """"mackay": the fast fixed point; "em": never lowers the evidence, and is slow."""

    def __call__(
        self, hyper: Hyperparameters, expectation: Expectation, gamma: Tensor
    ) -> Hyperparameters:
        """Return λ and σ."""
        precision, sigma = hyper
        square = expectation.squared_norm
        if sigma is not None:
            sigma = self._noise(sigma, expectation)
        if self.update == "em":
            proposed = em_update(gamma, square, precision, self.prior.num_weights())
        else:
            proposed = function_space_Mackay_update(gamma, square, precision)
        return Hyperparameters(proposed, sigma)

    def _noise(self, sigma: Tensor, expectation: Expectation) -> Tensor:
        """Return the new σ."""
        count = torch.full_like(sigma, self.problem.data.num_targets / sigma.numel())
        dims, targets = expectation.noise_dims.to(sigma), expectation.targets.to(sigma)
        eps = torch.finfo(self.problem.dtype).eps
        residual = resolved(expectation.residual.to(sigma), targets, eps)
        if self.update == "em":
            return em_noise(residual, dims, count, sigma)
        return mackay_noise(residual, dims, count)

    def allowed(self, gamma: Tensor, num_samples: int) -> Tensor:
        """Return max(0.01, 1 / √(K γ)), the Monte Carlo error of log λ, () or (blocks,).

        The slow steps of true EM are held to a tenth of a per cent: small steps there do
        not mean that the end is near.
        """
        if self.update == "em":
            return torch.full_like(gamma, 1e-3)
        return (num_samples * gamma.clamp_min(1e-12)).rsqrt().clamp_min(0.01)

    def accelerate(self, old: State, proposed: Hyperparameters) -> Hyperparameters:
        """Go on along the fixed point's own contraction or oscillation (a secant step in log λ)."""
        here = old.hyper.precision.log()
        if self.update == "em" or here.dim() or proposed.sigma is not None or old.info is None:
            return proposed
        plain, before = proposed.precision.log(), old.info.hyper.precision.log()
        slope = (plain - old.plain) / (here - before)
        if not -1 < slope < 0.9:  # below 0 the fixed point is overshot from either side
            return proposed
        return proposed._replace(precision=(here + (plain - here) / (1 - slope)).exp())

    @property
    def ascends(self) -> bool:
        """Whether EM is exact here: its own update, and a Gaussian posterior."""
        return self.update == "em" and self.problem.likelihood.is_quadratic


def em(e_step: EStep, m_step: MStep, start: State, max_steps: int = 20) -> Iterator[State]:
    """Repeat E-step and M-step until λ moves by less than its own Monte Carlo error.

    ``start`` may be the last state of an earlier run, whose steps count too.
    """
    cost = m_step.problem.cost
    begin = time.monotonic() - (0.0 if start.info is None else start.info.seconds)

    def step(old: State) -> State:
        at = old.hyper
        found = e_step.expect(at, SAMPLE_TOLERANCE, MODE_TOLERANCE)
        gamma = Estimate.of(found.effective_dims)
        plain = m_step(at, found, gamma.value)
        new = m_step.accelerate(old, plain)
        evidences = log_evidences(found.loss, at.precision, found.squared_norm, found.log_dets)
        info = Info(
            old.num_steps + 1,
            at,
            gamma,
            found.squared_norm,
            found.loss,
            Estimate.of(evidences),
            found.mode_error,
            found.sample_error,
            cost.columns,
            time.monotonic() - begin,
        )
        allowed = m_step.allowed(gamma.value, len(found.effective_dims))
        state = State(new, plain.precision.log(), _change(at, new, allowed), info)
        return state._replace(settled=settled(old, state))

    left = 0 if start.settled else max(0, max_steps - start.num_steps)
    state, objective = start, _log_evidence if m_step.ascends and e_step.knows_evidence else None
    steps = iterate(
        step, start, max_steps=left, settled=lambda _, new: new.settled, objective=objective
    )
    for new in steps:
        state = new
        yield new
    if state.info is not None and not state.settled:
        here = state.info.hyper.precision
        warn_unsettled(max_steps, (state.hyper.precision / here).log().abs().max().item())


def warn_unsettled(steps: int, moved: float) -> None:
    """Log that EM has ended before its fixed point; ``moved`` is the last step of log λ."""
    logger.warning(
        "The prior precision had not settled after %d EM steps: the last one changed it by a "
        "factor of %.2g. Raise em_steps, or start nearer with prior_precision.",
        *(steps, math.exp(moved)),
    )


def settled(old: State, new: State) -> bool:
    """Whether what is left of a geometric approach is below the Monte Carlo error."""
    if old.info is None or old.info.step < 2:  # one ratio of changes is no rate yet
        return False
    ratio = new.change / max(old.change, 1e-300)
    left = new.change if ratio >= 1 else new.change * max(1.0, ratio / (1 - ratio))
    return left < 1.0


def _log_evidence(state: State) -> float:
    return -math.inf if state.info is None else state.info.log_evidence.value.item()


def _change(old: Hyperparameters, new: Hyperparameters, allowed: Tensor) -> float:
    """Return the largest |Δ log| of λ over what is allowed, and of σ² over the least of it."""
    change = ((new.precision.log() - old.precision.log()).abs() / allowed).max().item()
    if old.sigma is not None:
        moved = 2 * (new.sigma.log() - old.sigma.log()).abs().max()
        change = max(change, moved.item() / allowed.min().item())
    return change
