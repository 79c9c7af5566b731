"""The E-step by an iterative solver: one solve for the mode and one for the samples per λ and σ.

It is used for layerwise priors, one observation noise per output, a solver chosen by the user, and
data for which a span of directions cannot be stored.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.inference.controller import Controller
from torch_lla_em.inference.evidence import log_dets, log_evidences
from torch_lla_em.inference.linear_mode import LinearMode, first_mode, optimise_MAP
from torch_lla_em.inference.options import FitOptions, has_one_noise
from torch_lla_em.inference.posterior_samples import PosteriorSamples, Solver, optimise_samples
from torch_lla_em.inference.records import Estimate, FitResult, NoiseSums, State, Statistics
from torch_lla_em.inference.stochastic_prior import StochasticPrior
from torch_lla_em.problem import Problem, WhitenedGGN, WhitenedLoss
from torch_lla_em.solvers import BlockCG, BlockKrylov, FunctionSpace, Newton, dot, dots, norm

SAMPLE_TOLERANCE = 0.1
MODE_TOLERANCE = 0.03
"""Bound on the relative error of w_lin, for which ‖w_lin‖² had an error of 0.2 % when measured."""

_FUNCTION_SPACE_OUTPUTS = 1024
_FUNCTION_SPACE_BYTES = 1e9

logger = logging.getLogger("torch_lla_em")


class Solutions(NamedTuple):
    """The last solutions, from which the next solves start."""

    mode: Tensor | None = None
    """w_lin, shape (P,)."""

    samples: Tensor | None = None
    """w_k, shape (K, P)."""

    certificate: Tensor | None = None
    """Error bounds of the samples, (K,)."""


class IterativeEStep:
    """The mode and the samples for a sequence of λ; each solve starts from the previous solution."""

    def __init__(self, problem: Problem, noise: StochasticPrior, options: FitOptions):
        self.problem, self.noise, self._options = problem, noise, options
        solver = options.solver
        if solver is None or isinstance(solver, BlockKrylov):
            solver = choose_solver(problem, options.layerwise)
        self._solver: Any = solver

    def start(self, known: State | None = None) -> State:
        """Return the state that EM begins with; ``known`` is that of an earlier run."""
        if known is not None:
            return known
        options, blocks = self._options, len(self.noise.prior.layout.names)
        start = options.prior_precision
        if start is None:
            number = starting_precision(self.problem, self.noise, options.layerwise)
            start = torch.tensor(number, dtype=torch.float64, device="cpu")
        start = start.to(device=self.noise.eta.device, dtype=torch.float64)
        if options.layerwise and not start.dim():
            start = start.expand(blocks).clone()
        return State(start, self.problem.sigma)

    def saved(self, state: State) -> tuple[State, None]:
        """Return the state of EM, which contains everything."""
        return state, None

    def advance(self, state: State, controller: Controller) -> State:
        """Solve at a state's λ and σ, and return the state after the step that follows."""
        problem, noise, mode, samples = self._solve(state, SAMPLE_TOLERANCE, MODE_TOLERANCE)
        found = Statistics(
            state.precision,
            state.sigma,
            samples.effective_dims,
            noise.prior.squared_norm(mode.w),
            mode.loss,
            torch.full_like(samples.certificate, float("nan")),
            mode.error,
            samples.error,
            *noise_sums(problem, state.sigma, mode, samples),
        )
        own = Solutions(mode.w, samples.w, samples.certificate)
        return controller.update(found, state)._replace(own=own)

    def is_exact(self, state: State) -> bool:
        """Return True: ``posterior`` solves for the last λ."""
        return True

    def posterior(self, state: State) -> FitResult:
        """Return the posterior at the final λ and σ."""
        precision, tolerance = state.precision, self._options.tolerance
        problem, noise, mode, samples = self._solve(state, tolerance, tolerance)
        norm = noise.prior.squared_norm(mode.w)
        dets = log_dets(problem, noise, precision)
        return FitResult(
            precision,
            state.sigma,
            mode.w,
            samples.w,
            noise.prior.scale,
            Estimate.of(samples.effective_dims),
            samples.certificate,
            Estimate.of(log_evidences(mode.loss, precision, norm, dets)),
        )

    def cut_short(self, state: State) -> FitResult:
        """Return the posterior of a state without further passes; its log evidence is NaN."""
        found, own = state.statistics, state.own
        return FitResult(
            found.precision,
            found.sigma,
            own.mode,
            own.samples,
            self.noise.prior.scale,
            found.effective_dim,
            own.certificate,
            found.log_evidence,
        )

    def _solve(
        self, state: State, tolerance: float, mode_tolerance: float
    ) -> tuple[Problem, StochasticPrior, LinearMode, PosteriorSamples]:
        """Return problem and random probes at a state's σ, and w_lin and the samples there."""
        precision, last = state.precision, state.own or Solutions()
        problem, noise = self._at_noise(state.sigma)
        problem.cost.begin("linear mode")
        start = last.mode
        if start is None:
            start = first_mode(problem, noise.prior, precision)
        newton = Newton(max(mode_tolerance, 10 * torch.finfo(problem.dtype).eps))
        mode = optimise_MAP(problem, noise.prior, precision, newton, start)
        problem.cost.begin("posterior samples")
        solver = replace(self._solver, tolerance=tolerance)
        samples = optimise_samples(problem, noise, precision, solver, last.samples)
        return problem, noise, mode, samples

    def _at_noise(self, sigma: Tensor | None) -> tuple[Problem, StochasticPrior]:
        """Return problem and noise at σ; η is drawn again if σ has one value per output."""
        last = self.problem.sigma
        if sigma is None or torch.equal(sigma, last):
            return self.problem, self.noise
        problem = self.problem.with_likelihood(self.problem.likelihood.with_noise(sigma))
        if not sigma.dim():  # η is proportional to 1 / σ
            ratio = (sigma / last).item()
            return problem, self.noise._replace(eta=self.noise.eta / ratio)
        self.problem, self.noise = problem, self.noise.drawn_again(problem)
        return self.problem, self.noise


