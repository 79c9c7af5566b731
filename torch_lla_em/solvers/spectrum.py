"""γ, the log det and solutions at every λ, from the eigenvalues of G over a few directions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Spectrum(NamedTuple):
    """γ and log det at any λ: eigenvalues of G and the noise in its eigenvectors."""

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

    def solutions(self, precision: float) -> Tensor:
        """Return (G + λ)⁻¹(√λ ξ + η) in the eigenvectors, (K, r)."""
        return (precision**0.5 * self.xi + self.eta) / (self.eigenvalues + precision)
