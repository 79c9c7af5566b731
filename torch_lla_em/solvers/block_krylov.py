"""All λ from one factorisation: block Lanczos of G started from the noise [ξ, η]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.runtime import free_memory
from torch_lla_em.solvers.block_cg import BlockCG
from torch_lla_em.solvers.block_lanczos import BlockLanczos
from torch_lla_em.solvers.operator import Operator
from torch_lla_em.solvers.solution import Solution, check_positive, relative_error
from torch_lla_em.solvers.space import add_combined


class Shift(NamedTuple):
    """The hyper-parameters of one posterior: A = G / noise² + λ I."""

    precision: float
    """λ."""

    noise: float = 1.0
    """σ of a Gaussian likelihood, relative to the one G was built with."""


class Spectrum(NamedTuple):
    """γ and log det at any λ: Ritz values of G and the noise in Ritz coordinates."""

    eigenvalues: Tensor
    """θ, shape (r,)."""

    xi: Tensor
    """(K, r)."""

    eta: Tensor
    """(K, r)."""

    def at_noise(self, noise: float) -> Spectrum:
        """Return the spectrum for a Gaussian noise of ``noise`` times the old deviation."""
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
        """Return (G + λ)⁻¹(√λ ξ + η) in Ritz coordinates, (K, r)."""
        return (precision**0.5 * self.xi + self.eta) / (self.eigenvalues + precision)


class KrylovPosterior:
    """γ, certificates, the evidence's log det and samples for any λ, from one Krylov space.

    Rows of the start block are [ξ; η] (2K), and with a Gaussian likelihood Jᵀ y. All
    vectors are in scaled coordinates, where the prior is N(0, I / λ).
    """

    def __init__(self, lanczos: BlockLanczos, num_samples: int):
        self.lanczos = lanczos
        self.num_samples = num_samples

    def spectrum(self, noise: float = 1.0) -> Spectrum:
        """Return what γ and the log det at any λ follow from, at this noise."""
        start = self.lanczos.starting_coordinates()
        xi, eta = start[: self.num_samples], start[self.num_samples : 2 * self.num_samples]
        return Spectrum(self.lanczos.eigenvalues.clamp_min(0), xi, eta).at_noise(noise)

    def effective_dims(self, shift: Shift) -> Tensor:
        """Return γ of every sample, (K,)."""
        return self.spectrum(shift.noise).effective_dims(shift.precision)

    def log_dets(self, shift: Shift) -> Tensor:
        """Return log det(I + G / λ) of every sample, (K,)."""
        return self.spectrum(shift.noise).log_dets(shift.precision)

    def certificates(self, shift: Shift) -> Tensor:
        """Return ‖r_k‖ in the norm of Λ⁻¹, (K,)."""
        return self._residuals(self._solution(shift)) / shift.noise**2 / shift.precision**0.5

    def error(self, shift: Shift) -> float:
        """Return the certificate relative to the samples: √(mean cert² / max(1, γ))."""
        return relative_error(self.certificates(shift), self.effective_dims(shift))

    def samples(self, shift: Shift) -> Tensor:
        """Return (G + λ)⁻¹(√λ ξ + η), shape (K, P), by Galerkin projection."""
        return self.lanczos.to_weights(self._solution(shift))

    def sample_images(self, shift: Shift) -> Tensor:
        """Return G / noise² of the samples, (K, P), as the factorisation knows it."""
        y, lanczos = self._solution(shift), self.lanczos
        total = lanczos.to_weights(y * lanczos.eigenvalues)
        add_combined(total, y @ lanczos.residual_coordinates().T, lanczos.basis[-1])
        return total / shift.noise**2

    def mode(self, shift: Shift) -> Tensor:
        """Return the linear mode of a Gaussian likelihood, shape (P,)."""
        return self.lanczos.to_weights(self._mode_solution(shift)[None])[0]

    def mode_norms(self, shift: Shift) -> tuple[float, float]:
        """Return of a Gaussian's mode ‖w_lin‖², and what it explains of ‖y‖² at noise 1."""
        y, theta = self._mode_solution(shift), self.lanczos.eigenvalues.clamp_min(0)
        target = self.lanczos.starting_coordinates()[-1]
        fit = 2 * (y @ target) - (theta * y.square()).sum()
        return y.square().sum().item(), fit.item()

    def mode_error(self, shift: Shift) -> float:
        """Return ‖r‖_Λ⁻¹ / ‖w_lin‖_Λ of the mode of a Gaussian likelihood."""
        y = self._mode_solution(shift)
        residual = self._residuals(y[None])[0] / shift.noise**2
        return (residual / shift.precision / y.norm().clamp_min(1e-300)).item()

    def _residuals(self, coordinates: Tensor) -> Tensor:
        """Return ‖G Qᵀ y - Qᵀ T y‖, (k,), with all that was lost to rounding."""
        following = coordinates @ self.lanczos.residual_coordinates().T
        return following.norm(dim=1) + self.lanczos.lost(coordinates)

    def _solution(self, shift: Shift) -> Tensor:
        return self.spectrum(shift.noise).solutions(shift.precision)

    def _mode_solution(self, shift: Shift) -> Tensor:
        theta = self.lanczos.eigenvalues.clamp_min(0) / shift.noise**2
        target = self.lanczos.starting_coordinates()[-1]
        return target / shift.noise**2 / (theta + shift.precision)


@dataclass(frozen=True)
class BlockKrylov:
    """Block Lanczos for the whole EM, with the basis stored while it fits."""

    tolerance: float = 1e-2
    """Bound on √(mean ‖r‖² / max(1, mean ⟨x, A x⟩)), the relative error of J x."""

    max_passes: int = 100
    """Products with G after which it stops, with a warning."""

    memory: float | None = None
    """Bytes the basis may take; None: half of what is free where the weights are."""

    storage: torch.dtype | None = None
    """Of the basis but its last two blocks; None: that of the vectors. torch.bfloat16 halves it:
    γ and the evidence stay as exact, samples take a few passes of block CG more."""

    def __post_init__(self) -> None:
        check_positive("BlockKrylov", tolerance=self.tolerance, max_passes=self.max_passes)
        if self.memory is not None:
            check_positive("BlockKrylov", memory=self.memory)

    def factorise(self, product: Operator, start: Tensor, num_samples: int) -> KrylovPosterior:
        """Return the factorisation of G for every λ, no product taken yet."""
        memory = free_memory(start.device) / 2 if self.memory is None else self.memory
        return KrylovPosterior(BlockLanczos(product, start, memory, self.storage), num_samples)

    def solve(self, product: Operator, b: Tensor, start: Tensor | None = None) -> Solution:
        """Solve (A + I) X = B at one λ, where block CG finds the same in the same space."""
        return BlockCG(self.tolerance, self.max_passes).solve(product, b, start)
