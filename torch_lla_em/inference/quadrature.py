"""The eigenvalues of G, by which samples and the log det follow at any λ."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.inference.stochastic_prior import StochasticPrior
from torch_lla_em.problem import Problem, WhitenedGGN
from torch_lla_em.runtime import report
from torch_lla_em.solvers import Solution, block_lanczos


class Spectrum(NamedTuple):
    """Eigenvalues of G over a span, and ξ and η in its eigenvectors; solves for samples."""

    eigenvalues: Tensor
    """θ, shape (r,)."""

    vectors: Tensor | None
    """The eigenvectors, (m, r); None if they are not needed."""

    xi: Tensor
    """(K, r)."""

    eta: Tensor
    """(K, r)."""

    @property
    def tolerance(self) -> float:
        """The error of solutions in float64."""
        return 1e-6

    def solve(self, product: WhitenedGGN, b: Tensor, start: Tensor | None = None) -> Solution:
        """Return the solution of (A + I) x = b for the whitened product A with this G."""
        whitened = self.eigenvalues * product.deviation[:1].square()
        y = b @ self.vectors / (whitened + 1)
        return Solution(
            y @ self.vectors.T, torch.zeros_like(b[:, 0]), (whitened * y.square()).sum(1)
        )

    def log_dets(self, precision: float) -> Tensor:
        """Return log det(I + G / λ) of every sample, (K,), by block Gauss quadrature.

        Half from ξ, half from η; the derivative in log λ is minus ``effective_dims``.
        """
        log1p = torch.log1p(self.eigenvalues / precision)
        ratio = torch.where(self.eigenvalues > 0, log1p / self.eigenvalues, 1 / precision)
        return 0.5 * ((self.xi.square() * log1p).sum(1) + (self.eta.square() * ratio).sum(1))

    def exact(self, precision: float) -> tuple[Tensor, Tensor]:
        """Return γ and the log det over all directions themselves, the same for every sample, (K,)."""
        theta, like = self.eigenvalues, self.xi[:, 0]
        gamma, log_det = (theta / (theta + precision)).sum(), (theta / precision).log1p().sum()
        return gamma.expand_as(like), log_det.expand_as(like)


def log_evidences(loss: float, precision: Tensor, squared_norm: Tensor, log_dets: Tensor) -> Tensor:
    """Return log p(y | λ) by Laplace's method for the log det of every sample, (K,).

    -Σ loss(J w_lin, y) - ½ ‖w_lin‖²_Λ - ½ log det(I + Λ^{-1/2} G Λ^{-1/2}).
    """
    return -loss - 0.5 * (precision * squared_norm).sum() - 0.5 * log_dets


def log_dets(problem: Problem, noise: StochasticPrior, precision: Tensor) -> Tensor:
    """Return log det(I + Λ^{-1/2} G Λ^{-1/2}) of every sample, (K,), by block Lanczos from ξ and from Λ^{-1/2} η."""
    deviation = noise.prior.deviation(precision)
    product = WhitenedGGN(problem, deviation)
    of_xi = _quadrature(product, noise.xi, is_xi=True)
    return of_xi + _quadrature(product, deviation * noise.eta, is_xi=False)


def _quadrature(product: WhitenedGGN, rows: Tensor, is_xi: bool) -> Tensor:
    """Return the half of the log det from ξ or η by quadrature over their Krylov space, (K,)."""
    found = rows.new_zeros(len(rows), dtype=torch.float64)
    for number, (values, there) in enumerate(block_lanczos(product, rows), 1):
        halves = (there, 0 * there) if is_xi else (0 * there, there)
        last, found = found, Spectrum(values, None, *halves).log_dets(1.0)
        if (found - last).mean().abs() < 1e-4 * found.mean():
            break
        if number == 60:
            report(
                "warn",
                "The log evidence has not settled after 60 passes. Start from a larger "
                "prior_precision, or use float64.",
            )
            break
    return found
