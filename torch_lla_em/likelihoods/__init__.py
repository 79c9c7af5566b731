"""Likelihoods p(y | f): losses with their gradients, Hessians H and roots S of H.

The base class is in ``base``. The likelihoods are in ``discrete`` and ``gaussian``.
``checks`` checks a custom likelihood. A new likelihood needs an entry in ``LIKELIHOODS`` if users
should be able to choose it by name.
"""

from typing import Literal

from torch_lla_em.likelihoods.base import Likelihood, average, mean_square, sum_rows
from torch_lla_em.likelihoods.checks import compare_with_log_prob, require_labels, warn_if_mistaken
from torch_lla_em.likelihoods.discrete import (
    Bernoulli,
    BradleyTerry,
    Classification,
    Poisson,
    preferred,
    rewards,
)
from torch_lla_em.likelihoods.gaussian import HeteroscedasticRegression, Regression

Task = Literal[
    "classification", "regression", "bernoulli", "poisson", "heteroscedastic", "reward_modeling"
]
"""The likelihoods that have a name."""

LIKELIHOODS: dict[str, type[Likelihood]] = {
    "classification": Classification,
    "regression": Regression,
    "bernoulli": Bernoulli,
    "poisson": Poisson,
    "heteroscedastic": HeteroscedasticRegression,
    "reward_modeling": BradleyTerry,
}


def is_named(likelihood: Likelihood) -> bool:
    """Whether its name (and σ, for a regression) describes a likelihood completely."""
    kind = type(likelihood)
    if kind not in LIKELIHOODS.values():
        return False
    return kind is Regression or vars(likelihood) == vars(kind())


__all__ = [
    "LIKELIHOODS",
    "Bernoulli",
    "BradleyTerry",
    "Classification",
    "HeteroscedasticRegression",
    "Likelihood",
    "Poisson",
    "Regression",
    "Task",
    "average",
    "compare_with_log_prob",
    "is_named",
    "mean_square",
    "preferred",
    "require_labels",
    "rewards",
    "sum_rows",
    "warn_if_mistaken",
]
