"""Mixtures by EM, and densities of a network's features.

``mixture`` (the public interface), ``em`` (the iteration), ``data``, then the kinds: ``gaussian``
(with ``blocks`` and ``conjugate``), ``bernoulli``; and ``feature_density``.

Example::

    mixture = GaussianMixture(8, prior=ConjugatePrior()).fit(loader)
    mixture.log_prob(x)
"""

from torch_lla_em.mixtures.bernoulli import BernoulliMixture, Bernoullis, BetaPrior
from torch_lla_em.mixtures.conjugate import ConjugatePrior, Gaussians, NormalWishart
from torch_lla_em.mixtures.feature_density import FeatureDensity
from torch_lla_em.mixtures.gaussian import GaussianMixture, VariationalGaussianMixture
from torch_lla_em.mixtures.mixture import Mixture

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
