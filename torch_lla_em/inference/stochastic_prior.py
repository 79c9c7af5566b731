"""The random probes, which are drawn once and define the samples for every λ."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.inference.prior import Prior, g_prior_scale
from torch_lla_em.problem import Problem, output_noise
from torch_lla_em.runtime import normal

_XI_STREAM = 0


class StochasticPrior(NamedTuple):
    """Random probes ξ ~ N(0, I) and η ~ N(0, G), which do not depend on λ, and their prior."""

    xi: Tensor
    """(K, P)."""

    eta: Tensor
    """Σ_n J_nᵀ S_n ε_nk, shape (K, P)."""

    prior: Prior
    """The prior's shape."""

    seed: int = 0

    def at(self, precision: Tensor) -> Tensor:
        """Return w0 = Λ^{-1/2} ξ + Λ⁻¹ η, shape (K, P): the regularisation target of each sample."""
        deviation = self.prior.deviation(precision)
        return deviation * (self.xi + deviation * self.eta)

    def right_hand_side(self, precision: Tensor) -> Tensor:
        """Return ξ + Λ^{-1/2} η, shape (K, P): Λ w0 in whitened coordinates."""
        return self.xi + self.prior.deviation(precision) * self.eta

    def epsilon(self, like: Tensor) -> Tensor:
        """Return ε of all examples, (K, N, ..., C), for outputs (N, ..., C)."""
        samples, rows = (torch.arange(n, device="cpu") for n in (len(self.xi), len(like)))
        return output_noise(self.seed, samples, rows, like)

    def drawn_again(self, problem: Problem) -> StochasticPrior:
        """Return the same random probes with η for another curvature, by one pass."""
        return self._replace(
            eta=problem.noise_features(len(self.xi), self.seed, with_squares=False).eta
        )


def get_sto_samples(
    problem: Problem,
    num_samples: int,
    seed: int = 0,
    g_prior: bool | str = True,
    layerwise: bool = False,
) -> StochasticPrior:
    """Draw the random probes ξ and η in one pass over the data.

    Args:
        problem (Problem): The network, the likelihood and the data.
        num_samples (int): Number of samples K.
        seed (int): Seed of the random numbers. Default 0.
        g_prior (bool or str): Scaling of the prior, as in ``LinearisedLaplace``, except None. Default True.
        layerwise (bool): Whether every parameter tensor has a precision of its own. Default False.

    Returns:
        A ``StochasticPrior`` with the probes ``xi`` and ``eta``, both (K, P), and the ``prior``.

    Raises:
        ValueError: If ``num_samples`` is less than 1.

    Example:
        >>> from torch_lla_em.data import Data
        >>> from torch_lla_em.jacobian import LinearModel, Network, ParameterLayout
        >>> from torch_lla_em.problem import Problem, output_noise
        >>> net = torch.nn.Linear(2, 3)
        >>> linear = LinearModel(Network(net), ParameterLayout.of(net, ["weight", "bias"]))
        >>> data = Data([(torch.randn(20, 2), torch.arange(20) % 3)], torch.device("cpu"))
        >>> problem = Problem(linear, Classification(), data)
        >>> get_sto_samples(problem, num_samples=4).eta.shape
        torch.Size([4, 9])
    """
    if num_samples < 1:
        raise ValueError(f"num_samples must be 1 or more, not {num_samples}.")
    eta, squares = problem.noise_features(num_samples, seed, with_squares=bool(g_prior))
    scale = torch.ones_like(squares)
    if g_prior:
        scale = g_prior_scale(squares, Prior(problem.layout, scale, False), g_prior)
    return with_noise(problem, eta, scale, seed, layerwise)


def with_noise(
    problem: Problem, eta: Tensor, scale: Tensor, seed: int, layerwise: bool
) -> StochasticPrior:
    """Return the stochastic prior for known η and scale, with ξ drawn from the seed."""
    row = torch.zeros(1, dtype=torch.long, device=eta.device)
    drawn = [normal(seed, _XI_STREAM, k, row, problem.size)[0].to(eta) for k in range(len(eta))]
    xi = torch.stack(drawn) * (scale > 0)
    return StochasticPrior(xi, eta, Prior(problem.layout, scale, layerwise), seed)
