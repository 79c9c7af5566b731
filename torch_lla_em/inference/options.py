"""Options of a fit, and the choices that depend on the problem."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from torch import Tensor

from torch_lla_em.inference.posterior_samples import Solver
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.problem import Problem

logger = logging.getLogger("torch_lla_em")

MOST_OUTPUTS = 256
"""Largest number of classes for which (C, C) blocks of H are stored, if a likelihood needs them."""


@dataclass(frozen=True)
class FitOptions:
    """Options of a fit."""

    num_samples: int = 32
    seed: int = 0
    g_prior: bool | None = None
    layerwise: bool = False
    solver: Solver | None = None
    tolerance: float = 0.03
    """Largest error of the final samples and mode, in posterior standard deviations."""

    curvature: str | None = None
    span_memory: float | None = None
    """Largest size of the span in bytes; None: half of the free memory."""

    em_steps: int = 20
    """Largest number of steps of λ; 0 keeps λ fixed."""

    prior_precision: Tensor | None = None
    """Initial λ; None: chosen from the data."""

    def memory_of_span(self, free: float) -> float:
        """Return the bytes that a span of directions may take, of those that are free."""
        return min(free / 2, self.span_memory or free / 2)

    @property
    def against_span(self) -> list[str]:
        """Why these options exclude a span of directions; empty if they do not."""
        reasons = {
            "the prior has one precision per tensor": self.layerwise,
            "a solver was chosen": self.solver is not None,
        }
        return [why for why, holds in reasons.items() if holds]

    @property
    def allows_variational(self) -> bool:
        """Whether the variational curvature is possible."""
        return not self.against_span and self.curvature in (None, "variational")


def choose_curvature(problem: Problem, options: FitOptions) -> str:
    """Return where H is evaluated: at the "network"'s outputs, the "linear" mode, or "variational", in expectation."""
    likelihood = problem.likelihood
    against = (
        ["H is constant for a Gaussian likelihood"]
        if likelihood.is_quadratic
        else options.against_span
    )
    if options.curvature and not against:
        return options.curvature
    classes = problem.data.facts.num_outputs // max(problem.data.facts.num_targets, 1)
    if has_too_large_blocks(likelihood, classes):
        against = [*against, "outputs are many"]
    curvature = "network" if against else "variational"
    logger.info(
        "Curvature %s: %s.",
        curvature,
        *against[:1] or ("its predictions are the best without calibration",),
    )
    return curvature


def has_too_large_blocks(likelihood: Likelihood, classes: int) -> bool:
    """Whether H takes (C, C) blocks, and there are too many classes for them."""
    return classes > MOST_OUTPUTS and not likelihood.is_softmax
