"""Sums over the data, Σ loss(J w, y) and G w = Σ Jᵀ H J w, each computed in one pass."""

from torch_lla_em.problem.loss import Loss
from torch_lla_em.problem.operators import (
    Outputs,
    WhitenedGGN,
    WhitenedLoss,
    gathered,
    pull_back,
)
from torch_lla_em.problem.plan import (
    VECTORS,
    Memory,
    Plan,
    place_of_vectors,
    prepare,
    room,
    size_of,
)
from torch_lla_em.problem.problem import NoiseFeatures, Problem, output_noise
from torch_lla_em.problem.sites import KEPT_OUTPUTS, Sites, sites_of
from torch_lla_em.problem.trial import Duration, Trial, tried

__all__ = [
    "KEPT_OUTPUTS",
    "VECTORS",
    "Duration",
    "Loss",
    "Memory",
    "NoiseFeatures",
    "Outputs",
    "Plan",
    "Problem",
    "Sites",
    "Trial",
    "WhitenedGGN",
    "WhitenedLoss",
    "gathered",
    "output_noise",
    "place_of_vectors",
    "prepare",
    "pull_back",
    "room",
    "sites_of",
    "size_of",
    "tried",
]
