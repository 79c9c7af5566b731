"""What a fit is to do, and what is chosen where it does not say: curvature, solver, E-step."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torch_lla_em.inference.e_step import Deflation, FixedEStep, IterativeEStep
from torch_lla_em.inference.evidence import sigma_of
from torch_lla_em.inference.krylov_e_step import KrylovEStep
from torch_lla_em.inference.mackay import Hyperparameters
from torch_lla_em.inference.mode_search import ModeSearch
from torch_lla_em.inference.posterior_samples import Solver
from torch_lla_em.inference.stochastic_prior import StochasticPrior
from torch_lla_em.problem import Problem
from torch_lla_em.solvers import SGD, BlockCG, BlockKrylov, FunctionSpace, Newton

logger = logging.getLogger("torch_lla_em")

_FUNCTION_SPACE_OUTPUTS = 1024
_FUNCTION_SPACE_BYTES = 1e9

MOST_OUTPUTS = 256
"""Classes up to which the roots of each example's (C, C) blocks cost no more than the passes."""


@dataclass(frozen=True)
class FitOptions:
    """What a fit is to do."""

    num_samples: int
    seed: int
    g_prior: bool | str
    layerwise: bool
    solver: Solver | None
    tolerance: float
    curvature: str | None
    update: str
    em_steps: int
    prior_precision: Tensor | None

    @property
    def against_variational(self) -> list[str]:
        """Why these options do not go with an expected curvature; empty if they do."""
        reasons = {
            "there is a precision for each tensor": self.layerwise,
            "a solver was chosen": self.solver is not None,
            'update="em" was chosen': self.update == "em",
        }
        return [why for why, holds in reasons.items() if holds]

    @property
    def allows_variational(self) -> bool:
        """Whether the curvature may be an expectation under the posterior."""
        return not self.against_variational and self.curvature in (None, "variational")


def make_e_step(
    problem: Problem,
    noise: StochasticPrior,
    options: FitOptions,
    hyper: Hyperparameters,
    known: dict[str, Any] | None = None,
) -> FixedEStep:
    """Return the E-step of the solver asked for, or of one chosen by size.

    ``known`` is its state in an earlier run.
    """
    solver = options.solver or choose_solver(problem, options.layerwise)
    of_mode = solver if isinstance(solver, SGD) else Newton()
    search = ModeSearch(problem, noise.prior, of_mode)
    if isinstance(solver, BlockKrylov) and _shifts(problem, options.layerwise):
        return KrylovEStep(problem, noise, solver, search, known)
    if known is None:
        deflates = isinstance(solver, BlockCG) and _has_one_noise(problem) and solver.deflate
        known = {"deflation": Deflation.of(problem, noise, hyper.precision) if deflates else None}
    return IterativeEStep(problem, noise, solver, search, known)


def allows_span(problem: Problem, options: FitOptions) -> bool:
    """Whether a fixed curvature may go over a span: one λ, one σ, and no solver asked for."""
    return options.solver is None and _shifts(problem, options.layerwise)


def choose_scalings(g_prior: bool | str | None, variational: bool, validated: bool) -> tuple:
    """Return the values of ``g_prior`` to fit with, of which a validation set then decides.

    Where the curvature is an expectation under the posterior, networks on tables, small CNNs and
    transformers predict better with "tensor" and LeNets with True; "half" is never far from the
    better one. Gaussian likelihoods predict best with True.
    """
    if g_prior is not None:
        return (g_prior,)
    if not variational:
        return (True,)
    return (True, "tensor") if validated else ("half",)


def choose_curvature(problem: Problem, options: FitOptions) -> str:
    """Return "variational" where one λ, an H that moves, and nothing asked of EM allow it."""
    data, likelihood = problem.data, problem.likelihood
    sites = data.num_rows if likelihood.elementwise else data.num_targets
    against = ["a Gaussian likelihood has one H everywhere"] if likelihood.is_quadratic else []
    against += options.against_variational
    if data.num_outputs > MOST_OUTPUTS * max(sites, 1):
        against.append("outputs are many")
    curvature = "network" if against else "variational"
    logger.info("Curvature %s: %s.", curvature, *against[:1] or ("it predicts best as fitted",))
    return curvature


def choose_solver(problem: Problem, layerwise: bool) -> Solver:
    """Return the solver that suits the sizes, and log it."""
    outputs = problem.data.num_outputs
    bytes_of_rows = outputs * problem.linear_model.layout.size * problem.dtype.itemsize
    if _shifts(problem, layerwise):
        solver: Solver = BlockKrylov()
        why = "one factorisation serves every λ"
    elif outputs <= _FUNCTION_SPACE_OUTPUTS and bytes_of_rows <= _FUNCTION_SPACE_BYTES:
        solver, why = FunctionSpace(), f"there are only {outputs} outputs in all"
    else:
        kind = "prior precision" if layerwise else "noise"
        solver, why = (
            BlockCG(),
            f"one {kind} per {'tensor' if layerwise else 'output'} allows no shift",
        )
    logger.info("Solver %s: %s.", type(solver).__name__, why)
    return solver


def _shifts(problem: Problem, layerwise: bool) -> bool:
    """Whether a new λ and σ only shift and scale G."""
    return not layerwise and _has_one_noise(problem)


def _has_one_noise(problem: Problem) -> bool:
    """Whether what EM learns of the noise only scales G."""
    sigma = sigma_of(problem)
    return sigma is None or not sigma.dim()
