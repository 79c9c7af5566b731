"""The E-step as EM sees it: γ, ‖w_lin‖² and the data term at any λ, by solves or from one T."""

from __future__ import annotations

from dataclasses import replace
from math import inf, sqrt
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torch_lla_em.inference.curve import Modes
from torch_lla_em.inference.evidence import log_dets, sigma_of, squared_residual
from torch_lla_em.inference.linear_mode import LinearMode, Precondition, optimise_MAP
from torch_lla_em.inference.posterior_samples import PosteriorSamples, Solver, optimise_samples
from torch_lla_em.inference.prior import Prior
from torch_lla_em.inference.stochastic_prior import StochasticPrior
from torch_lla_em.problem import Problem, WhitenedLoss
from torch_lla_em.solvers import SGD, Newton, Spectrum

_FIRST_MODE_PASSES = 6


class Hyperparameters(NamedTuple):
    """What EM learns."""

    precision: Tensor
    """λ, () or (blocks,), in float64."""

    sigma: Tensor | None = None
    """σ of a Gaussian likelihood, () or (C,), in float64."""


class Expectation(NamedTuple):
    """What the M-step needs."""

    effective_dims: Tensor
    """γ of every sample, (K,) or (K, blocks)."""

    squared_norm: Tensor
    """‖w_lin / scale‖², () or (blocks,)."""

    loss: float
    """Σ_n -log p(y_n | J_n w_lin)."""

    residual: Tensor | None
    """Σ_n (y_n - J_n w_lin)², the shape of σ; None if the likelihood is not Gaussian."""

    noise_dims: Tensor | None
    """γ by output, the shape of σ."""

    log_dets: Tensor | None
    """log det(I + Λ^{-1/2} G Λ^{-1/2}) of every sample, (K,), or None where it costs passes."""

    mode_error: float
    sample_error: float


class EStep(Protocol):
    """Expectations at any hyper-parameters, and the posterior at the last ones."""

    def expect(
        self, hyper: Hyperparameters, tolerance: float, mode_tolerance: float
    ) -> Expectation: ...

    def finish(
        self, hyper: Hyperparameters, tolerance: float
    ) -> tuple[LinearMode, PosteriorSamples, Tensor]: ...

    def mode(self, hyper: Hyperparameters, tolerance: float) -> LinearMode: ...

    def spectrum(self, hyper: Hyperparameters) -> Spectrum | None: ...

    def modes(self, hyper: Hyperparameters) -> Modes: ...

    def warm_start(self, w_lin: Tensor, w_samples: Tensor) -> None: ...


def attainable(tolerance: float, problem: Problem) -> float:
    """Return the tolerance, or what rounding allows of it."""
    return max(tolerance, 10 * torch.finfo(problem.dtype).eps)


def first_mode(problem: Problem, prior: Prior, precision: Tensor) -> Tensor:
    """Return a start for the mode, (P,): the best of multiples of the trained weights.

    J w_MAP nearly says what the network says (exactly, up to a factor, where the network is
    homogeneous in its weights), so that H there is near the one G is made of: the mode then
    takes a third of the passes that it takes from 0, where the softmax is undecided.
    """
    if problem.likelihood.is_quadratic:
        return problem.zeros(1)[0]
    loss = WhitenedLoss(problem, prior.deviation(precision))
    direction = prior.whitened(problem.w_MAP, precision)
    low, high, factor = 0.0, inf, 1.0
    best = inf, 0.0
    for _ in range(_FIRST_MODE_PASSES):
        x = factor * direction
        value, gradient = loss.value_and_gradient(x)
        best = min(best, (value + 0.5 * loss.space.norm(x) ** 2, factor))
        if loss.space.dot(direction, gradient + x) < 0:
            low = factor
        else:
            high = factor
        factor = 3 * low if high == inf else high / 3 if low == 0 else sqrt(low * high)
        if high < 2 * low:
            break
    return best[1] * problem.w_MAP * (prior.scale > 0)


def at_sigma(problem: Problem, sigma: Tensor) -> Problem:
    """Return the problem of a Gaussian likelihood at another noise."""
    return problem.with_likelihood(problem.likelihood.at_noise(sigma))


def at_scalar_sigma(
    problem: Problem, noise: StochasticPrior, sigma: Tensor
) -> tuple[Problem, StochasticPrior]:
    """Return problem and noise at another scalar σ than η was drawn at: η scales with 1 / σ."""
    ratio = (sigma / sigma_of(problem)).item()
    return at_sigma(problem, sigma), noise._replace(eta=noise.eta / ratio)


