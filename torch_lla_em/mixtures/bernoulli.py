"""Mixtures of independent Bernoulli columns, by maximum likelihood and by MAP."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.mixtures.em import Family, Tensors
from torch_lla_em.mixtures.mixture import Mixture, check_parameters


class Bernoullis(NamedTuple):
    """The parameters of a mixture of independent Bernoulli columns."""

    weights: Tensor
    """π, shape (K,)."""

    means: Tensor
    """The probability of a 1, shape (K, D)."""


class BetaPrior(NamedTuple):
    """π ~ Dirichlet(α), every probability ~ Beta(a, b); MAP needs all of them at least 1."""

    weight_concentration: float = 2.0
    """α: at 2, the prior is worth one example for each component."""

    ones: float = 2.0
    """a: at 2, the prior is worth one 1 in each column of each component."""

    zeros: float = 2.0
    """b: at 2, the prior is worth one 0 in each column of each component."""


class BernoulliFamily(Family):
    """Bernoulli components with φ(x) = (1, x)."""

    def __init__(
        self, mixture: "BernoulliMixture", num_components: int, centre: Tensor, variance: Tensor
    ):
        self.shape = num_components, len(centre)
        self.width = 2 * len(centre) + num_components
        self.prior = mixture.prior or BetaPrior(1.0, 1.0, 1.0)
        self.floor = mixture.min_probability

    def columns(self, x: Tensor) -> Tensor:
        if not ((x == 0) | (x == 1)).all():
            raise ValueError("A Bernoulli mixture takes zeros and ones only. Binarise the data.")
        return x.T.double()

    def natural(self, parameters: Bernoullis) -> Tensors:
        weights, p = parameters
        return weights.log() + torch.log1p(-p).sum(1), p.logit()

    def start(self, sums: Tensors) -> Bernoullis:
        return self._mode(sums, BetaPrior())

    def maximise(self, sums: Tensors) -> Bernoullis:
        return self._mode(sums, self.prior)

    def _mode(self, sums: Tensors, prior: BetaPrior) -> Bernoullis:
        counts, ones = sums
        alpha, a, b = prior
        weights, total = counts + alpha - 1, counts[:, None] + a + b - 2
        p = (ones + a - 1) / total.clamp_min(torch.finfo(total.dtype).tiny)
        return Bernoullis(weights / weights.sum(), p.clamp(self.floor, 1 - self.floor))

    def log_prior(self, parameters: Bernoullis) -> Tensor:
        (alpha, a, b), (weights, p) = self.prior, parameters
        log_weights: Tensor = torch.special.xlogy(alpha - 1, weights).sum()
        return log_weights + ((a - 1) * p.log() + (b - 1) * torch.log1p(-p)).sum()

    def enter(self, parameters: Bernoullis) -> Bernoullis:
        check_parameters(parameters, (self.shape[:1], self.shape), "parameters")
        weights, p = (t.double() for t in parameters)
        if not ((p >= 0) & (p <= 1)).all():
            raise ValueError("The means of a Bernoulli mixture must be between 0 and 1.")
        return Bernoullis(weights, p.clamp(self.floor, 1 - self.floor))

    def leave(self, parameters: Bernoullis) -> Bernoullis:
        return parameters


class BernoulliMixture(Mixture):
    """A mixture of independent binary columns, by maximum likelihood, or by MAP with a prior.

    p(x) = Σ_k π_k Π_d p_kd^x_d (1 − p_kd)^(1 − x_d).

    Args:
        num_components (int): Number of components K.
        prior (BetaPrior, optional): Default None: maximum likelihood. ``BetaPrior()`` gives MAP,
            which keeps probabilities away from 0 and 1 if there are few examples.
        min_probability (float): Smallest distance of probabilities to 0 and 1. Default 1e-6.
        **options: Further arguments, those of ``Mixture``.

    Raises:
        ValueError: If an option is out of range; in ``fit``, if the data are not zeros and ones.

    Example:
        >>> mixture = BernoulliMixture(2, prior=BetaPrior()).fit(torch.rand(500, 8).round())
    """

    _kind = BernoulliFamily

    def __init__(
        self,
        num_components: int,
        *,
        prior: BetaPrior | None = None,
        min_probability: float = 1e-6,
        **options: Any,
    ):
        super().__init__(num_components, **options)
        if not 0 < min_probability < 0.5:
            raise ValueError(f"min_probability must be between 0 and 0.5, not {min_probability}.")
        if prior is not None and min(prior) < 1:
            raise ValueError(f"The numbers of a BetaPrior must be at least 1: {prior}.")
        self.prior, self.min_probability = prior, min_probability
