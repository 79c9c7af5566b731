"""The loop of the paper: EM on the whole problem, with one solve for the mode and one for the samples at every λ and σ.

It serves layerwise priors, a solver chosen by the user, and data for which a span of directions cannot be stored.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from math import inf, nan
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.inference.em import Equations, State, e_step, m_step
from torch_lla_em.inference.linear_mode import LinearMode, first_mode
from torch_lla_em.inference.mackay import count_and_rounding
from torch_lla_em.inference.options import FitOptions
from torch_lla_em.inference.posterior_samples import PosteriorSamples, Solver
from torch_lla_em.inference.quadrature import log_dets, log_evidences
from torch_lla_em.inference.result import Estimate, FitResult
from torch_lla_em.inference.stochastic_prior import StochasticPrior, with_noise
from torch_lla_em.problem import Problem, WhitenedGGN
from torch_lla_em.solvers import Newton, dot, dots, norm

logger = logging.getLogger("torch_lla_em")

OF_SAMPLES, OF_MODE = 0.1, 0.03
"""Errors of samples and mode while λ moves; with the second, ‖w_lin‖² had an error of 0.2 %."""


class Whole:
    """EM's linear model by passes over the data."""

    def __init__(
        self, problem: Problem, noise: StochasticPrior, solver: Solver, is_linear: bool = False
    ):
        self.problem, self.noise, self.prior = problem, noise, noise.prior
        self._solver: Any = solver
        self._errors, self._is_linear = (OF_SAMPLES, OF_MODE), is_linear
        """Errors of samples and mode, and whether H is that at the mode, instead of that at the network's outputs."""

    def to(self, tolerance: float) -> Whole:
        """Return the same with another error of samples and mode."""
        other = copy.copy(self)
        other._errors = tolerance, tolerance
        return other

    def at(self, q: State) -> Equations:
        """Return the equations at λ and σ of a state; η is drawn again if σ has one value per output."""
        problem, noise, (of_samples, of_mode) = self.problem, self.noise, self._errors
        if q.sigma is not None and not torch.equal(q.sigma, problem.sigma):
            last = problem.sigma
            problem = problem.with_likelihood(problem.likelihood.with_noise(q.sigma))
            if q.sigma.dim():
                noise = noise.drawn_again(problem)
                self.problem, self.noise = problem, noise
            else:  # η is proportional to 1 / σ
                noise = noise._replace(eta=noise.eta / (q.sigma / last).item())
        if self._is_linear and q.number:
            problem = problem.with_curvature_at(q.mean)
            noise = noise.drawn_again(problem)
        newton = Newton(max(of_mode, 10 * torch.finfo(problem.dtype).eps))
        return Equations(
            problem, noise, q.precision, replace(self._solver, tolerance=of_samples), newton
        )

    def expecting(self, equations: Equations, samples: PosteriorSamples) -> Problem:
        """Return the problem: its loss is that at the mode."""
        problem: Problem = equations.problem
        return problem

    def found(
        self, q: State, samples: PosteriorSamples, mode: LinearMode, problem: Problem
    ) -> State:
        """Return the state with the posterior; its evidence is not known."""
        return q._replace(
            samples=samples.w,
            gamma=samples.effective_dims,
            certificate=samples.certificate,
            mean=mode.w,
            norm=self.prior.squared_norm(mode.w),
            loss=mode.loss,
            bounds=torch.full_like(samples.certificate, nan),
            errors=(samples.error, mode.error),
            curved=problem,
        )

    def noise_sums(self, q: State) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return Σ(y - J m)², the least of it that is no rounding, γ and the number of targets, the shape of σ."""
        problem, sigma = q.curved, q.sigma
        if sigma.dim():
            residual, targets, dims = self._sums_of_outputs(q)
        else:  # without its constant the loss is ½ Σ (y - J w)² / σ²
            plain = problem.with_likelihood(problem.likelihood.without_constant())
            losses = [plain.loss_and_gradient(w)[0] for w in (q.mean, torch.zeros_like(q.mean))]
            residual, targets = 2 * sigma**2 * sigma.new_tensor(losses)
            dims = q.gamma.mean(0).sum().to(sigma)
        count, least = count_and_rounding(problem, sigma, targets)
        return residual, least, dims, count

    def _sums_of_outputs(self, q: State) -> Tensor:
        """Return Σ (y - J m)², Σ y² and γ of every output, (3, C)."""
        columns = torch.cat([q.mean[None], q.samples])
        total = torch.zeros(
            len(columns) + 1, len(q.sigma), dtype=torch.float64, device=columns.device
        )
        for batch, _, Jw in q.curved.push_forward(columns):
            y = q.curved.loss(batch.targets, None).targets.to(Jw)[None]
            squares = torch.cat([y, y - Jw[:1], Jw[1:]]).double().square()
            total += squares.flatten(1, -2).sum(1).to(total.device)
        total = q.curved.data.group.sum(total).to(q.sigma.device)
        return torch.stack([total[1], total[0], total[2:].mean(0) / q.sigma**2])


def log_evidence(problem: Problem, fit: FitResult, options: FitOptions) -> Estimate:
    """Return log p(y | λ, σ) of a fit by a solver, by up to 120 passes over the data of the fit."""
    problem.noise_features(1, options.seed, with_squares=False)  # the moments of the targets
    problem.take(fit.sigma_noise, problem.moments, problem.network_noise)
    if options.curvature == "linear":
        problem = problem.with_curvature_at(fit.w_lin)
    noise = with_noise(problem, fit.w_samples, fit.scale, options.seed, options.layerwise)
    noise, precision = noise.drawn_again(problem), fit.prior_precision
    loss, _ = problem.loss_and_gradient(fit.w_lin)
    dets = log_dets(problem, noise, precision)
    return Estimate.of(log_evidences(loss, precision, noise.prior.squared_norm(fit.w_lin), dets))


def first(whole: Whole, precision: Tensor) -> State:
    """Return the state at a first λ, without a posterior."""
    mean = first_mode(whole.problem, whole.prior, precision)
    return State(precision, whole.problem.sigma, mean=mean)


def steps(whole: Whole, q: State, em_steps: int) -> Iterator[tuple[State, State]]:
    """Yield the posterior of every step, and the state with the λ and σ that follow, until it says why EM ended."""
    while em_steps and not q.why:
        found = e_step(whole, q)
        plain, sigma = m_step(whole, found)
        changes = _changes(found, plain, sigma)
        precision, last = plain, None
        if not plain.dim():
            last = math.log(found.precision), math.log(plain)
            precision = _accelerated(found, last) if sigma is None else plain
        number = q.number + 1
        rest = number > 2 and _left(q.moved, changes) < 1
        why = "converged" if rest else "all steps" if number >= em_steps else ""
        q = found._replace(
            precision=precision,
            sigma=sigma,
            number=number,
            last=last,
            moved=changes,
            converged=rest,
            why=why,
            curved=None,
        )
        yield found, q


def _changes(q: State, precision: Tensor, sigma: Tensor | None) -> Tensor:
    """Return |Δ log| of every λ and of σ², relative to the Monte Carlo error of log λ, or 1 %."""
    gamma, moved = q.gamma.mean(0), (precision / q.precision).log()
    # where the data determine nothing, λ grows without bound, and its value does not matter
    least = torch.where(moved > 0, 1e-12, 1.0)
    allowed = (len(q.samples) * torch.maximum(gamma, least)).rsqrt().clamp_min(0.01)
    changes = (moved.abs() / allowed).view(-1)
    if sigma is None:
        return changes
    of_noise = 2 * (sigma / q.sigma).log().abs().max() / allowed.min()
    return torch.cat([changes, of_noise.view(1).to(changes)])


def _accelerated(q: State, last: tuple[float, float]) -> Tensor:
    """Return λ by a secant through MacKay's updates here and at the step before, or the update where none is safe."""
    (here, there), slope = last, 0.0
    if q.last is not None and here != q.last[0]:
        slope = (there - q.last[1]) / (here - q.last[0])
    if not -1 < slope < 0.9:  # negative: it overshoots from both sides
        slope = 0.0
    return q.precision * math.exp((there - here) / (1 - slope))


def _left(before: Any, changes: Tensor) -> float:
    """Return a bound on the remaining distances of geometric convergences, from two changes of each."""
    ratio = changes / torch.as_tensor(before, device=changes.device).clamp_min(1e-300)
    return (
        torch.where(ratio < 1, changes * (ratio / (1 - ratio)).clamp_min(1), changes).max().item()
    )


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
    _, gradient = WhitenedGGN(problem, scale).value_and_gradient(problem.zeros(1)[0])
    size = norm(gradient)
    if not 0 < size < inf:
        return start
    direction = (gradient / size)[None]
    return max(start, dot(direction[0], WhitenedGGN(problem, scale)(direction)[0]))
