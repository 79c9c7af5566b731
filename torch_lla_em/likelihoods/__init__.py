"""Likelihoods p(y | f): ``base``, ``classes``, ``elementwise``, ``linear_operator``,
``heteroscedastic``, ``tempered``."""

from torch_lla_em.likelihoods.base import Likelihood, average, sum_rows
from torch_lla_em.likelihoods.classes import BradleyTerry, Classification
from torch_lla_em.likelihoods.elementwise import Bernoulli, Poisson, Regression
from torch_lla_em.likelihoods.heteroscedastic import HeteroscedasticRegression
from torch_lla_em.likelihoods.linear_operator import LinearOperator, LinearOperatorRegression
from torch_lla_em.likelihoods.rewards import compare, preferred
from torch_lla_em.likelihoods.tempered import Tempered, tempered

LIKELIHOODS = {
    "classification": Classification,
    "regression": Regression,
    "bernoulli": Bernoulli,
    "poisson": Poisson,
    "heteroscedastic": HeteroscedasticRegression,
    "reward_modeling": BradleyTerry,
}

__all__ = [
    "LIKELIHOODS",
    "Bernoulli",
    "BradleyTerry",
    "Classification",
    "HeteroscedasticRegression",
    "Likelihood",
    "LinearOperator",
    "LinearOperatorRegression",
    "Poisson",
    "Regression",
    "Tempered",
    "average",
    "compare",
    "preferred",
    "sum_rows",
    "tempered",
]
