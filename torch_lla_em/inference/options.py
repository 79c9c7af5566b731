"""What a fit is to do, and what is chosen where it does not say."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from torch import Tensor

from torch_lla_em.inference.evidence import sigma_of
from torch_lla_em.inference.posterior_samples import Solver
from torch_lla_em.problem import Problem
from torch_lla_em.solvers import BlockKrylov

logger = logging.getLogger("torch_lla_em")

MOST_OUTPUTS = 256
"""Classes up to which the roots of each example's (C, C) blocks cost no more than the passes."""


@dataclass(frozen=True)
class FitOptions:
    """What a fit is to do."""

    num_samples: int = 32
    seed: int = 0
    g_prior: bool | str = True
    layerwise: bool = False
    solver: Solver | None = None
    tolerance: float = 0.03
    """Largest error of samples and mode at the end, in posterior standard deviations."""

    curvature: str | None = None
    update: str = "mackay"
    em_steps: int = 20
    """Steps of λ; 0 keeps it."""

    prior_precision: Tensor | None = None
    """Where λ begins; None has it chosen."""

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


def allows_span(problem: Problem, options: FitOptions) -> bool:
    """Whether a fixed curvature may go over a span, whose outputs at all examples are kept.

    It takes one λ, one σ, no other solver asked for, and not too many classes.
    """
    own = options.solver is None or isinstance(options.solver, BlockKrylov)
    few = problem.likelihood.elementwise or not _has_many_outputs(problem)
    return own and few and not options.layerwise and has_one_noise(problem)


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
    likelihood = problem.likelihood
    against = ["a Gaussian likelihood has one H everywhere"] if likelihood.is_quadratic else []
    against += options.against_variational
    if _has_many_outputs(problem):
        against.append("outputs are many")
    curvature = "network" if against else "variational"
    logger.info("Curvature %s: %s.", curvature, *against[:1] or ("it predicts best as fitted",))
    return curvature


def has_one_noise(problem: Problem) -> bool:
    """Whether what EM learns of the noise only scales G."""
    sigma = sigma_of(problem)
    return sigma is None or not sigma.dim()


def _has_many_outputs(problem: Problem) -> bool:
    """Whether an example has more outputs, or a site more classes, than blocks are made for."""
    data = problem.data
    sites = data.num_rows if problem.likelihood.elementwise else data.num_targets
    return data.num_outputs > MOST_OUTPUTS * max(sites, 1)
