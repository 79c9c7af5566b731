"""The E-step by solves: one for the mode and one for the samples at every λ and σ.

This is for a precision for each tensor, a noise for each output, a solver that was asked for, and
data whose outputs cannot be kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torch_lla_em.inference.em import Found, State
from torch_lla_em.inference.evidence import log_dets, log_evidences, sigma_of, squared_residual
from torch_lla_em.inference.linear_mode import LinearMode, first_mode, optimise_MAP
from torch_lla_em.inference.mackay import Estimate, Expectation, Hyperparameters, MStep
from torch_lla_em.inference.mode_search import ModeSearch
from torch_lla_em.inference.options import FitOptions, has_one_noise
from torch_lla_em.inference.posterior import Posterior
from torch_lla_em.inference.posterior_samples import (
    PosteriorSamples,
    Solver,
    Start,
    optimise_samples,
)
from torch_lla_em.inference.stochastic_prior import StochasticPrior
from torch_lla_em.problem import Problem, WhitenedGGN, WhitenedLoss, room
from torch_lla_em.solvers import (
    SGD,
    BlockCG,
    BlockKrylov,
    BlockLanczos,
    DeflatedCG,
    FeaturePreconditioner,
    FunctionSpace,
    KrylovPosterior,
    Newton,
    nystrom_features,
)

SAMPLE_TOLERANCE = 0.1
MODE_TOLERANCE = 0.03
"""Bounds the relative error of w_lin; ‖w_lin‖² was then right to 0.2 % where measured."""

# certificate at the first λ that is enough: the basis only has to hold the large eigenvalues of G
_ENOUGH = 0.1
_MAX_STEPS = 4
_WITHOUT = "Out of memory: block CG goes on without a preconditioner."

_STATE = "last", "deflation", "sigma", "mode", "search"

_FUNCTION_SPACE_OUTPUTS = 1024
_FUNCTION_SPACE_BYTES = 1e9

logger = logging.getLogger("torch_lla_em")

T = TypeVar("T")


class Deflation(NamedTuple):
    """What one Krylov basis of G knows: a preconditioner of the mode and of the samples."""

    features: Tensor
    """F, shape (r, P), with FᵀF ≤ G."""

    sigma: Tensor | None
    """σ that G was built with."""

    @classmethod
    def of(cls, problem: Problem, noise: StochasticPrior, precision: Tensor) -> Deflation | None:
        """Return what a few block Lanczos steps find, or None where the basis does not fit."""
        found, shortage = problem.attempt(lambda: _deflation(problem, noise, precision))
        if shortage:
            logger.warning(_WITHOUT)
        return found

    def relative(self, sigma: Tensor | None) -> float:
        """Return σ over the one of G."""
        return 1.0 if sigma is None else (sigma / self.sigma).item()


def _deflation(problem: Problem, noise: StochasticPrior, precision: Tensor) -> Deflation | None:
    scale = noise.prior.scale
    start = torch.cat([noise.xi, scale * noise.eta])
    lanczos = BlockLanczos(WhitenedGGN(problem, scale), start, room(problem) / 4)
    krylov, mean = KrylovPosterior(lanczos, len(noise.xi)), precision.log().mean().exp().item()
    while lanczos.num_steps < _MAX_STEPS and not lanczos.exhausted:
        lanczos.extend()
        if krylov.error(mean) <= _ENOUGH:
            break
    if not lanczos.has_basis:
        return None
    features = nystrom_features(lanczos)
    if not len(features):  # G is 0
        return None
    features *= noise.prior.unscaled(torch.ones_like(features[0]))
    return Deflation(features, sigma_of(problem))


class IterativeEStep:
    """The mode and the samples at one λ after the other, each solve from where the last one ended."""

    def __init__(
        self,
        problem: Problem,
        noise: StochasticPrior,
        solver: Any,
        known: dict[str, Any] | None = None,
    ):
        self._problem, self.noise, self._solver = problem, noise, solver
        self._of_mode = solver if isinstance(solver, SGD) else Newton()
        last, deflation, sigma, mode, search = map((known or {}).get, _STATE)
        self._last: Tensor | Start | None = last
        self._deflation: Deflation | None = deflation
        self._mode: Tensor | None = mode
        self._search: ModeSearch | None = None
        if search is not False and not isinstance(solver, SGD):
            self._search = ModeSearch(problem, noise.prior, search)
        if sigma is not None:
            self._problem = at_sigma(problem, sigma)

    def state(self) -> dict[str, Any]:
        """Return all that it goes on with but η: an E-step made with this as ``known`` is the same."""
        search = False if self._search is None else self._search.state()
        own = self._last, self._deflation, sigma_of(self._problem), self._mode, search
        return dict(zip(_STATE, own))

    def advance(self, state: State, m_step: MStep, kept: bool) -> Found:
        """Return the expectations at a state's λ and σ, and the step that follows."""
        found = self.expect(state.hyper, SAMPLE_TOLERANCE, MODE_TOLERANCE)
        return Found(found, m_step(found, state.step))

    def is_exact(self, state: State) -> bool:
        """Return True: the posterior at the last λ is for ``posterior``."""
        return True

    def expect(
        self, hyper: Hyperparameters, tolerance: float, mode_tolerance: float
    ) -> Expectation:
        """Return what the M-step needs."""
        problem, _ = self._at_noise(hyper)
        mode, samples = self.mode(hyper, mode_tolerance), self.samples(hyper, tolerance)
        residual, targets, noise_dims = noise_sums(problem, hyper, mode, samples)
        return Expectation(
            hyper,
            samples.effective_dims,
            self.noise.prior.squared_norm(mode.w),
            mode.loss,
            residual,
            targets,
            noise_dims,
            torch.full_like(samples.certificate, float("nan")),
            mode.error,
            samples.error,
        )

    def posterior(self, hyper: Hyperparameters, tolerance: float) -> Posterior:
        """Return the posterior at these hyper-parameters."""
        problem, noise = self._at_noise(hyper)
        mode, samples = self.mode(hyper, tolerance), self.samples(hyper, tolerance)
        norm = noise.prior.squared_norm(mode.w)
        dets = log_dets(problem, noise, hyper.precision)
        return Posterior(
            hyper,
            mode.w,
            samples.w,
            noise.prior.scale,
            Estimate.of(samples.effective_dims),
            samples.certificate,
            Estimate.of(log_evidences(mode.loss, hyper.precision, norm, dets)),
            mode.loss,
            mode.error,
            samples.error,
            None,
            None,
        )

    def mode(self, hyper: Hyperparameters, tolerance: float) -> LinearMode:
        """Return w_lin at these hyper-parameters."""
        with self._problem.cost.stage("mode"):
            return self._within_memory(partial(self._find_mode, hyper, tolerance))

    def samples(self, hyper: Hyperparameters, tolerance: float) -> PosteriorSamples:
        """Return the posterior samples at these hyper-parameters."""
        with self._problem.cost.stage("samples"):
            return self._within_memory(partial(self._find_samples, hyper, tolerance))

    def _within_memory(self, run: Callable[[], T]) -> T:
        """Return the result of ``run``, if need be without a preconditioner and a span for the mode."""
        if self._deflation is None and self._search is None:
            return run()
        found, shortage = self._problem.attempt(run)
        if shortage:
            logger.warning(_WITHOUT)
            self._deflation = self._search = None
            return run()
        return found

    def _find_mode(self, hyper: Hyperparameters, tolerance: float) -> LinearMode:
        problem, _ = self._at_noise(hyper)
        known, prior = self._preconditioner(hyper), self.noise.prior
        inverse = None if known is None else partial(known.power, exponent=-1.0)
        tolerance, mode = max(tolerance, 10 * torch.finfo(problem.dtype).eps), None
        if self._search is not None:
            over_span = partial(self._search.find, problem, hyper.precision, tolerance, inverse)
            mode, _ = problem.attempt(over_span)
            self._search = None if mode is None else self._search
        if mode is None or not mode.converged:
            start = self._mode if mode is None else mode.w
            if start is None:
                start = first_mode(problem, prior, hyper.precision)
            solver = replace(self._of_mode, tolerance=tolerance)
            wish = problem, prior, hyper.precision, solver, start
            mode = optimise_MAP(*wish, precondition=inverse)
        self._mode = mode.w
        return mode

    def _find_samples(self, hyper: Hyperparameters, tolerance: float) -> PosteriorSamples:
        problem, noise = self._at_noise(hyper)
        solver: Solver = replace(self._solver, tolerance=tolerance)
        known = self._preconditioner(hyper)
        if known is not None and isinstance(solver, BlockCG):
            solver = DeflatedCG(known, tolerance, solver.max_passes)
        samples = optimise_samples(problem, noise, hyper.precision, solver, self._last)
        # G changes with σ: only without it is G w still that at the next step
        self._last = Start(samples.w, samples.Gw) if hyper.sigma is None else samples.w
        return samples

    def _preconditioner(self, hyper: Hyperparameters) -> FeaturePreconditioner | None:
        known, prior = self._deflation, self.noise.prior
        if known is None:
            return None
        deviation = prior.deviation(hyper.precision) / known.relative(hyper.sigma)
        return FeaturePreconditioner(known.features, deviation, prior.space)

    def _at_noise(self, hyper: Hyperparameters) -> tuple[Problem, StochasticPrior]:
        """Return problem and noise at σ; η is drawn again where σ has one value per output."""
        if hyper.sigma is None or torch.equal(hyper.sigma, sigma_of(self._problem)):
            return self._problem, self.noise
        if hyper.sigma.dim():
            self._problem = at_sigma(self._problem, hyper.sigma)
            self.noise = self.noise.drawn_again(self._problem)
            return self._problem, self.noise
        return at_scalar_sigma(self._problem, self.noise, hyper.sigma)


