"""Likelihoods p(y | f): ``base``, ``classes``, ``elementwise``, ``linear_operator``,
``heteroscedastic``, ``tempered``; ``examined`` checks those of a user's own."""

from torch_lla_em.likelihoods.base import Likelihood, average, sum_rows
from torch_lla_em.likelihoods.classes import BradleyTerry, Classification
from torch_lla_em.likelihoods.elementwise import Bernoulli, Poisson, Regression
from torch_lla_em.likelihoods.examined import Example, compare_with_log_prob
from torch_lla_em.likelihoods.heteroscedastic import HeteroscedasticRegression
from torch_lla_em.likelihoods.linear_operator import LinearOperator, LinearOperatorRegression
from torch_lla_em.likelihoods.rewards import compare, preferred
from torch_lla_em.likelihoods.tempered import Tempered, tempered
from torch_lla_em.likelihoods.weighted import Weighted

LIKELIHOODS = {
    "classification": Classification,
    "regression": Regression,
    "bernoulli": Bernoulli,
    "poisson": Poisson,
    "heteroscedastic": HeteroscedasticRegression,
    "reward_modeling": BradleyTerry,
}


def is_named(likelihood: Likelihood) -> bool:
    """Whether a name, and the noise of a regression, say all of a likelihood."""
    likelihood = getattr(likelihood, "untempered", likelihood)
    kind = type(likelihood)
    if kind not in LIKELIHOODS.values():
        return False
    return kind is Regression or vars(likelihood) == vars(kind())


__all__ = [
    "LIKELIHOODS",
    "Bernoulli",
    "BradleyTerry",
    "Classification",
    "Example",
    "HeteroscedasticRegression",
    "Likelihood",
    "LinearOperator",
    "LinearOperatorRegression",
    "Poisson",
    "Regression",
    "Tempered",
    "Weighted",
    "average",
    "compare",
    "compare_with_log_prob",
    "is_named",
    "preferred",
    "sum_rows",
    "tempered",
]
