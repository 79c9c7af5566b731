"""The log marginal likelihood of the linear model, and γ and samples at any λ."""

from __future__ import annotations

from math import log, pi, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.inference.stochastic_prior import StochasticPrior
from torch_lla_em.problem import Problem, WhitenedGGN
from torch_lla_em.runtime import report
from torch_lla_em.solvers import block_lanczos

_MAX_PASSES = 60
"""Largest number of products for the log det."""

_SETTLED = 1e-4
"""Relative change of the log det at which the products end."""


class Spectrum(NamedTuple):
    """γ, log det and solutions at any λ: eigenvalues of G and the noise in its eigenvectors."""

    eigenvalues: Tensor
    """θ, shape (r,)."""

    xi: Tensor
    """(K, r)."""

    eta: Tensor
    """(K, r)."""

    def at_noise(self, noise: float) -> Spectrum:
        """Return the spectrum for an observation noise of ``noise`` times the old σ."""
        return Spectrum(self.eigenvalues / noise**2, self.xi, self.eta / noise)

    def effective_dims(self, precision: float) -> Tensor:
        """Return γ of every sample, (K,): ½(⟨w, G w⟩ + ‖Λ^{-1/2} ξ - w‖²_Λ), made symmetric."""
        theta = self.eigenvalues
        per_xi = (self.xi.square() * (theta / (theta + precision))).sum(1)
        return 0.5 * (per_xi + (self.eta.square() / (theta + precision)).sum(1))

    def log_dets(self, precision: float) -> Tensor:
        """Return log det(I + G / λ) of every sample, (K,), by block Gauss quadrature.

        Half from ξ, half from η; the derivative in log λ is minus ``effective_dims``.
        """
        log1p = torch.log1p(self.eigenvalues / precision)
        ratio = torch.where(self.eigenvalues > 0, log1p / self.eigenvalues, 1 / precision)
        return 0.5 * ((self.xi.square() * log1p).sum(1) + (self.eta.square() * ratio).sum(1))

    def of_samples(self, precision: float) -> tuple[Tensor, Tensor]:
        """Return γ and the log det of every sample, (K,)."""
        return self.effective_dims(precision), self.log_dets(precision)

    def exact(self, precision: float) -> tuple[Tensor, Tensor]:
        """Return γ and the log det themselves, the same for every sample, (K,)."""
        theta, like = self.eigenvalues, self.xi[:, 0]
        gamma, log_det = (theta / (theta + precision)).sum(), (theta / precision).log1p().sum()
        return gamma.expand_as(like), log_det.expand_as(like)

    def solutions(self, precision: float) -> Tensor:
        """Return (G + λ)⁻¹(√λ ξ + η) in the eigenvectors, (K, r)."""
        return (sqrt(precision) * self.xi + self.eta) / (self.eigenvalues + precision)


def log_evidences(loss: float, precision: Tensor, squared_norm: Tensor, log_dets: Tensor) -> Tensor:
    """Return log p(y | λ) by Laplace's method for the log det of every sample, (K,).

    -Σ loss(J w_lin, y) - ½ ‖w_lin‖²_Λ - ½ log det(I + Λ^{-1/2} G Λ^{-1/2}).
    """
    return -loss - 0.5 * (precision * squared_norm).sum() - 0.5 * log_dets


def log_dets(problem: Problem, noise: StochasticPrior, precision: Tensor) -> Tensor:
    """Return log det(I + Λ^{-1/2} G Λ^{-1/2}) of every sample, (K,), by block quadrature.

    Block Lanczos from ξ and from Λ^{-1/2} η, which holds two blocks of K vectors at a time.
    """
    deviation = noise.prior.deviation(precision)
    product = WhitenedGGN(problem, deviation)
    of_xi = _quadrature(product, noise.xi, is_xi=True)
    return of_xi + _quadrature(product, deviation * noise.eta, is_xi=False)


def _quadrature(product: WhitenedGGN, rows: Tensor, is_xi: bool) -> Tensor:
    """Return the half of the log det from ξ or η by quadrature over their Krylov space, (K,)."""
    found = rows.new_zeros(len(rows), dtype=torch.float64)
    for number, (values, there) in enumerate(block_lanczos(product, rows), 1):
        halves = (there, 0 * there) if is_xi else (0 * there, there)
        last, found = found, Spectrum(values, *halves).log_dets(1.0)
        if (found - last).mean().abs() < _SETTLED * found.mean():
            break
        if number == _MAX_PASSES:
            report(
                "warn",
                f"The log evidence has not settled after {_MAX_PASSES} passes. Start from a larger "
                "prior_precision, or use float64.",
            )
            break
    return found


def gaussian_constant(problem: Problem, sigma: Tensor) -> float:
    """Return the part of the Gaussian loss that does not depend on residuals."""
    count = problem.data.facts.num_targets / problem.temperature
    return count * (log(float(sigma)) + 0.5 * log(2 * pi))
