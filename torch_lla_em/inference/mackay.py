"""The fourth stage: MacKay's updates of the prior precision λ and of the observation noise σ."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from torch_lla_em.problem import Problem
from torch_lla_em.runtime import PRECISION_BOUNDS

STEEP = 0.9
"""Largest slope of MacKay's update in log λ that a secant uses; larger slopes are reduced to it.
With .95, the λ of single networks changes by 10 %."""


def function_space_Mackay_update(
    effective_dim: Tensor, squared_norm: Tensor, precision: Tensor
) -> Tensor:
    """Return MacKay's update of the prior precision, λ ← γ / ‖w_lin‖², within 1e-20 and 1e20.

    Args:
        effective_dim (Tensor): γ, shape () or (blocks,): the mean of ``effective_dims`` of
            ``optimise_samples`` over samples.
        squared_norm (Tensor): ‖w_lin‖² in scaled coordinates, shape () or (blocks,):
            ``prior.squared_norm(mode.w)`` of the mode that ``optimise_MAP`` returns.
        precision (Tensor): The current λ. Blocks that the data do not determine (γ = 0) keep it.

    Returns:
        The new λ, shape () or (blocks,).

    Example:
        >>> gamma, squared_norm = torch.tensor(8.0), torch.tensor(4.0)
        >>> float(function_space_Mackay_update(gamma, squared_norm, torch.tensor(1.0)))
        2.0
    """
    proposed = effective_dim / squared_norm
    return torch.where(proposed > 0, proposed, precision).clamp(*PRECISION_BOUNDS)


def mackay_noise(
    problem: Problem,
    sigma: Tensor,
    gamma: Tensor,
    outputs: Iterable[tuple[Tensor, Tensor, Iterable[Tensor]]],
) -> tuple[Tensor, Tensor]:
    """Return σ ← √(Σ(y - J w_lin)² / (N - γ)), () or (C,), and whether it may be lost to rounding.

    γ is given for every sample, (K,) or (K, blocks), at the present σ. ``outputs`` yields y and E[y
    | J w_lin] for parts of the examples, and, if there is a σ per output, every J w_k, from which γ
    of each output is estimated.
    """
    K = len(gamma)
    sums = gamma.new_zeros(2 + K * sigma.dim(), sigma.numel(), dtype=torch.float64)
    for y, mean, pushed in outputs:
        terms = y.to(mean) - mean, y, *pushed
        squares = [part.double().square().reshape(-1, sigma.numel()).sum(0) for part in terms]
        sums += torch.stack(squares).to(sums)
    residual, targets, *of_samples = problem.data.group.sum(sums).to(sigma.device)
    if sigma.dim():
        dims = torch.stack(of_samples).mean(0) / sigma**2
    else:
        residual, targets, dims = residual[0], targets[0], gamma.mean(0).sum().to(sigma)
    eps, number = torch.finfo(problem.dtype).eps, problem.data.facts.num_targets
    count = torch.full_like(sigma, number / sigma.numel())
    if problem.moments is not None:
        means = problem.moments[0].square().to(sigma)
        targets = targets + eps * count * (means if sigma.dim() else means.mean())
    left = torch.maximum(count - dims, 0.1 * count)  # γ may come close to N
    learnt = (torch.maximum(residual, eps * targets) / left).sqrt()
    return torch.where(learnt > 0, learnt, sigma), residual < 10 * eps * targets  # all may be 0


def accelerated(
    here: float, there: float, last: tuple[float, float] | None, most: float = math.log(2)
) -> float:
    """Return the change of log λ to the fixed point of MacKay's update by a secant, at most
    ``most``.

    The update maps log λ = ``here`` to ``there``, and in an earlier step it mapped ``last[0]`` to
    ``last[1]``. Without an earlier step, or if the slope through both is below -1, the change of
    the update itself is returned.
    """
    slope = 0.0
    if last is not None and here != last[0]:
        slope = (there - last[1]) / (here - last[0])
    way = (there - here) / (1 - min(slope if slope > -1 else 0.0, STEEP))
    return max(-most, min(most, way))
