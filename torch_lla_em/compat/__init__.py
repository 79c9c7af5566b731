"""Interfaces of other libraries: laplace-torch, estimators, and language models."""

from torch_lla_em.compat.answers import Answers, answers
from torch_lla_em.compat.estimators import EstimatorPosterior, posterior
from torch_lla_em.compat.laplace import Laplace
from torch_lla_em.compat.networks import AverageHeads

__all__ = ["Answers", "AverageHeads", "EstimatorPosterior", "Laplace", "answers", "posterior"]
