"""EM over the prior precision and the noise, as a generator of states."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.inference.em import iterate
from torch_lla_em.inference.evidence import log_evidences
from torch_lla_em.inference.expectation import EStep, Expectation, Hyperparameters
from torch_lla_em.inference.mackay import (
    Estimate,
    em_noise,
    em_update,
    function_space_Mackay_update,
    mackay_noise,
)
from torch_lla_em.inference.prior import Prior
from torch_lla_em.inference.stochastic_prior import StochasticPrior
from torch_lla_em.problem import Problem, WhitenedGGN, WhitenedLoss

SAMPLE_TOLERANCE = 0.1
MODE_TOLERANCE = 0.03
"""Bounds the relative error of w_lin; ‖w_lin‖² was then right to 0.2 % where measured."""


class EMState(NamedTuple):
    """One step: where its expectations were taken, what they are, and what they propose."""

    step: int
    hyper: Hyperparameters
    """λ and σ of the E-step."""

    proposed: Hyperparameters
    """λ and σ of the M-step: where the next step goes."""

    effective_dim: Estimate
    """γ, () or (blocks,), with its standard error over samples."""

    squared_norm: Tensor
    """‖w_lin / scale‖², () or (blocks,)."""

    loss: float
    """Σ_n -log p(y_n | J_n w_lin)."""

    plain: Tensor
    """log λ of the M-step before acceleration."""

    log_evidence: Estimate
    """Of the E-step's λ and σ; NaN where it would cost passes."""

    mode_error: float
    sample_error: float
    columns: float
    """Columns pushed through the data since the start (K for a K-column pass)."""

    seconds: float
    change: float
    """The largest |Δ log| of λ and σ², over what Monte Carlo error lets it mean."""

    @classmethod
    def initial(cls, hyper: Hyperparameters) -> EMState:
        """Return the state before the first step."""
        nothing = Estimate(torch.full((), float("nan")), torch.full((), float("nan")))
        start = hyper.precision.log()
        low = Estimate(torch.tensor(-inf), nothing.value)
        return cls(
            0, hyper, hyper, nothing, nothing.value, inf, start, low, inf, inf, 0.0, 0.0, inf
        )


