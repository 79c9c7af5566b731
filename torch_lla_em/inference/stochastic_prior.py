"""The stochastic prior: noise drawn once, which sampling then optimises."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import Data
from torch_lla_em.inference.prior import Prior, g_prior_scale, g_prior_squares
from torch_lla_em.likelihoods import Likelihood, Regression
from torch_lla_em.problem import EarlierRows, NoiseFeatures, Problem
from torch_lla_em.runtime import normal

_XI_STREAM = 0


class StochasticPrior(NamedTuple):
    """Noise ξ ~ N(0, I) and η ~ N(0, G), free of λ, and the prior they belong to."""

    xi: Tensor
    """(K, P)."""

    eta: Tensor
    """Σ_n J_nᵀ S_n ε_nk, shape (K, P)."""

    prior: Prior
    """The prior's shape."""

    seed: int = 0

    def at(self, precision: Tensor) -> Tensor:
        """Return w0 = Λ^{-1/2} ξ + Λ⁻¹ η, shape (K, P): the centre each sample is pulled to."""
        deviation = self.prior.deviation(precision)
        return deviation * (self.xi + deviation * self.eta)

    def right_hand_side(self, precision: Tensor) -> Tensor:
        """Return ξ + Λ^{-1/2} η, shape (K, P): Λ w0 in whitened coordinates."""
        return self.xi + self.prior.deviation(precision) * self.eta

    def drawn_again(self, problem: Problem) -> StochasticPrior:
        """Return the same noise with η of another curvature, by one pass."""
        return self._replace(eta=problem.noise_features(len(self.xi), self.seed).eta)


class Earlier(NamedTuple):
    """The noise features of all data so far, and the likelihood that they were drawn under."""

    rows: EarlierRows
    likelihood: Any

    @classmethod
    def of(cls, eta: Tensor, scale: Tensor, likelihood: Likelihood, data: Data) -> Earlier:
        """Return what the next part of the data adds to, of the noise and its g-prior."""
        features = NoiseFeatures(eta, g_prior_squares(scale))
        return cls(EarlierRows(data.num_rows, data.num_outputs, features), likelihood)

    def at(self, likelihood: Likelihood) -> EarlierRows | None:
        """Return the features under a likelihood; None where only a pass can tell them."""
        if not isinstance(likelihood, Regression):
            return self.rows
        if likelihood.sigma_noise.dim():
            return None
        ratio = (likelihood.sigma_noise.cpu() / self.likelihood.sigma_noise.cpu()).item()
        eta, squares = self.rows.features
        return self.rows._replace(features=NoiseFeatures(eta / ratio, squares / ratio**2))


def get_sto_samples(
    problem: Problem,
    num_samples: int,
    seed: int = 0,
    g_prior: bool = True,
    layerwise: bool = False,
) -> StochasticPrior:
    """Draw the stochastic prior in one pass over the data."""
    if num_samples < 1:
        raise ValueError(f"num_samples must be 1 or more, not {num_samples}.")
    eta, squares = problem.noise_features(num_samples, seed)
    scale = g_prior_scale(squares, problem.space) if g_prior else torch.ones_like(squares)
    row = torch.zeros(1, dtype=torch.long, device=eta.device)
    size, own = problem.linear_model.layout.size, problem.vectors.own
    drawn = [own(normal(seed, _XI_STREAM, k, row, size))[0].to(eta) for k in range(num_samples)]
    xi = torch.stack(drawn) * (scale > 0)
    return StochasticPrior(xi, eta, Prior(problem.layout, scale, layerwise, problem.space), seed)
