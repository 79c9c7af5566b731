"""Mixtures of independent Bernoulli columns, by maximum likelihood and by MAP."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.mixtures.em import Family, Tensors
from torch_lla_em.mixtures.mixture import Mixture


class Bernoullis(NamedTuple):
    """The parameters of a mixture of independent Bernoulli columns."""

    weights: Tensor
    """π, shape (K,)."""

    means: Tensor
    """The probability of a 1, shape (K, D)."""


class BernoulliFamily(Family):
    """Bernoulli components with φ(x) = (1, x)."""

    def __init__(
        self,
        mixture: "BernoulliMixture",
        num_components: int,
        centre: Tensor,
        variance: Tensor,
        regularised: bool = False,
    ):
        self.width = 2 * len(centre) + num_components
        self.floor = mixture.min_probability
        self.added = float(
            mixture.prior or regularised
        )  # examples, ones and zeros that the prior is worth

    def columns(self, x: Tensor) -> Tensor:
        if not ((x == 0) | (x == 1)).all():
            raise ValueError("A Bernoulli mixture takes zeros and ones only. Binarise the data.")
        return x.T.double()

    def natural(self, parameters: Bernoullis) -> Tensors:
        weights, p = parameters
        return weights.log() + torch.log1p(-p).sum(1), p.logit()

    def maximise(self, sums: Tensors) -> Bernoullis:
        counts, ones = sums
        weights, total = counts + self.added, counts[:, None] + 2 * self.added
        p = (ones + self.added) / total.clamp_min(torch.finfo(total.dtype).tiny)
        return Bernoullis(weights / weights.sum(), p.clamp(self.floor, 1 - self.floor))

    def log_prior(self, parameters: Bernoullis) -> Tensor:
        weights, p = parameters
        log_weights: Tensor = torch.special.xlogy(self.added, weights).sum()
        return log_weights + self.added * (p.log() + torch.log1p(-p)).sum()


class BernoulliMixture(Mixture):
    """A mixture of independent binary columns, by maximum likelihood, or by MAP with a prior.

    p(x) = Σ_k π_k Π_d p_kd^x_d (1 − p_kd)^(1 − x_d).

    Args:
        num_components (int): Number of components K.
        prior (bool): Whether to use the priors π ~ Dirichlet(2) and p ~ Beta(2, 2) (MAP), which are
            worth one example for each component, and one 1 and one 0 in each column. They keep
            probabilities away from 0 and 1 if there are few examples. Default False: maximum likelihood.
        min_probability (float): Smallest distance of probabilities to 0 and 1. Default 1e-6.
        **options: Further arguments, those of ``Mixture``.

    Raises:
        ValueError: If an option is out of range; in ``fit``, if the data are not zeros and ones.

    Example:
        >>> mixture = BernoulliMixture(2, prior=True).fit(torch.rand(500, 8).round())
    """

    _kind = BernoulliFamily

    def __init__(
        self,
        num_components: int,
        *,
        prior: bool = False,
        min_probability: float = 1e-6,
        **options: Any,
    ):
        super().__init__(num_components, **options)
        if not 0 < min_probability < 0.5:
            raise ValueError(f"min_probability must be between 0 and 0.5, not {min_probability}.")
        self.prior, self.min_probability = prior, min_probability
