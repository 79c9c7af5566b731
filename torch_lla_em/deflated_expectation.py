"""The E-step of a layerwise prior: solves at every Λ, preconditioned by one Krylov basis of G."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_lla_em.evidence import sigma_of
from torch_lla_em.expectation import Expectation, Hyperparameters, IterativeEStep
from torch_lla_em.linear_mode import Precondition
from torch_lla_em.operators import WhitenedGGN
from torch_lla_em.problem import Problem
from torch_lla_em.solvers.block_cg import BlockCG
from torch_lla_em.solvers.block_krylov import BlockKrylov, Shift
from torch_lla_em.solvers.deflation import DeflatedCG, Preconditioner, nystrom_features
from torch_lla_em.stochastic_prior import StochasticPrior

# of the certificate at the first λ; the basis need not be exact, only know the large end of G
_ENOUGH = 0.1
_MAX_STEPS = 4


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

    def sample_solver(self, hyper: Hyperparameters, tolerance: float) -> BlockCG | DeflatedCG:
        if self._features is None:
            return super().sample_solver(hyper, tolerance)
        limits = tolerance, self._solver.max_passes
        return DeflatedCG(self._features, *limits, self._relative_noise(hyper))

    def preconditioner(self, hyper: Hyperparameters) -> Precondition | None:
        if self._features is None:
            return None
        deviation = self._noise.prior.deviation(hyper.precision)
        return Preconditioner(self._features, deviation / self._relative_noise(hyper)).inverse

    def _relative_noise(self, hyper: Hyperparameters) -> float:
        """Return σ over the one that the features were built with."""
        return 1.0 if hyper.sigma is None else (hyper.sigma / sigma_of(self._problem)).item()

    def _find_features(self, hyper: Hyperparameters) -> Tensor | None:
        """Return F with FᵀF ≤ G, or None where the basis does not fit."""
        prior, noise = self._noise.prior, self._noise
        start = torch.cat([noise.xi, prior.scale * noise.eta])
        solver = BlockKrylov(memory=self._problem.room() / 4)
        krylov = solver.factorise(WhitenedGGN(self._problem, prior.scale), start, len(noise.xi))
        lanczos, shift = krylov.lanczos, Shift(hyper.precision.log().mean().exp().item())
        while lanczos.num_steps < _MAX_STEPS and not lanczos.exhausted:
            lanczos.extend()
            if krylov.error(shift) <= _ENOUGH:
                break
        return prior.unscaled(nystrom_features(lanczos)) if lanczos.has_basis else None