def at_sigma(problem: Problem, sigma: Tensor) -> Problem:
    """Return the problem of a Gaussian likelihood at another noise."""
    gaussian: Any = problem.likelihood
    return problem.with_likelihood(gaussian.at_noise(sigma))


def at_scalar_sigma(
    problem: Problem, noise: StochasticPrior, sigma: Tensor
) -> tuple[Problem, StochasticPrior]:
    """Return problem and noise at another scalar σ than η was drawn at: η scales with 1 / σ."""
    ratio = (sigma / sigma_of(problem)).item()
    return at_sigma(problem, sigma), noise._replace(eta=noise.eta / ratio)


def noise_sums(
    problem: Problem, hyper: Hyperparameters, mode: LinearMode, samples: PosteriorSamples
) -> tuple[Tensor, Tensor, Tensor] | tuple[None, None, None]:
    """Return Σ_n (y_n - J_n w_lin)², Σ_n y_n² and γ by output, the shape of σ; None without a σ."""
    if hyper.sigma is None:
        return None, None, None
    if not hyper.sigma.dim():
        sums = [squared_residual(problem, w)[0] for w in (mode.w, torch.zeros_like(mode.w))]
        return *hyper.sigma.new_tensor(sums), samples.effective_dims.mean(0).sum()
    columns = torch.cat([mode.w[None], samples.w])

    shape = len(columns) + 1, len(hyper.sigma)
    total = torch.zeros(shape, dtype=torch.float64, device=columns.device)
    for batch, _, Jw in problem.push_forward(columns):
        y = batch.targets.to(Jw)[None]
        squares = torch.cat([y, y - Jw[:1], Jw[1:]]).double().square()
        total += squares.flatten(1, -2).sum(1).to(total.device)
    total = problem.data.group.sum(total).to(hyper.sigma.device)
    return total[1], total[0], total[2:].mean(0) / hyper.sigma**2


