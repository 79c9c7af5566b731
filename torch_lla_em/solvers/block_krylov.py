"""All λ from one factorisation: block Lanczos of G started from the noise [ξ, η]."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.runtime import free_memory
from torch_lla_em.solvers.block_cg import BlockCG
from torch_lla_em.solvers.block_lanczos import BlockLanczos
from torch_lla_em.solvers.operator import Operator
from torch_lla_em.solvers.solution import (
    Solution,
    Task,
    check_positive,
    relative_error,
    solve_with_restarts,
)
from torch_lla_em.solvers.space import add_combined

logger = logging.getLogger("torch_lla_em")


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


class ModeNorms(NamedTuple):
    """The linear mode of a Gaussian likelihood, through its norms."""

    squared_norm: float
    """‖w_lin‖²."""

    fit: float
    """2 ⟨w, g⟩ - ⟨w, G w⟩ at noise 1: what the mode explains of ‖y‖²."""


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

    def mode_norms(self, shift: Shift) -> ModeNorms:
        """Return what EM needs of the mode of a Gaussian likelihood."""
        y, theta = self._mode_solution(shift), self.lanczos.eigenvalues.clamp_min(0)
        target = self.lanczos.starting_coordinates()[-1]
        fit = 2 * (y @ target) - (theta * y.square()).sum()
        return ModeNorms(y.square().sum().item(), fit.item())

    def mode_error(self, shift: Shift) -> float:
        """Return ‖r‖_Λ⁻¹ / ‖w_lin‖_Λ of the mode of a Gaussian likelihood."""
        y = self._mode_solution(shift)
        residual = self._residuals(y[None])[0] / shift.noise**2
        return (residual / shift.precision / y.norm().clamp_min(1e-300)).item()

    def precondition(self, rows: Tensor, shift: Shift) -> Tensor:
        """Return (Q T Qᵀ + λ)⁻¹ applied to rows (k, P): exact on the space, 1 / λ off it."""
        within = self.lanczos.to_coordinates(rows)
        theta = self.lanczos.eigenvalues.clamp_min(0) / shift.noise**2
        change = within * (1 / (theta + shift.precision) - 1 / shift.precision)
        return rows / shift.precision + self.lanczos.to_weights(change)

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
    """Block Lanczos with the basis stored while it fits; for the whole EM or for one solve."""

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
        """Solve (A + I) X = B in the block Krylov space of the first residual."""
        limits = self.tolerance, self.max_passes
        return solve_with_restarts("Block Krylov", Task(product, b, start), limits, self._descend)

    def _descend(self, task: Task, solution: Solution, residual: Tensor) -> tuple[Tensor, int]:
        """Add the Galerkin correction in the Krylov space of the residual."""
        lanczos = BlockLanczos(task.product, residual)
        budget, room = self.max_passes - solution.passes - 1, True
        while lanczos.num_steps < budget and not lanczos.exhausted:
            room = self._has_room(lanczos) and not task.product.attempt(lanczos.extend)[1]
            if not room:
                break
            y = lanczos.starting_coordinates() / (lanczos.eigenvalues + 1)
            norms = (y @ lanczos.residual_coordinates().T).norm(dim=1)
            energy = solution.energy + y.square() @ lanczos.eigenvalues.clamp_min(0)
            if relative_error(norms, energy) <= 0.9 * self.tolerance:
                break
        x, used = solution.x, lanczos.num_steps
        if used:
            x = lanczos.to_weights(y).add_(x)
        if room:
            return x, used
        del lanczos
        logger.warning("There is no room for more of the Krylov basis: block CG goes on without.")
        if used:
            residual, used = task.residual(x), used + 1
        solution = solution._replace(x=x, passes=solution.passes + used)
        x, more = BlockCG(self.tolerance, self.max_passes).descend(task, solution, residual)
        return x, used + more

    def _has_room(self, lanczos: BlockLanczos) -> bool:
        return self.memory is None or not lanczos.num_steps or lanczos.held <= self.memory
