"""The loop of the paper: EM on the whole problem, with one solve for the mode and one for the samples at every λ and σ.

It serves layerwise priors, a solver chosen by the user, and data for which a span of directions cannot be stored.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from math import inf, nan
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.inference.em import State, e_step, m_step
from torch_lla_em.inference.linear_mode import LinearMode
from torch_lla_em.inference.mackay import count_and_rounding
from torch_lla_em.inference.posterior_samples import PosteriorSamples
from torch_lla_em.inference.stochastic_prior import StochasticPrior
from torch_lla_em.problem import Problem, WhitenedGGN
from torch_lla_em.solvers import Newton, dot, dots, norm

OF_SAMPLES, OF_MODE = 0.1, 0.03
"""Errors of samples and mean while λ moves; with the second, ‖w_lin‖² had an error of 0.2 %."""


class Whole:
    """EM's linear model by passes over the data."""

    def __init__(self, problem: Problem, noise: StochasticPrior, solver: Any):
        self.problem, self.noise, self.prior, self._solver = problem, noise, noise.prior, solver
        self._errors = OF_SAMPLES, OF_MODE

    def to(self, tolerance: float) -> Whole:
        """Return the same with another error of samples and mode."""
        other = copy.copy(self)
        other._errors = tolerance, tolerance
        return other

    def at(self, q: State) -> tuple[Problem, StochasticPrior, Any, Newton]:
        """Return the problem at λ and σ of a state, its noise, and the solvers; η is drawn again if there is a σ per output."""
        problem, noise, (of_samples, of_mode) = self.problem, self.noise, self._errors
        if q.sigma is not None and not torch.equal(q.sigma, problem.sigma):
            last = problem.sigma
            problem = problem.with_likelihood(problem.likelihood.with_noise(q.sigma))
            if q.sigma.dim():
                noise = noise.drawn_again(problem)
                self.problem, self.noise = problem, noise
            else:  # η is proportional to 1 / σ
                noise = noise._replace(eta=noise.eta / (q.sigma / last).item())
        newton = Newton(max(of_mode, 10 * torch.finfo(problem.dtype).eps))
        return problem, noise, replace(self._solver, tolerance=of_samples), newton

    def expecting(self, problem: Problem, samples: PosteriorSamples, precision: Tensor) -> Problem:
        """Return the problem: its loss is that at the mode."""
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
            columns, total = torch.cat([q.mean[None], q.samples]), torch.zeros((), device="cpu")
            for batch, _, Jw in problem.push_forward(columns):
                y = problem.loss(batch.targets, None).targets.to(Jw)[None]
                squares = torch.cat([y - Jw[:1], y, Jw[1:]]).double().square()
                total = total.to(columns.device) + squares.flatten(1, -2).sum(1).to(columns.device)
            zeros = columns.new_zeros(len(columns) + 1, len(sigma), dtype=torch.float64)
            total = problem.data.group.sum(zeros + total.to(zeros)).to(sigma.device)
            residual, targets, dims = total[0], total[1], total[2:].mean(0) / sigma**2
        else:  # without its constant the loss is ½ Σ (y - J w)² / σ²
            plain = problem.with_likelihood(problem.likelihood.without_constant())
            losses = [plain.loss_and_gradient(w)[0] for w in (q.mean, torch.zeros_like(q.mean))]
            residual, targets = 2 * sigma**2 * sigma.new_tensor(losses)
            dims = q.gamma.mean(0).sum().to(sigma)
        count, least = count_and_rounding(problem, sigma, targets)
        return residual, least, dims, count


def steps(whole: Whole, q: State, em_steps: int) -> Iterator[tuple[State, State]]:
    """Yield the posterior of every step, and the state with the λ and σ that follow, until it says why EM ended."""
    while em_steps and not q.why:
        found = e_step(whole, q)
        precision, sigma = m_step(whole, found)
        changes, last = _changes(found, precision, sigma), None
        if not precision.dim() and sigma is None:
            last = math.log(found.precision), math.log(precision)
            precision = _accelerated(found, last)
        number = q.number + 1
        rest = number > 2 and _left(q.moved, changes) < 1
        why = "converged" if rest else "all steps" if number >= em_steps else ""
        q = found._replace(precision=precision, sigma=sigma, curved=None)
        q = q._replace(number=number, moved=changes, converged=rest, why=why, last=last)
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
    """Return λ by a secant through MacKay's updates here and at the step before, or the update where none is safe.

    Without it, fits of slow convergence end up to 7 % from the fixed point.
    """
    (here, there), slope = last, 0.0
    if q.last is not None and here != q.last[0]:
        slope = (there - q.last[1]) / (here - q.last[0])
    if not -1 < slope < 0.9:  # negative: it overshoots from both sides
        slope = 0.0
    return q.precision * math.exp((there - here) / (1 - slope))


def _left(before: Any, changes: Tensor) -> float:
    """Return a bound on the remaining distances of geometric convergences, from two changes of each."""
    ratio = changes / torch.as_tensor(before, device=changes.device).clamp_min(1e-300)
    further = changes * (ratio / (1 - ratio)).clamp_min(1)
    return torch.where(ratio < 1, further, changes).max().item()


def starting_precision(problem: Problem, noise: StochasticPrior, layerwise: bool = False) -> float:
    """Return an initial λ at which solves are cheap, and which is close to the fixed point.

    It is the curvature G along the gradient at w = 0, in scaled coordinates: for larger λ the data
    hardly change the mode. For layerwise priors it is the mean of diag(G).
    """
    scale, features = noise.prior.scale, noise.prior.scale * noise.eta
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
