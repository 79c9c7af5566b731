"""The E-step of a layerwise prior: solves at every Λ, preconditioned by one Krylov basis of G."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from torch_lla_em.inference.evidence import sigma_of
from torch_lla_em.inference.expectation import Expectation, Hyperparameters, IterativeEStep
from torch_lla_em.inference.linear_mode import LinearMode, Precondition
from torch_lla_em.inference.posterior_samples import PosteriorSamples
from torch_lla_em.inference.stochastic_prior import StochasticPrior
from torch_lla_em.problem import Problem, WhitenedGGN, room
from torch_lla_em.solvers import (
    BlockCG,
    BlockKrylov,
    DeflatedCG,
    Preconditioner,
    Shift,
    nystrom_features,
)

# of the certificate at the first λ; the basis need not be exact, only know the large end of G
_ENOUGH = 0.1
_MAX_STEPS = 4
_WITHOUT = "Out of memory: block CG goes on without a preconditioner."

logger = logging.getLogger("torch_lla_em")

T = TypeVar("T")


class DeflatedEStep(IterativeEStep):
    """Block CG and Newton's method, warm-started, with Nyström features of G to precondition both.

    One block Krylov basis of the scaled G is built at the first step; no Λ enters it.
    """

    def __init__(self, problem: Problem, noise: StochasticPrior, solver: BlockCG, seed: int):
        super().__init__(problem, noise, solver, seed)
        self._features: Tensor | None = None
        self._tried = False

    def expect(
        self, hyper: Hyperparameters, tolerance: float, mode_tolerance: float
    ) -> Expectation:
        if not self._tried:
            self._tried = True
            self._features = self._find_features(hyper)
        return super().expect(hyper, tolerance, mode_tolerance)

    def mode(self, hyper: Hyperparameters, tolerance: float) -> LinearMode:
        """Return w_lin at these hyper-parameters."""
        return self._from_here(partial(super().mode, hyper, tolerance))

    def finish(
        self, hyper: Hyperparameters, tolerance: float
    ) -> tuple[LinearMode, PosteriorSamples, Tensor]:
        """Return the posterior at these hyper-parameters, with the evidence's log det."""
        return self._within_memory(partial(super().finish, hyper, tolerance))

    def sample_solver(self, hyper: Hyperparameters, tolerance: float) -> BlockCG | DeflatedCG:
        if self._features is None:
            return super().sample_solver(hyper, tolerance)
        limits = tolerance, self._solver.max_passes
        return DeflatedCG(self._features, *limits, self._relative_noise(hyper))

    def preconditioner(self, hyper: Hyperparameters) -> Precondition | None:
        if self._features is None:
            return None
        deviation = self._noise.prior.deviation(hyper.precision)
        scaled = deviation / self._relative_noise(hyper)
        return Preconditioner(self._features, scaled, self._problem.space).inverse

    def _samples(self, hyper: Hyperparameters, tolerance: float) -> PosteriorSamples:
        return self._from_here(partial(super()._samples, hyper, tolerance))

    def _from_here(self, run: Callable[[], T]) -> T:
        """Return the result of ``run`` within memory, from the same start each time it is run."""
        start = self._w_lin, self._last

        def restarted() -> T:
            self._w_lin, self._last = start
            return run()

        return self._within_memory(restarted)

    def _within_memory(self, run: Callable[[], T]) -> T:
        """Return the result of ``run``, if need be without the features."""

        found: list[T] = []
        if self._features is None:
            return run()
        if not self._problem.lasts(lambda: found.append(run())):
            self._features = None
            logger.warning(_WITHOUT)
            return run()
        return found[0]

    def _relative_noise(self, hyper: Hyperparameters) -> float:
        """Return σ over the one that the features were built with."""
        return 1.0 if hyper.sigma is None else (hyper.sigma / sigma_of(self._problem)).item()

    def _find_features(self, hyper: Hyperparameters) -> Tensor | None:
        """Return F with FᵀF ≤ G, or None where the basis does not fit."""
        found: list[Tensor | None] = [None]
        if not self._problem.lasts(lambda: found.append(self._build_features(hyper))):
            logger.warning(_WITHOUT)
        return found[-1]

    def _build_features(self, hyper: Hyperparameters) -> Tensor | None:
        prior, noise = self._noise.prior, self._noise
        start = torch.cat([noise.xi, prior.scale * noise.eta])
        solver = BlockKrylov(memory=room(self._problem) / 4)
        krylov = solver.factorise(WhitenedGGN(self._problem, prior.scale), start, len(noise.xi))
        lanczos, shift = krylov.lanczos, Shift(hyper.precision.log().mean().exp().item())
        while lanczos.num_steps < _MAX_STEPS and not lanczos.exhausted:
            lanczos.extend()
            if krylov.error(shift) <= _ENOUGH:
                break
        if not lanczos.has_basis:
            return None
        features = nystrom_features(lanczos)
        return features.mul_(prior.unscaled(torch.ones_like(features[0])))