def noise_sums(
    problem: Problem, sigma: Tensor | None, mode: LinearMode, samples: PosteriorSamples
) -> NoiseSums:
    """Return Σ_n (y_n - J_n w_lin)², Σ_n y_n² and T γ by output, the shape of σ; None without a σ."""
    if sigma is None:
        return None, None, None
    if not sigma.dim():
        # without its constant the loss is ½ Σ (y - J w)² / σ²
        plain = problem.with_likelihood(problem.likelihood.without_constant())
        ends = mode.w, torch.zeros_like(mode.w)
        losses = sigma.new_tensor([plain.loss_and_gradient(w)[0] for w in ends])
        residual, targets = 2 * sigma**2 * problem.temperature * losses
        return residual, targets, problem.temperature * samples.effective_dims.mean(0).sum()
    columns = torch.cat([mode.w[None], samples.w])

    shape = len(columns) + 1, len(sigma)
    total = torch.zeros(shape, dtype=torch.float64, device=columns.device)
    for batch, _, Jw in problem.push_forward(columns):
        y = problem.loss(batch.targets, None).targets.to(Jw)[None]
        squares = torch.cat([y, y - Jw[:1], Jw[1:]]).double().square()
        total += squares.flatten(1, -2).sum(1).to(total.device)
    total = problem.data.group.sum(total).to(sigma.device)
    return total[1], total[0], total[2:].mean(0) / sigma**2


def choose_solver(problem: Problem, layerwise: bool) -> Solver:
    """Choose a solver by size for fits without a span, and log the choice."""
    outputs = problem.data.facts.num_outputs
    bytes_of_rows = outputs * problem.linear_model.layout.size * problem.dtype.itemsize
    is_small = outputs <= _FUNCTION_SPACE_OUTPUTS and bytes_of_rows <= _FUNCTION_SPACE_BYTES
    if is_small and (layerwise or not has_one_noise(problem)):  # otherwise memory may be short
        solver: Solver = FunctionSpace()
        why = f"there are only {outputs} outputs in total"
    else:
        solver, why = (
            BlockCG(),
            ("a span of directions needs one λ, one σ and a fixed order of the examples"),
        )
    logger.info("Solver %s: %s.", type(solver).__name__, why)
    return solver


def starting_precision(problem: Problem, noise: StochasticPrior, layerwise: bool = False) -> float:
    """Return an initial λ at which solves are cheap, and which is close to the fixed point.

    It is the curvature G along the gradient at w = 0, in scaled coordinates: for larger λ the data
    hardly change the mode. For layerwise priors it is the mean of diag(G).
    """
    scale = noise.prior.scale
    features = scale * noise.eta
    mean = dots(features, features).mean() / noise.prior.num_weights().sum().clamp_min(1)
    start = mean.clamp_min(1e-8).item()
    if layerwise:
        return start
    _, gradient = WhitenedLoss(problem, scale).value_and_gradient(problem.zeros(1)[0])
    size = norm(gradient)
    if not 0 < size < inf:
        return start
    direction = (gradient / size)[None]
    return max(start, dot(direction[0], WhitenedGGN(problem, scale)(direction)[0]))
