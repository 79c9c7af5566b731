"""The log marginal likelihood of the linear model: at its mode, and over a grid of λ."""

from __future__ import annotations

import warnings
from math import log, pi
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.inference.mackay import Estimate
from torch_lla_em.inference.stochastic_prior import StochasticPrior
from torch_lla_em.likelihoods import Regression
from torch_lla_em.problem import Problem, WhitenedGGN, room
from torch_lla_em.solvers import BlockLanczos, KrylovPosterior, Spectrum

_MAX_PASSES = 60


def log_evidences(loss: float, precision: Tensor, squared_norm: Tensor, log_dets: Tensor) -> Tensor:
    """Return log p(y | λ) by Laplace's method for the log det of every sample, (K,).

    -Σ loss(J w_lin, y) - ½ ‖w_lin‖²_Λ - ½ log det(I + Λ^{-1/2} G Λ^{-1/2}).
    """
    return -loss - 0.5 * (precision * squared_norm).sum() - 0.5 * log_dets


def log_dets(problem: Problem, noise: StochasticPrior, precision: Tensor) -> Tensor:
    """Return log det(I + Λ^{-1/2} G Λ^{-1/2}) of every sample, (K,), by block quadrature."""
    deviation = noise.prior.deviation(precision)
    start = torch.cat([noise.xi, deviation * noise.eta])
    # the basis is kept for orthogonality alone: nothing is lost where it does not fit
    memory = room(problem) / 2
    lanczos = BlockLanczos(WhitenedGGN(problem, deviation), start, memory)
    krylov = KrylovPosterior(lanczos, len(noise.xi))
    for _ in range(_MAX_PASSES):
        lanczos.grow()
        # quadrature converges with the square of the certificate
        if lanczos.exhausted or krylov.error(1.0) < 0.03:
            break
    else:
        warnings.warn(
            f"The log evidence is known from samples with an error of {krylov.error(1.0):.1e} "
            f"only, after {_MAX_PASSES} passes. Start from a larger prior_precision, or use "
            "float64.",
            stacklevel=2,
        )
    return krylov.spectrum.log_dets(1.0)


def sigma_of(problem: Problem) -> Tensor | None:
    """Return σ of a Gaussian likelihood, None for others."""
    likelihood = problem.likelihood
    return likelihood.sigma_noise if isinstance(likelihood, Regression) else None


def squared_residual(problem: Problem, w: Tensor) -> tuple[float, Tensor]:
    """Return Σ_n ‖y_n - J_n w‖², summed directly, and the loss's gradient, for a scalar σ."""
    gaussian: Any = problem.likelihood
    loss, gradient = problem.with_likelihood(gaussian.without_constant()).loss_and_gradient(w)
    return 2 * gaussian.sigma_noise.item() ** 2 * loss, gradient


def gaussian_constant(problem: Problem, sigma: Tensor) -> float:
    """Return the part of the Gaussian loss that holds no residual."""
    return problem.data.num_targets * (log(float(sigma)) + 0.5 * log(2 * pi))


class Curve(NamedTuple):
    """What the data say of every prior precision of a grid."""

    precisions: Tensor
    """λ, shape (L,)."""

    effective_dim: Estimate
    """γ, shape (L,)."""

    log_evidence: Estimate
    """log p(y | λ), shape (L,); NaN beyond the precisions whose mode was visited."""

    path: Tensor
    """λ of every EM step, shape (steps,)."""

    best: float
    """λ*, the one chosen."""


class Modes(NamedTuple):
    """The objective of the linear mode at visited λ: its value, and its slope in log λ."""

    log_precisions: Tensor
    """(M,), ascending."""

    values: Tensor
    """loss(w_lin) + ½ λ ‖w_lin‖², shape (M,)."""

    slopes: Tensor
    """½ λ ‖w_lin‖², shape (M,): all that is left of the derivative at a minimum."""

    @classmethod
    def of(cls, precisions: Tensor, losses: Tensor, squared_norms: Tensor) -> Modes:
        """Return the modes, sorted and without repeats."""
        order = precisions.argsort()
        logs = precisions[order].log()
        fresh = torch.ones_like(logs, dtype=torch.bool)
        fresh[1:] = logs.diff() > 1e-9
        slopes = 0.5 * (precisions * squared_norms)[order]
        return cls(logs[fresh], (losses[order] + slopes)[fresh], slopes[fresh])

    def at(self, log_precisions: Tensor) -> Tensor:
        """Return the objective at other λ by cubic Hermite pieces; NaN outside."""
        outside = (log_precisions < self.log_precisions[0] - 1e-9) | (
            log_precisions > self.log_precisions[-1] + 1e-9
        )
        if len(self.log_precisions) < 2:
            return torch.where(outside, float("nan"), self.values[0])
        last = len(self.log_precisions) - 2
        i = (torch.searchsorted(self.log_precisions, log_precisions) - 1).clamp(0, last)
        width = self.log_precisions[i + 1] - self.log_precisions[i]
        t = (log_precisions - self.log_precisions[i]) / width
        left = (1 + 2 * t) * self.values[i] + t * width * self.slopes[i]
        right = (3 - 2 * t) * self.values[i + 1] - (1 - t) * width * self.slopes[i + 1]
        return torch.where(outside, float("nan"), (1 - t) ** 2 * left + t**2 * right)


def curve(spectrum: Spectrum, modes: Modes, precisions: Tensor) -> tuple[Estimate, Estimate]:
    """Return γ and the log evidence at every λ, each with its standard error."""
    dims = torch.stack([spectrum.effective_dims(p) for p in precisions.tolist()], dim=1)
    log_dets = torch.stack([spectrum.log_dets(p) for p in precisions.tolist()], dim=1)
    evidences = -modes.at(precisions.log()) - 0.5 * log_dets
    return Estimate.of(dims), Estimate.of(evidences)
