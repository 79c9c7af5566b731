"""Mixtures of independent Bernoulli columns, by maximum likelihood and by MAP."""

from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.mixtures.base import Mixture, check_shapes, check_weights
from torch_lla_em.mixtures.family import Family, FeatureMatrix


class Bernoullis(NamedTuple):
    """A mixture of independent Bernoulli columns."""

    weights: Tensor
    """π, shape (K,)."""

    means: Tensor
    """Probability of a 1, shape (K, D)."""


class BetaPrior(NamedTuple):
    """π ~ Dirichlet(α), every probability ~ Beta(a, b); MAP needs all at least 1."""

    weight_concentration: float = 2.0
    """α: at 2, one row more for each component."""

    ones: float = 2.0
    """a: at 2, one 1 more for each column of each component."""

    zeros: float = 2.0
    """b: at 2, one 0 more."""


class BernoulliFamily(Family):
    """Bernoulli components: φ(x) = [1, x]."""

    def __init__(self, num_components: int, dim: int, prior: BetaPrior, floor: float):
        self.width = 2 * dim + num_components
        self.num_components, self.prior, self.floor = num_components, prior, floor

    def columns(self, x: Tensor) -> Tensor:
        return x.T.double()

    def features(self, columns: Tensor) -> FeatureMatrix:
        return FeatureMatrix(torch.cat([torch.ones_like(columns[:1]), columns]))

    def natural(self, parameters: Bernoullis) -> Tensor:
        weights, p = parameters
        constant = weights.log() + torch.log1p(-p).sum(1)
        return torch.cat([constant[:, None], p.logit()], 1)

    def maximise(self, sums: Tensor, old: Bernoullis) -> Bernoullis:
        alpha, a, b = self.prior
        counts, ones = sums[:, 0], sums[:, 1:]
        weights = counts + alpha - 1
        rows = counts[:, None] + a + b - 2
        p = torch.where(rows > 0, (ones + a - 1) / rows, old.means)
        return Bernoullis(weights / weights.sum(), p.clamp(self.floor, 1 - self.floor))

    def first(self, sums: Tensor) -> Bernoullis:
        start = BernoulliFamily(self.num_components, 0, BetaPrior(), self.floor)
        return start.maximise(sums, Bernoullis(sums[:, 0], sums[:, 1:]))

    def log_prior(self, parameters: Bernoullis) -> Tensor:
        alpha, a, b = self.prior
        weights, p = parameters
        log_weights = torch.special.xlogy(alpha - 1, weights).sum()
        return log_weights + ((a - 1) * p.log() + (b - 1) * torch.log1p(-p)).sum()

    def enter(self, parameters: Bernoullis) -> Bernoullis:
        weights, p = (t.double() for t in parameters)
        return Bernoullis(weights, p.clamp(self.floor, 1 - self.floor))

    def leave(self, parameters: Bernoullis) -> Bernoullis:
        return parameters


class BernoulliMixture(Mixture):
    """p(x) = Σ_k π_k Π_d p_kd^x_d (1 − p_kd)^(1 − x_d), by ML, or by MAP with a prior.

    Probabilities stay ``min_probability`` away from 0 and 1.
    """

    def __init__(
        self,
        num_components: int,
        *,
        prior: BetaPrior | None = None,
        min_probability: float = 1e-6,
        **options,
    ):
        super().__init__(num_components, **options)
        if not 0 < min_probability < 0.5:
            raise ValueError(f"min_probability must be between 0 and 0.5, not {min_probability}.")
        if prior is not None and min(prior) < 1:
            raise ValueError(f"The numbers of a BetaPrior must be at least 1: {prior}.")
        self.prior, self.min_probability = prior, min_probability

    def _check_values(self, x: Tensor) -> None:
        if not ((x == 0) | (x == 1)).all():
            raise ValueError("A Bernoulli mixture takes zeros and ones only. Binarise the data.")

    def _family(self, num_components: int, mean: Tensor, variance: Tensor) -> BernoulliFamily:
        prior = BetaPrior(1.0, 1.0, 1.0) if self.prior is None else self.prior
        return BernoulliFamily(num_components, len(mean), prior, self.min_probability)

    def _moments(self, parameters: Bernoullis) -> tuple[Tensor, Tensor]:
        mean = parameters.weights @ parameters.means
        return mean, mean * (1 - mean)

    def _checked(self, parameters: Bernoullis, num_components: int, dim: int) -> Bernoullis:
        check_shapes(parameters, (num_components,), (num_components, dim))
        check_weights(parameters.weights)
        if (parameters.means < 0).any() or (parameters.means > 1).any():
            raise ValueError("The means of a Bernoulli mixture must be between 0 and 1.")
        return parameters
