"""Interfaces of other libraries: laplace-torch, estimators, and language models."""

from typing import NoReturn

from torch_lla_em.compat.answers import Answers, answers
from torch_lla_em.compat.estimators import EstimatorPosterior, posterior
from torch_lla_em.compat.laplace import Laplace
from torch_lla_em.compat.marglik import marglik_training
from torch_lla_em.compat.networks import AverageHeads
from torch_lla_em.compat.options import missing

__all__ = [
    "Answers",
    "AverageHeads",
    "EstimatorPosterior",
    "Laplace",
    "answers",
    "marglik_training",
    "posterior",
]


def __getattr__(name: str) -> NoReturn:
    """Raise an error that says what to use in place of a class of laplace-torch."""
    raise missing(name)
