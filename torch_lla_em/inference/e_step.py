"""The E-step as EM sees it: γ, ‖w_lin‖² and the data term at any λ; here by a solve at each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torch_lla_em.inference.em import Found, State
from torch_lla_em.inference.evidence import Modes, log_dets, sigma_of, squared_residual
from torch_lla_em.inference.linear_mode import LinearMode
from torch_lla_em.inference.mackay import Expectation, Hyperparameters, MStep
from torch_lla_em.inference.mode_search import ModeSearch
from torch_lla_em.inference.posterior_samples import (
    PosteriorSamples,
    Solver,
    Start,
    optimise_samples,
)
from torch_lla_em.inference.stochastic_prior import StochasticPrior
from torch_lla_em.problem import Problem, WhitenedGGN, room
from torch_lla_em.solvers import (
    BlockCG,
    BlockKrylov,
    DeflatedCG,
    FeaturePreconditioner,
    Shift,
    Spectrum,
    nystrom_features,
)

SAMPLE_TOLERANCE = 0.1
MODE_TOLERANCE = 0.03
"""Bounds the relative error of w_lin; ‖w_lin‖² was then right to 0.2 % where measured."""

# of the certificate at the first λ; the basis need not be exact, only know the large end of G
_ENOUGH = 0.1
_MAX_STEPS = 4
_WITHOUT = "Out of memory: block CG goes on without a preconditioner."

_STATE = "last", "deflation", "sigma", "search"

logger = logging.getLogger("torch_lla_em")

T = TypeVar("T")


class FixedEStep:
    """Expectations at any hyper-parameters, and the posterior at the last ones."""

    def __init__(self, problem: Problem, noise: StochasticPrior, solver: Any, search: ModeSearch):
        self._problem, self.noise = problem, noise
        self._solver, self._search = solver, search

    def advance(self, state: State, m_step: MStep, kept: bool) -> Found:
        """Return the expectations at a state's λ and σ, and the step that follows."""
        found = self.expect(state.hyper, SAMPLE_TOLERANCE, MODE_TOLERANCE)
        return Found(found, m_step(found, state.step))

    def is_exact(self, state: State) -> bool:
        """Return True: the posterior at the last λ is for ``finish``."""
        return True

    def expect(
        self, hyper: Hyperparameters, tolerance: float, mode_tolerance: float
    ) -> Expectation:
        """Return what the M-step needs."""
        raise NotImplementedError

    def finish(
        self, hyper: Hyperparameters, tolerance: float
    ) -> tuple[LinearMode, PosteriorSamples, Tensor]:
        """Return the posterior at these hyper-parameters, with the evidence's log dets."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Return all that it goes on with: an E-step made with this as ``known`` is the same."""
        raise NotImplementedError

    def mode(self, hyper: Hyperparameters, tolerance: float) -> LinearMode:
        """Return w_lin at these hyper-parameters."""
        with self._problem.cost.stage("mode"):
            return self._within_memory(partial(self._find_mode, hyper, tolerance))

    def samples(self, hyper: Hyperparameters, tolerance: float) -> PosteriorSamples:
        """Return the posterior samples at these hyper-parameters."""
        with self._problem.cost.stage("samples"):
            return self._within_memory(partial(self._find_samples, hyper, tolerance))

    def spectrum(self, hyper: Hyperparameters) -> Spectrum | None:
        """Return what γ and the log det at any λ follow from; solves at single λ leave none."""
        return None

    def modes(self, hyper: Hyperparameters) -> Modes:
        """Return the mode's objective where a curve is to be drawn through it."""
        return Modes(*torch.zeros(3, 0, dtype=torch.float64, device="cpu"))

    def _within_memory(self, run: Callable[[], T]) -> T:
        """Return the result of ``run``, if need be without what a Krylov basis knows."""
        if not self._has_basis:
            return run()
        found, shortage = self._problem.attempt(run)
        if shortage:
            logger.warning(_WITHOUT)
            self._drop_basis()
            return run()
        return found

    def _find_mode(self, hyper: Hyperparameters, tolerance: float) -> LinearMode:
        raise NotImplementedError

    def _find_samples(self, hyper: Hyperparameters, tolerance: float) -> PosteriorSamples:
        raise NotImplementedError

    @property
    def _has_basis(self) -> bool:
        """Whether a Krylov basis is there to help, and to be given up."""
        raise NotImplementedError

    def _drop_basis(self) -> None:
        raise NotImplementedError


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
    solver = BlockKrylov(memory=room(problem) / 4)
    krylov = solver.factorise(WhitenedGGN(problem, scale), start, len(noise.xi))
    lanczos, shift = krylov.lanczos, Shift(precision.log().mean().exp().item())
    while lanczos.num_steps < _MAX_STEPS and not lanczos.exhausted:
        lanczos.extend()
        if krylov.error(shift) <= _ENOUGH:
            break
    if not lanczos.has_basis:
        return None
    features = nystrom_features(lanczos)
    if not len(features):  # G is 0
        return None
    features *= noise.prior.unscaled(torch.ones_like(features[0]))
    return Deflation(features, sigma_of(problem))


class IterativeEStep(FixedEStep):
    """One solve for the mode and one for the samples at every λ, from the last ones."""

    def __init__(
        self,
        problem: Problem,
        noise: StochasticPrior,
        solver: Solver,
        search: ModeSearch,
        known: dict[str, Any] | None = None,
    ):
        super().__init__(problem, noise, solver, search)
        last, deflation, sigma, search_state = map((known or {}).get, _STATE)
        search.restore(search_state)
        self._last: Tensor | Start | None = last
        self._deflation: Deflation | None = deflation
        if sigma is not None:
            self._problem = at_sigma(problem, sigma)

    def state(self) -> dict[str, Any]:
        """Return all that it goes on with but η, which is the noise's own."""
        sigma, search = sigma_of(self._problem), self._search.state()
        return dict(zip(_STATE, (self._last, self._deflation, sigma, search)))

    def expect(
        self, hyper: Hyperparameters, tolerance: float, mode_tolerance: float
    ) -> Expectation:
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

    def finish(
        self, hyper: Hyperparameters, tolerance: float
    ) -> tuple[LinearMode, PosteriorSamples, Tensor]:
        """Return the posterior at these hyper-parameters, with the evidence's log det."""
        problem, noise = self._at_noise(hyper)
        mode, samples = self.mode(hyper, tolerance), self.samples(hyper, tolerance)
        return mode, samples, log_dets(problem, noise, hyper.precision)

    def _find_mode(self, hyper: Hyperparameters, tolerance: float) -> LinearMode:
        problem, _ = self._at_noise(hyper)
        known = self._preconditioner(hyper)
        inverse = None if known is None else partial(known.power, exponent=-1.0)
        return self._search.find(problem, hyper.precision, tolerance, inverse)

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

    @property
    def _has_basis(self) -> bool:
        return self._deflation is not None

    def _drop_basis(self) -> None:
        self._deflation = None

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
