"""Interfaces of other libraries: laplace-torch, and the estimators of scikit-learn and skorch."""

from torch_lla_em.compat.estimators import AverageHeads, EstimatorPosterior, posterior
from torch_lla_em.compat.laplace import Laplace

__all__ = ["AverageHeads", "EstimatorPosterior", "Laplace", "posterior"]