def make_e_step(
    problem: Problem,
    noise: StochasticPrior,
    options: FitOptions,
    hyper: Hyperparameters,
    known: dict[str, Any] | None = None,
) -> IterativeEStep:
    """Return the E-step of the solver asked for, or of one chosen by size.

    ``known`` is its state in an earlier run.
    """
    solver = options.solver
    if solver is None or isinstance(solver, BlockKrylov):
        solver = choose_solver(problem, options.layerwise)
    if known is None:
        deflates = isinstance(solver, BlockCG) and has_one_noise(problem) and solver.deflate
        known = {"deflation": Deflation.of(problem, noise, hyper.precision) if deflates else None}
    return IterativeEStep(problem, noise, solver, known)


def choose_solver(problem: Problem, layerwise: bool) -> Solver:
    """Return the solver that suits the sizes, where a fit goes over no span, and log it."""
    outputs = problem.data.num_outputs
    bytes_of_rows = outputs * problem.linear_model.layout.size * problem.dtype.itemsize
    is_small = outputs <= _FUNCTION_SPACE_OUTPUTS and bytes_of_rows <= _FUNCTION_SPACE_BYTES
    if is_small and (layerwise or not has_one_noise(problem)):  # else memory may be short
        solver: Solver = FunctionSpace()
        why = f"there are only {outputs} outputs in all"
    else:
        solver, why = BlockCG(), "a span of directions needs one λ, one σ and outputs that are kept"
    logger.info("Solver %s: %s.", type(solver).__name__, why)
    return solver


def starting_point(problem: Problem, noise: StochasticPrior, options: FitOptions) -> Tensor:
    blocks = len(noise.prior.layout.names)
    start = options.prior_precision
    if start is None:
        number = starting_precision(problem, noise, options.layerwise)
        start = torch.tensor(number, dtype=torch.float64, device="cpu")
    start = start.to(device=noise.eta.device, dtype=torch.float64)
    return start.expand(blocks).clone() if options.layerwise and not start.dim() else start


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