@dataclass(frozen=True)
class EmpiricalBayes:
    """Repeat E-step and M-step until λ moves by less than its own Monte Carlo error."""

    problem: Problem
    prior: Prior
    e_step: EStep
    update: str = "mackay"
    """"mackay": the fast fixed point; "em": never lowers the evidence, and is slow."""

    max_steps: int = 20

    def steps(self, hyper: Hyperparameters) -> Iterator[EMState]:
        """Yield the state after each step."""
        begin = time.monotonic()

        def step(state: EMState) -> EMState:
            new = self._step(state)
            return new._replace(seconds=time.monotonic() - begin)

        return iterate(
            step,
            EMState.initial(hyper),
            max_steps=self.max_steps,
            settled=settled,
            objective=_log_evidence if self._promises_ascent() else None,
        )

    def _step(self, state: EMState) -> EMState:
        hyper = state.proposed
        expectation = self.e_step.expect(hyper, SAMPLE_TOLERANCE, MODE_TOLERANCE)
        gamma = Estimate.of(expectation.effective_dims)
        plain = self._maximise(hyper, expectation, gamma.value)
        proposed = self._accelerate(state, plain)
        log_dets = expectation.log_dets
        if log_dets is None:
            log_dets = torch.full((len(expectation.effective_dims),), float("nan"))
        evidences = log_evidences(
            expectation.loss, hyper.precision, expectation.squared_norm, log_dets
        )
        return EMState(
            state.step + 1,
            hyper,
            proposed,
            gamma,
            expectation.squared_norm,
            expectation.loss,
            plain.precision.log(),
            Estimate.of(evidences),
            expectation.mode_error,
            expectation.sample_error,
            self.problem.cost.columns,
            0.0,
            _change(hyper, proposed, self._allowed(gamma.value, expectation)),
        )

    def _accelerate(self, old: EMState, proposed: Hyperparameters) -> Hyperparameters:
        """Go on along the fixed point's own contraction (a secant step in log λ)."""
        before, here = old.hyper.precision.log(), old.proposed.precision.log()
        if self.update == "em" or here.dim() or proposed.sigma is not None or old.step == 0:
            return proposed
        plain = proposed.precision.log()
        slope = (plain - old.plain) / (here - before)
        if not 0 < slope < 0.9:
            return proposed
        return proposed._replace(precision=(here + (plain - here) / (1 - slope)).exp())

    def _allowed(self, gamma: Tensor, expectation: Expectation) -> Tensor:
        """Return max(0.01, 1 / √(K γ)), the Monte Carlo error of log λ, () or (blocks,).

        The slow steps of true EM are held to a tenth of a per cent: small steps there do
        not mean that the end is near.
        """
        if self.update == "em":
            return torch.full_like(gamma, 1e-3)
        num_samples = len(expectation.effective_dims)
        return (num_samples * gamma.clamp_min(1e-12)).rsqrt().clamp_min(0.01)

    def _promises_ascent(self) -> bool:
        """Whether EM is exact here: its own update, and a Gaussian posterior."""
        return self.update == "em" and self.problem.likelihood.is_quadratic

    def _maximise(
        self, hyper: Hyperparameters, expectation: Expectation, gamma: Tensor
    ) -> Hyperparameters:
        precision, sigma = hyper
        square = expectation.squared_norm
        if self.update == "em":
            proposed = em_update(gamma, square, precision, self.prior.num_weights())
        else:
            proposed = function_space_Mackay_update(gamma, square, precision)
        if sigma is not None:
            count = torch.full_like(sigma, self.problem.data.num_targets / sigma.numel())
            residual, dims = expectation.residual.to(sigma), expectation.noise_dims.to(sigma)
            if self.update == "em":
                sigma = em_noise(residual, dims, count, sigma)
            else:
                sigma = mackay_noise(residual, dims, count)
        return Hyperparameters(proposed, sigma)


def _log_evidence(state: EMState) -> float:
    return state.log_evidence.value.item()


def settled(old: EMState, new: EMState) -> bool:
    """Whether what is left of a geometric approach is below the Monte Carlo error."""
    if old.step < 2:  # one ratio of changes is no rate yet
        return False
    ratio = new.change / max(old.change, 1e-300)
    left = new.change if ratio >= 1 else new.change * max(1.0, ratio / (1 - ratio))
    return left < 1.0


def starting_precision(problem: Problem, noise: StochasticPrior, layerwise: bool = False) -> float:
    """Return a λ at which the mode and γ are cheap, and the fixed point is near.

    G along the gradient at w = 0, in the prior's scaled coordinates: above it, the data
    hardly move the mode even where it would go first. Layerwise, the mean of diag(G).
    """
    scale = noise.prior.scale
    features = scale * noise.eta
    mean = problem.space.dots(
        features, features
    ).mean() / noise.prior.num_weights().sum().clamp_min(1)
    start = mean.clamp_min(1e-8).item()
    if layerwise:
        return start
    _, gradient = WhitenedLoss(problem, scale).value_and_gradient(problem.zeros(1)[0])
    size = problem.space.norm(gradient)
    if not 0 < size < inf:
        return start
    direction = (gradient / size)[None]
    return max(start, problem.space.dot(direction[0], WhitenedGGN(problem, scale)(direction)[0]))


def _change(old: Hyperparameters, new: Hyperparameters, allowed: Tensor) -> float:
    """Return the largest |Δ log| of λ over what is allowed, and of σ² over the least of it."""
    change = ((new.precision.log() - old.precision.log()).abs() / allowed).max().item()
    if old.sigma is not None:
        moved = 2 * (new.sigma.log() - old.sigma.log()).abs().max()
        change = max(change, moved.item() / allowed.min().item())
    return change
