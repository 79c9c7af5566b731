"""Gaussian mixtures by EM, and densities of a network's features.

``mixture`` has the public classes, ``gaussian`` their components and priors, and ``em`` the
iteration and its start.
"""

from torch_lla_em.mixtures.feature_density import FeatureDensity
from torch_lla_em.mixtures.gaussian import Gaussians, NormalWishart
from torch_lla_em.mixtures.mixture import GaussianMixture, VariationalGaussianMixture

__all__ = [
    "FeatureDensity",
    "GaussianMixture",
    "Gaussians",
    "NormalWishart",
    "VariationalGaussianMixture",
]
