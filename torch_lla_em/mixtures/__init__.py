"""Mixtures by EM, and densities of a network's features.

The public interface is in ``mixture``, the data and the iteration in ``em``, and where it starts in
``starts``. The kinds of mixtures are
in ``gaussian`` (with ``conjugate``) and ``bernoulli``, and densities of features in
``feature_density``.
"""

from torch_lla_em.mixtures.bernoulli import BernoulliMixture, Bernoullis
from torch_lla_em.mixtures.conjugate import Gaussians, NormalWishart
from torch_lla_em.mixtures.feature_density import FeatureDensity
from torch_lla_em.mixtures.gaussian import GaussianMixture, VariationalGaussianMixture
from torch_lla_em.mixtures.mixture import Mixture

__all__ = [
    "BernoulliMixture",
    "Bernoullis",
    "FeatureDensity",
    "GaussianMixture",
    "Gaussians",
    "Mixture",
    "NormalWishart",
    "VariationalGaussianMixture",
]
