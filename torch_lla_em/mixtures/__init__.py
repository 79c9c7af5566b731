"""Mixtures by EM, and densities of a network's features.

``mixture`` (the public interface), ``em`` (the iteration), ``examples`` (the data), then the kinds:
``gaussian``, ``variational``, ``bernoulli``; and ``feature_density``.

mixture = GaussianMixture(8, prior=ConjugatePrior()).fit(loader)
mixture.log_prob(x)
"""

from torch_lla_em.mixtures.bernoulli import BernoulliMixture, Bernoullis, BetaPrior
from torch_lla_em.mixtures.conjugate import ConjugatePrior, Gaussians, NormalWishart
from torch_lla_em.mixtures.feature_density import FeatureDensity
from torch_lla_em.mixtures.gaussian import GaussianMixture
from torch_lla_em.mixtures.mixture import Mixture
from torch_lla_em.mixtures.variational import VariationalGaussianMixture

Posterior = NormalWishart
"""The posterior of a ``VariationalGaussianMixture``."""

__all__ = [
    "BernoulliMixture",
    "Bernoullis",
    "BetaPrior",
    "ConjugatePrior",
    "FeatureDensity",
    "GaussianMixture",
    "Gaussians",
    "Mixture",
    "NormalWishart",
    "Posterior",
    "VariationalGaussianMixture",
]
