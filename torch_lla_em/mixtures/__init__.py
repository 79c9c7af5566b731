"""Mixtures by EM: Gaussian (ML, MAP, variational) and Bernoulli, in memory or streaming; and
densities over a network's features.

mixture = GaussianMixture(8, prior=ConjugatePrior()).fit(loader)
mixture.log_prob(x)
"""

from torch_lla_em.mixtures.base import Mixture
from torch_lla_em.mixtures.bernoulli import BernoulliMixture, Bernoullis, BetaPrior
from torch_lla_em.mixtures.conjugate import ConjugatePrior, Gaussians
from torch_lla_em.mixtures.feature_density import FeatureDensity
from torch_lla_em.mixtures.gaussian import GaussianMixture
from torch_lla_em.mixtures.variational import Posterior, VariationalGaussianMixture

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
