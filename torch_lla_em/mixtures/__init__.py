"""Mixtures by EM, and densities over a network's features."""

from torch_lla_em.mixtures.feature_density import FeatureDensity
from torch_lla_em.mixtures.mixture import (
    BernoulliMixture,
    Bernoullis,
    BetaPrior,
    ConjugatePrior,
    GaussianMixture,
    Gaussians,
    Mixture,
    Posterior,
    VariationalGaussianMixture,
)

__all__ = [
    "BernoulliMixture",
    "Bernoullis",
    "BetaPrior",
    "ConjugatePrior",
    "FeatureDensity",
    "GaussianMixture",
    "Gaussians",
    "Mixture",
    "Posterior",
    "VariationalGaussianMixture",
]
