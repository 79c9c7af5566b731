"""Mixtures by EM, and densities of a network's features.

``mixture`` has the public classes, ``em`` the data and the iteration, ``starts`` where it begins,
``gaussian`` the components and their prior, and ``feature_density`` densities of features.
"""

from torch_lla_em.mixtures.feature_density import FeatureDensity
from torch_lla_em.mixtures.gaussian import Gaussians, NormalWishart
from torch_lla_em.mixtures.mixture import GaussianMixture, Mixture, VariationalGaussianMixture

__all__ = [
    "FeatureDensity",
    "GaussianMixture",
    "Gaussians",
    "Mixture",
    "NormalWishart",
    "VariationalGaussianMixture",
]