class IterativeEStep:
    """One solve for the mode and one for the samples at every λ, from the last ones."""

    def __init__(self, problem: Problem, noise: StochasticPrior, solver: Solver, seed: int):
        self._problem, self._noise, self._seed = problem, noise, seed
        self._solver = solver
        self._mode_solver = solver if isinstance(solver, SGD) else Newton()
        self._w_lin: Tensor | None = None
        self._last: Tensor | PosteriorSamples | None = None

    def expect(
        self, hyper: Hyperparameters, tolerance: float, mode_tolerance: float
    ) -> Expectation:
        problem, _ = self._at_noise(hyper)
        mode, samples = self.mode(hyper, mode_tolerance), self._samples(hyper, tolerance)
        residual, noise_dims = self._noise_sums(problem, hyper, mode, samples)
        return Expectation(
            samples.effective_dims,
            self._noise.prior.squared_norm(mode.w),
            mode.loss,
            residual,
            noise_dims,
            None,
            mode.error,
            samples.error,
        )

    def finish(
        self, hyper: Hyperparameters, tolerance: float
    ) -> tuple[LinearMode, PosteriorSamples, Tensor]:
        """Return the posterior at these hyper-parameters, with the evidence's log det."""
        problem, noise = self._at_noise(hyper)
        mode, samples = self.mode(hyper, tolerance), self._samples(hyper, tolerance)
        return mode, samples, log_dets(problem, noise, hyper.precision)

    def mode(self, hyper: Hyperparameters, tolerance: float) -> LinearMode:
        """Return w_lin at these hyper-parameters."""
        problem, noise = self._at_noise(hyper)
        solver = replace(self._mode_solver, tolerance=attainable(tolerance, problem))
        if self._w_lin is None:
            self._w_lin = first_mode(problem, noise.prior, hyper.precision)
        mode = optimise_MAP(
            problem,
            noise.prior,
            hyper.precision,
            solver,
            self._w_lin,
            precondition=self.preconditioner(hyper),
        )
        self._w_lin = mode.w
        return mode

    def warm_start(self, w_lin: Tensor, w_samples: Tensor) -> None:
        """Begin with the mode and the samples of an earlier posterior."""
        self._w_lin, self._last = w_lin, w_samples

    def preconditioner(self, hyper: Hyperparameters) -> Precondition | None:
        """Return an approximate inverse for the mode, where there is one."""

    def sample_solver(self, hyper: Hyperparameters, tolerance: float) -> Solver:
        """Return the solver of the samples at these hyper-parameters."""
        return replace(self._solver, tolerance=tolerance)

    def spectrum(self, hyper: Hyperparameters) -> None:
        """Solves at single λ leave no spectrum."""

    def modes(self, hyper: Hyperparameters) -> Modes:
        """Return no modes, since there is no curve to draw through them."""
        return Modes(*torch.zeros(3, 0, dtype=torch.float64))

    def _samples(self, hyper: Hyperparameters, tolerance: float) -> PosteriorSamples:
        problem, noise = self._at_noise(hyper)
        solver = self.sample_solver(hyper, tolerance)
        samples = optimise_samples(problem, noise, hyper.precision, solver, self._last)
        # G changes with σ: only without it is G w still that at the next step
        self._last = samples if hyper.sigma is None else samples.w
        return samples

    def _at_noise(self, hyper: Hyperparameters) -> tuple[Problem, StochasticPrior]:
        """Return problem and noise at σ; η is drawn again where σ has one value per output."""
        if hyper.sigma is None or torch.equal(hyper.sigma, sigma_of(self._problem)):
            return self._problem, self._noise
        if hyper.sigma.dim():
            problem = at_sigma(self._problem, hyper.sigma)
            eta = problem.noise_features(len(self._noise.xi), self._seed).eta
            self._problem, self._noise = problem, self._noise._replace(eta=eta)
            return self._problem, self._noise
        return at_scalar_sigma(self._problem, self._noise, hyper.sigma)

    @staticmethod
    def _noise_sums(
        problem: Problem, hyper: Hyperparameters, mode: LinearMode, samples: PosteriorSamples
    ) -> tuple[Tensor | None, Tensor | None]:
        if hyper.sigma is None:
            return None, None
        if not hyper.sigma.dim():
            gamma = samples.effective_dims.mean(0).sum()
            return squared_residual(problem, mode.loss), gamma
        columns = torch.cat([mode.w[None], samples.w])

        def sums() -> dict[str, Tensor]:
            total = torch.zeros(len(columns), len(hyper.sigma), dtype=torch.float64).to(
                columns.device
            )
            for batch, _, Jw in problem.push_forward(columns):
                squares = torch.cat([batch.targets.to(Jw) - Jw[:1], Jw[1:]]).double().square()
                total += squares.flatten(1, -2).sum(1).to(total.device)
            return {"sums": problem.data.group.sum(total)}

        total = problem.kept(columns, sums)["sums"].to(hyper.sigma.device)
        return total[0], total[1:].mean(0) / hyper.sigma**2
