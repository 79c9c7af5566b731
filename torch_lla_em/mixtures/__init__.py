"""Mixtures by EM, and densities of a network's features.

The public interface is in ``mixture``, the data and the iteration in ``em``, and where it starts in
``starts``. Components are in
``gaussian`` (with ``conjugate``), and densities of features in ``feature_density``.
"""

from torch_lla_em.mixtures.conjugate import Gaussians, NormalWishart
from torch_lla_em.mixtures.feature_density import FeatureDensity
from torch_lla_em.mixtures.mixture import (
    GaussianMixture,
    Mixture,
    VariationalGaussianMixture,
)

__all__ = [
    "FeatureDensity",
    "GaussianMixture",
    "Gaussians",
    "Mixture",
    "NormalWishart",
    "VariationalGaussianMixture",
]
