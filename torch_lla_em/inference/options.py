"""Options of a fit, and the choices that depend on the problem."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from torch import Tensor

from torch_lla_em.inference.posterior_samples import Solver
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.problem import Problem
from torch_lla_em.solvers import BlockKrylov

logger = logging.getLogger("torch_lla_em")

MOST_OUTPUTS = 256
"""Largest number of classes for which (C, C) blocks of H are stored, if a likelihood needs them."""


@dataclass(frozen=True)
class FitOptions:
    """Options of a fit."""

    num_samples: int = 32
    seed: int = 0
    g_prior: bool | str | None = None
    layerwise: bool = False
    solver: Solver | None = None
    tolerance: float = 0.03
    """Largest error of the final samples and mode, in posterior standard deviations."""

    curvature: str | None = None
    update: str = "mackay"
    em_steps: int = 20
    """Largest number of steps of λ; 0 keeps λ fixed."""

    prior_precision: Tensor | None = None
    """Initial λ; None: chosen from the data."""

    @property
    def has_default_solver(self) -> bool:
        """Whether the fit may use a span of directions; ``BlockKrylov`` only limits its memory."""
        return self.solver is None or isinstance(self.solver, BlockKrylov)

    def memory_of_span(self, free: float) -> float:
        """Return the bytes that a span of directions may take, of those that are free."""
        given = self.solver.memory if isinstance(self.solver, BlockKrylov) else None
        return free / 2 if given is None else min(free / 2, given)

    @property
    def against_variational(self) -> list[str]:
        """Why these options exclude the variational curvature; empty if they do not."""
        reasons = {
            "the prior has one precision per tensor": self.layerwise,
            "a solver was chosen": not self.has_default_solver,
            'update="em" was chosen': self.update == "em",
        }
        return [why for why, holds in reasons.items() if holds]

    @property
    def allows_variational(self) -> bool:
        """Whether the variational curvature is possible."""
        return not self.against_variational and self.curvature in (None, "variational")


def allows_span(problem: Problem, options: FitOptions) -> bool:
    """Whether a fit with a fixed curvature can use a span of directions.

    It needs one λ, one σ, and the default solver.
    """
    return options.has_default_solver and not options.layerwise and has_one_noise(problem)


def choose_curvature(problem: Problem, options: FitOptions) -> str:
    """Return "variational" if the likelihood and the options allow it, otherwise "network"."""
    likelihood = problem.likelihood
    against = ["H is constant for a Gaussian likelihood"] if likelihood.is_quadratic else []
    against += options.against_variational
    classes = problem.data.facts.num_outputs // max(problem.data.facts.num_targets, 1)
    if has_too_large_blocks(likelihood, classes):
        against.append("outputs are many")
    curvature = "network" if against else "variational"
    logger.info(
        "Curvature %s: %s.",
        curvature,
        *against[:1] or ("its predictions are the best without calibration",),
    )
    return curvature


def has_one_noise(problem: Problem) -> bool:
    """Whether a change of the observation noise only scales G."""
    sigma = problem.sigma
    return sigma is None or not sigma.dim()


def has_too_large_blocks(likelihood: Likelihood, classes: int) -> bool:
    """Whether H takes (C, C) blocks, and there are too many classes for them."""
    return classes > MOST_OUTPUTS and not likelihood.keeps_functions(classes)
