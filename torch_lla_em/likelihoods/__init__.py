"""Likelihoods p(y | f): losses with their gradients, Hessians H and roots S of H.

``base`` (what a likelihood offers), ``classes``, ``elementwise``, ``gaussian``,
``linear_operator``; ``wrappers`` (temperature and weights of a fit); ``checks`` (of a user's own).
A new likelihood needs a file, and a line in ``LIKELIHOODS`` if it is to have a name.
"""

from torch_lla_em.likelihoods.base import Likelihood, average, sum_rows
from torch_lla_em.likelihoods.checks import Example, compare_with_log_prob
from torch_lla_em.likelihoods.classes import BradleyTerry, Classification, compare, preferred
from torch_lla_em.likelihoods.elementwise import Bernoulli, Poisson
from torch_lla_em.likelihoods.gaussian import HeteroscedasticRegression, Regression
from torch_lla_em.likelihoods.linear_operator import LinearOperator, LinearOperatorRegression
from torch_lla_em.likelihoods.wrappers import Tempered, Weighted, tempered

LIKELIHOODS = {
    "classification": Classification,
    "regression": Regression,
    "bernoulli": Bernoulli,
    "poisson": Poisson,
    "heteroscedastic": HeteroscedasticRegression,
    "reward_modeling": BradleyTerry,
}


def is_named(likelihood: Likelihood) -> bool:
    """Whether a name, and the noise of a regression, describe a likelihood completely."""
    likelihood = likelihood.plain
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
