"""Sums over the data, Σ loss(J w, y) and G w = Σ Jᵀ H J w, each computed in one pass."""

from torch_lla_em.problem.hessian import (
    COPIES,
    ENTRIES,
    AtOutputs,
    Blocks,
    Diagonal,
    Draws,
    Hessian,
    form_of_H,
    functions,
    parts_of,
    root_of,
    towards,
)
from torch_lla_em.problem.loss import Loss, TargetFacts
from torch_lla_em.problem.operators import Outputs, gathered, pull_back
from torch_lla_em.problem.plan import Plan, duration, time_of_fit
from torch_lla_em.problem.prepare import place_of_vectors, prepare, seconds_of_pass
from torch_lla_em.problem.problem import Problem, output_probes
from torch_lla_em.problem.sites import KEPT_OUTPUTS, Sites, sites_of
from torch_lla_em.problem.sweep import FEW

__all__ = [
    "COPIES",
    "ENTRIES",
    "FEW",
    "KEPT_OUTPUTS",
    "AtOutputs",
    "Blocks",
    "Diagonal",
    "Draws",
    "Hessian",
    "Loss",
    "Outputs",
    "Plan",
    "Problem",
    "Sites",
    "TargetFacts",
    "duration",
    "form_of_H",
    "functions",
    "gathered",
    "output_probes",
    "parts_of",
    "place_of_vectors",
    "prepare",
    "pull_back",
    "root_of",
    "seconds_of_pass",
    "sites_of",
    "time_of_fit",
    "towards",
]
