"""The log marginal likelihood of the linear model, at its mode and with its log det."""

from __future__ import annotations

import warnings
from math import log, pi

import torch
from torch import Tensor

from torch_lla_em.inference.stochastic_prior import StochasticPrior
from torch_lla_em.likelihoods import Regression
from torch_lla_em.problem import Problem, WhitenedGGN, room
from torch_lla_em.solvers import BlockLanczos, KrylovPosterior, Shift

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
    krylov, unit = KrylovPosterior(lanczos, len(noise.xi)), Shift(1.0)
    for _ in range(_MAX_PASSES):
        lanczos.grow()
        # quadrature converges with the square of the certificate
        if lanczos.exhausted or krylov.error(unit) < 0.03:
            break
    else:
        warnings.warn(
            f"The log evidence is known from samples with an error of {krylov.error(unit):.1e} "
            f"only, after {_MAX_PASSES} passes. Start from a larger prior_precision, or use "
            "float64.",
            stacklevel=2,
        )
    return krylov.log_dets(unit)


def sigma_of(problem: Problem) -> Tensor | None:
    """Return σ of a Gaussian likelihood, None for others."""
    likelihood = problem.likelihood
    return likelihood.sigma_noise if isinstance(likelihood, Regression) else None


def squared_residual(problem: Problem, loss: float) -> Tensor:
    """Return Σ_n ‖y_n - J_n w‖² of the loss at w, for a scalar σ."""
    sigma = problem.likelihood.sigma_noise
    # a difference of large numbers, which rounding may take below zero
    least = torch.finfo(problem.dtype).eps * problem.data.num_targets
    return sigma**2 * max(2 * (loss - gaussian_constant(problem, sigma)), least)


def gaussian_constant(problem: Problem, sigma: Tensor) -> float:
    """Return the part of the Gaussian loss that holds no residual."""
    return problem.data.num_targets * (log(float(sigma)) + 0.5 * log(2 * pi))
