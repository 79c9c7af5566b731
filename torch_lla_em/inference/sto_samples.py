"""The first stage: the stochastic prior, which consists of the random probes that determine the
samples."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_lla_em.inference.prior import Prior, StochasticPrior, g_prior_scale
from torch_lla_em.problem import Problem
from torch_lla_em.runtime import normals, require


def get_sto_samples(
    problem: Problem,
    num_samples: int,
    seed: int = 0,
    g_prior: bool | None = None,
    layerwise: bool = False,
) -> StochasticPrior:
    """Draw the random probes ξ and η in one pass over the data.

    Args:
        problem (Problem): The network, the likelihood and the data.
        num_samples (int): Number of samples K.
        seed (int): Seed of the random numbers. Default 0.
        g_prior (bool, optional): Scale of the prior: 1/s if True, 1 if False. Default None: ‖w‖
            m/s.
        layerwise (bool): Whether every parameter tensor has its own precision. Default False.

    Returns:
        A ``StochasticPrior`` with the probes ``xi`` and ``eta``, both (K, P), the ``prior``, and
        facts about continuous ``targets``. For a regression, pass
        ``problem.with_targets(probes.targets)`` to the other stages.

    Raises:
        ValueError: If ``num_samples`` is less than 1, or ``g_prior`` is not None, True or False.

    Example:
        >>> probes = get_sto_samples(problem, num_samples=4)
    """
    if num_samples < 1:
        raise ValueError(f"num_samples must be 1 or more, not {num_samples}.")
    require(g_prior is None or isinstance(g_prior, bool), "g_prior", g_prior, "None, True or False")
    features = problem.probe_features(num_samples, seed, with_squares=g_prior is not False)
    squares, noise = features.squares, features.targets.network_noise
    if g_prior is not False and noise is not None and noise.dim():
        # the σ from which EM starts may be in other units than the outputs
        in_units = problem.with_targets(features.targets._replace(sigma=noise))
        squares = in_units.probe_features(num_samples, seed).squares
    scale = torch.ones_like(squares)
    if g_prior is not False:
        scale = g_prior_scale(squares, problem.layout, problem.w_MAP, g_prior)
    probes = stochastic_prior(problem, features.eta, scale, seed, layerwise)
    return probes._replace(targets=features.targets)


def stochastic_prior(
    problem: Problem, eta: Tensor, scale: Tensor, seed: int, layerwise: bool
) -> StochasticPrior:
    """Return the stochastic prior with the given η and scale, and ξ drawn from the seed."""
    row = torch.zeros(1, dtype=torch.long, device=eta.device)
    drawn = [normals(seed, 0, [k], row, problem.size)[0, 0].to(eta) for k in range(len(eta))]
    xi = torch.stack(drawn) * (scale > 0)
    return StochasticPrior(xi, eta, Prior(problem.layout, scale, layerwise), seed)
