"""The loop of the paper: EM on the whole problem, with one solve for the mode and one for the
samples in each step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf, nan

import torch
from torch import Tensor

from torch_lla_em.inference.em import m_step
from torch_lla_em.inference.linear_problem import Whitened
from torch_lla_em.inference.mackay import accelerated
from torch_lla_em.inference.prior import StochasticPrior
from torch_lla_em.inference.samples import PosteriorSamples
from torch_lla_em.inference.state import State
from torch_lla_em.problem import Problem, TargetFacts
from torch_lla_em.solvers import SGD, BlockCG, Minimum, Newton, dot, dots, norm

OF_SAMPLES, OF_MODE = 0.1, 0.03
"""Tolerances for the errors of samples and mean while λ changes; with this error of the mean,
‖w_lin‖² had an error of 0.2 %."""


@dataclass(frozen=True)
class Whole:
    """The engine of EM by passes over the data."""

    problem: Problem
    probes: StochasticPrior
    solver: BlockCG | SGD
    errors: tuple[float, float] = OF_SAMPLES, OF_MODE
    """The tolerances for the errors of samples and mean."""

    def at(self, q: State) -> tuple[Problem, StochasticPrior, BlockCG | SGD, Newton]:
        """Return the problem at σ of a state, its random probes, and the solvers. If there is a σ
        per output, η is drawn again."""
        problem, probes, (of_samples, of_mode) = self.problem, self.probes, self.errors
        last = problem.sigma
        if q.sigma is not None and last is not None and not torch.equal(q.sigma, last):
            facts = TargetFacts(q.sigma, problem.moments, problem.network_noise)
            problem = problem.with_targets(facts)
            if q.sigma.dim():
                count = len(probes.xi)
                eta = problem.probe_features(count, probes.seed, with_squares=False).eta
            else:  # η is proportional to 1 / σ
                eta = probes.eta / (q.sigma / last).item()
            probes = probes._replace(eta=eta)
        forcing = 0.0 if problem.likelihood.is_quadratic else 0.1  # then it needs one exact step
        newton = Newton(max(of_mode, 10 * torch.finfo(problem.dtype).eps), forcing=forcing)
        return problem, probes, replace(self.solver, tolerance=of_samples), newton

    def expecting(self, problem: Problem, samples: PosteriorSamples, precision: Tensor) -> Problem:
        """Return the problem itself, since its loss is evaluated at the mode."""
        return problem

    def found(self, q: State, samples: PosteriorSamples, mode: Minimum, problem: Problem) -> State:
        """Return the state with the posterior; the evidence is not computed."""
        q = q._replace(
            samples=samples.w, mean=mode.w, loss=mode.loss, certificate=samples.certificate
        )
        q = q._replace(gamma=samples.effective_dims, norm=self.probes.prior.squared_norm(mode.w))
        bounds = torch.full_like(samples.certificate, nan)
        return q._replace(errors=(samples.error, mode.error), bounds=bounds)

    def outputs(self, q: State) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield y, E[y | J m] and, if there is a σ per output, J w_k, (K, n, C), of each batch."""
        several = q.sigma is not None and q.sigma.dim() > 0
        columns = torch.cat([q.mean[None], *([q.samples] if several else [])])
        for batch, _, Jw in self.problem.push_forward(columns):
            y = self.problem.loss(batch.targets, None).targets
            yield y, self.problem.likelihood.mean(Jw[0]), Jw[1:]


def updated(whole: Whole, q: State, em_steps: int) -> State:
    """Return the state with the next λ and σ, or with the reason why EM has ended.

    λ and σ have converged if their remaining distances, assuming geometric convergence, are within
    the Monte Carlo error of log λ, or 1 %. A secant through MacKay's updates accelerates slow
    convergence; without it, such fits end up to 7 % from the fixed point.
    """
    precision, sigma = m_step(whole, q)
    gamma, moved = q.gamma.mean(0), (precision / q.precision).log()
    # where the data determine nothing, λ grows without bound, and its value does not matter
    least = torch.where(moved > 0, 1e-12, 1.0)
    allowed = (len(q.samples) * torch.maximum(gamma, least)).rsqrt().clamp_min(0.01)
    changes, last = (moved.abs() / allowed).view(-1), None
    if sigma is not None and q.sigma is not None:
        of_noise = 2 * (sigma / q.sigma).log().abs().max() / allowed.min()
        changes = torch.cat([changes, of_noise.view(1).to(changes)])
    elif not precision.dim():
        here, there = last = math.log(q.precision), math.log(precision)
        most = max(math.log(2), abs(there - here))  # MacKay's update may be larger
        precision = q.precision * math.exp(accelerated(here, there, q.fate.last, most))
    ratio = changes / torch.as_tensor(q.fate.moved, device=changes.device).clamp_min(1e-300)
    left = changes * torch.where(ratio < 1, (ratio / (1 - ratio)).clamp_min(1), 1)
    number, rests = q.fate.number + 1, q.fate.number > 1 and left.max() < 1
    why = "converged" if rests else "all steps" if number >= em_steps else ""
    fate = q.fate._replace(number=number, last=last, moved=changes, converged=bool(rests), why=why)
    return q._replace(precision=precision, sigma=sigma, fate=fate)


def starting_precision(problem: Problem, probes: StochasticPrior, layerwise: bool = False) -> float:
    """Return an initial λ at which solves are cheap, and which is close to the fixed point.

    It is the curvature G along the gradient at w = 0, in scaled coordinates: for larger λ the data
    hardly change the mode. It is at least the mean of diag(G), the result for layerwise priors.
    """
    scale, features = probes.prior.scale, probes.prior.scale * probes.eta
    mean = dots(features, features).mean() / (probes.prior.scale > 0).sum().clamp_min(1)
    start = mean.clamp_min(1e-8).item()
    if layerwise:
        return start
    _, gradient = Whitened(problem, scale).value_and_gradient(problem.zeros(1)[0])
    size = norm(gradient)
    if not 0 < size < inf:
        return start
    direction = (gradient / size)[None]
    return max(start, dot(direction[0], Whitened(problem, scale)(direction)[0]))
