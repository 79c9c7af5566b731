"""The E-step from one factorisation of G: no pass for γ and the evidence at a new λ."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.inference.e_step import FixedEStep, at_scalar_sigma
from torch_lla_em.inference.evidence import (
    Modes,
    gaussian_constant,
    log_evidences,
    sigma_of,
    squared_residual,
)
from torch_lla_em.inference.linear_mode import LinearMode, Precondition, optimise_MAP
from torch_lla_em.inference.mackay import Expectation, Hyperparameters
from torch_lla_em.inference.mode_search import ModeSearch
from torch_lla_em.inference.posterior_samples import PosteriorSamples, Start, optimise_samples
from torch_lla_em.inference.stochastic_prior import StochasticPrior
from torch_lla_em.problem import Problem, WhitenedGGN, room
from torch_lla_em.solvers import (
    BlockCG,
    BlockKrylov,
    DeflatedCG,
    KrylovPreconditioner,
    Newton,
    Shift,
    Spectrum,
)

_CURVE_POINTS = 241
# γ errs by at most so much of the squared certificate of the basis, and may by a third of its
# Monte Carlo error, but no more than that
_ERROR, _SHARE, _SHARE_AT_LAST, _MOST = 0.04, 1 / 3, 1 / 2, 0.01
# residual of a Gaussian's mode in EM: its squared norm errs by a tenth of it
_OF_MODE = 0.1
# roundings of the targets' squares, below which residuals are summed by a pass
_ROUNDED = 1e4
_NEIGHBOURS = 10**-0.5, 10**0.5
_MORE = (
    "Raise max_passes of BlockKrylov, start from a larger prior_precision, or take more samples: "
    "they share one Krylov space."
)
_ROUNDING = (
    "What is missing is below the rounding of a product with G: convert the model and its data "
    "to float64."
)


class KrylovEStep(FixedEStep):
    """γ, the log det and the Gaussian mode from T; the mode of other losses over a subspace.

    The factorisation grows until γ at the current λ is known to a part of its own Monte Carlo
    error, and no further; at the last λ samples are polished by passes of K columns,
    preconditioned by its basis.
    """

    def __init__(
        self,
        problem: Problem,
        noise: StochasticPrior,
        solver: BlockKrylov,
        search: ModeSearch,
        known: dict[str, Any] | None = None,
    ):
        if solver.memory is None:
            solver = replace(solver, memory=room(problem) / 2)
        super().__init__(problem, noise, solver, search)
        known = known or {}
        self._drawn_at = sigma_of(problem)
        scale = noise.prior.scale
        start = [noise.xi, scale * noise.eta]
        self._gaussian = self._drawn_at is not None
        if self._gaussian:
            zero = problem.zeros(1)[0]
            self._at_zero = known.get("at zero") or squared_residual(problem, zero)
            """Σ_n y_n², and the gradient of the loss, (P,)."""

            self._measured = known.get("measured") or (0.0, self._at_zero[0])
            """What the mode explained of the targets, and Σ_n (y_n - J_n w_lin)², when summed."""

            start.append(-(scale * self._at_zero[1])[None])
        product = WhitenedGGN(problem, scale)
        self.krylov = solver.factorise(product, torch.cat(start), len(noise.xi))
        self._warned = known.get("warned", False)
        if known:
            self.krylov.lanczos.restore(known["lanczos"])
            search.restore(known["search"])

    def state(self) -> dict[str, Any]:
        """Return all that it goes on with."""
        return {
            "lanczos": self.krylov.lanczos.state(),
            "search": self._search.state(),
            "at zero": self._at_zero if self._gaussian else None,
            "measured": self._measured if self._gaussian else None,
            "warned": self._warned,
        }

    def expect(
        self, hyper: Hyperparameters, tolerance: float, mode_tolerance: float
    ) -> Expectation:
        shift = self.shift(hyper)
        with self._problem.cost.stage("basis"):
            self._extend(shift, tolerance)
        if self.krylov.lanczos.exhausted and not self._holds(shift, tolerance):
            self._warn(shift, tolerance, _ROUNDING)
        dims, residual, targets, gamma = self.krylov.effective_dims(shift), None, None, None
        if self._gaussian:
            self._measure(hyper, mode_tolerance)
            norm, fit = self.krylov.mode_norms(shift)
            residual, targets = dims.new_tensor([self._residual(fit), self._at_zero[0]])
            gamma, squared_norm = dims.mean(), dims.new_tensor(norm)
            loss = self._gaussian_loss(fit, hyper)
            mode_error = self.krylov.mode_error(shift)
        else:
            mode = self.mode(hyper, mode_tolerance)
            squared_norm = self.noise.prior.squared_norm(mode.w)
            loss, mode_error = mode.loss, mode.error
        log_dets = self.krylov.log_dets(shift)
        return Expectation(
            hyper,
            dims,
            squared_norm,
            loss,
            residual,
            targets,
            gamma,
            log_evidences(loss, hyper.precision, squared_norm, log_dets),
            mode_error,
            self.krylov.error(shift),
        )

    def finish(
        self, hyper: Hyperparameters, tolerance: float
    ) -> tuple[LinearMode, PosteriorSamples, Tensor]:
        """Return the posterior at these hyper-parameters, with the evidence's log dets."""
        shift = self.shift(hyper)
        # a last step of λ, less than its own error, is not to cost a pass
        with self._problem.cost.stage("basis"):
            self._extend(shift, tolerance, _SHARE_AT_LAST)
        if self._gaussian:
            self._measure(hyper, tolerance)
        mode, log_dets = self.mode(hyper, tolerance), self.krylov.log_dets(shift)
        self.krylov.lanczos.end()
        samples = self.samples(hyper, tolerance)
        # of samples that hardly differ from the prior's, rounding would leave no γ
        return mode, samples._replace(effective_dims=self.krylov.effective_dims(shift)), log_dets

    def spectrum(self, hyper: Hyperparameters) -> Spectrum:
        """Return what γ and the log det at any λ follow from, at this noise."""
        return self.krylov.spectrum(self.shift(hyper).noise)

    def modes(self, hyper: Hyperparameters) -> Modes:
        """Return the mode's objective where it is known.

        Anywhere if Gaussian; else where EM went, and over what is known of J half a decade
        either side of λ.
        """
        if not self._gaussian:
            norm, visited = self.noise.prior.squared_norm, self._search.visited
            points = [(p, mode.loss, norm(mode.w).item()) for p, mode in visited.items()]
            for factor in _NEIGHBOURS:
                there = factor * hyper.precision
                known = self._search.objective(self._problem, there)
                points += [] if known is None else [(there.item(), *known)]
            return Modes.of(*torch.tensor(points, dtype=torch.float64, device="cpu").T)
        grid = hyper.precision.cpu() * torch.logspace(
            -6, 6, _CURVE_POINTS, dtype=torch.float64, device="cpu"
        )
        curve = []
        for at in grid:
            size, fit = self.krylov.mode_norms(self.shift(hyper._replace(precision=at)))
            curve.append((at.item(), self._gaussian_loss(fit, hyper), size))
        return Modes.of(*torch.tensor(curve, dtype=torch.float64, device="cpu").T)

    def shift(self, hyper: Hyperparameters) -> Shift:
        """Return the hyper-parameters relative to the noise that G was built with."""
        ratio = (hyper.sigma / self._drawn_at).item() if self._gaussian else 1.0
        return Shift(hyper.precision.item(), ratio)

    def _extend(self, shift: Shift, tolerance: float, share: float = _SHARE) -> None:
        lanczos, limit = self.krylov.lanczos, self._solver.max_passes
        while not self._holds(shift, tolerance, share):
            if lanczos.exhausted:  # all that is left is below the rounding of a product
                break
            if lanczos.num_steps >= limit:
                self._warn(shift, tolerance, _MORE)
                break
            lanczos.grow()

    def _holds(self, shift: Shift, tolerance: float, share: float = _SHARE) -> bool:
        """Whether γ and the mode's norm at these hyper-parameters are as exact as they need be."""
        krylov = self.krylov
        if not krylov.lanczos.num_steps:
            return False
        if krylov.error(shift) > self._enough(shift, tolerance, share):
            return False
        of_mode = max(tolerance, min(_OF_MODE, tolerance**0.5))
        return not self._gaussian or krylov.mode_error(shift) <= of_mode

    def _enough(self, shift: Shift, tolerance: float, share: float) -> float:
        """Return the certificate at which γ is known, for samples that will meet the tolerance."""
        dims = self.krylov.effective_dims(shift)
        # λ is not told from one that is a hundredth away
        own = max(_MOST, max(dims.sum().item(), 1e-12) ** -0.5)
        allowed = min(_MOST, share * own)
        return min((allowed / _ERROR) ** 0.5, (10 * tolerance) ** 0.5)

    def _warn(self, shift: Shift, tolerance: float, remedy: str) -> None:
        """Say once that γ and the evidence are less exact than was asked."""
        if self._warned:
            return
        self._warned = True
        error = self.krylov.error(shift)
        if self._gaussian:
            error = max(error, self.krylov.mode_error(shift))
        warnings.warn(
            f"At λ = {shift.precision:.3g} the effective dimension is known to an error of "
            f"{error:.1e} only, not {tolerance:.1e}, after {self.krylov.lanczos.num_steps} passes. "
            f"{remedy}",
            stacklevel=2,
        )

    def _find_mode(self, hyper: Hyperparameters, tolerance: float) -> LinearMode:
        problem, noise = self._at_noise(hyper)
        precondition: Precondition | None = None
        if self._has_basis:
            known = cache(partial(self._preconditioner, hyper))  # made where it is used

            def precondition(rows: Tensor) -> Tensor:
                return known().power(rows, -1.0)

        if not (self._gaussian and self._has_basis):
            return self._search.find(problem, hyper.precision, tolerance, precondition)
        start = noise.prior.scale * self.krylov.mode(self.shift(hyper)).to(noise.xi)
        solver = Newton(max(tolerance, 10 * torch.finfo(problem.dtype).eps))
        return optimise_MAP(
            problem, noise.prior, hyper.precision, solver, start, precondition=precondition
        )

    def _find_samples(self, hyper: Hyperparameters, tolerance: float) -> PosteriorSamples:
        problem, noise = self._at_noise(hyper)
        start: Tensor | Start | None = None
        limits = tolerance, self._solver.max_passes
        solver: BlockCG | DeflatedCG = BlockCG(*limits)
        if self._has_basis:
            shift = self.shift(hyper)
            start = self.krylov.samples(shift).mul_(noise.prior.scale)
            if self.krylov.error(shift) > tolerance:  # else a product tells the true residual
                images = noise.prior.unscaled(self.krylov.sample_images(shift))
                start = Start(start, images)
            # K columns a pass, from where the basis of 2 K has come
            solver = DeflatedCG(self._preconditioner(hyper), *limits)
        return optimise_samples(problem, noise, hyper.precision, solver, start)

    @property
    def _has_basis(self) -> bool:
        lanczos = self.krylov.lanczos
        return lanczos.has_basis and lanczos.num_steps > 0

    def _drop_basis(self) -> None:
        self.krylov.lanczos.drop_basis()

    def _preconditioner(self, hyper: Hyperparameters) -> KrylovPreconditioner:
        shift = self.shift(hyper)
        return KrylovPreconditioner(self.krylov.lanczos, shift.precision * shift.noise**2)

    def _gaussian_loss(self, fit: float, hyper: Hyperparameters) -> float:
        residual = self._residual(fit) / hyper.sigma.item() ** 2
        return gaussian_constant(self._problem, hyper.sigma) + 0.5 * residual

    def _residual(self, fit: float) -> float:
        """Return Σ_n ‖y_n - J_n w‖² of what w explains of the targets."""
        at, known = self._measured
        return max(known + self._drawn_at.item() ** 2 * (at - fit), 1e-12 * known)

    def _measure(self, hyper: Hyperparameters, tolerance: float) -> None:
        """Sum the residuals at the mode by a pass, where a difference would be lost to rounding."""
        shift = self.shift(hyper)
        _, fit = self.krylov.mode_norms(shift)
        rounding = _ROUNDED * torch.finfo(self._problem.dtype).eps
        if self._residual(fit) > rounding * self._at_zero[0]:
            return
        if self._has_basis:
            w = self.noise.prior.scale * self.krylov.mode(shift).to(self.noise.xi)
        else:
            w = self.mode(hyper, tolerance).w
        self._measured = fit, squared_residual(self._problem, w)[0]

    def _at_noise(self, hyper: Hyperparameters) -> tuple[Problem, StochasticPrior]:
        if not self._gaussian:
            return self._problem, self.noise
        return at_scalar_sigma(self._problem, self.noise, hyper.sigma)
