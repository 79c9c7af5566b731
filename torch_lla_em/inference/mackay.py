"""The updates of the prior precision λ and the observation noise σ, from the effective dimension γ."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_lla_em.problem import Problem
from torch_lla_em.runtime import PRECISION_BOUNDS

LEAST_FREEDOM = 0.05
"""Smallest N - γ in the update of σ, relative to the number N of targets."""


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


def mackay_noise(residual: Tensor, effective_dim: Tensor, count: Tensor) -> Tensor:
    """Return σ ← √(Σ(y - J w_lin)² / (N - γ)), for residual sums and counts of equal shape."""
    return (residual / torch.maximum(count - effective_dim, LEAST_FREEDOM * count)).sqrt()


def count_and_rounding(problem: Problem, sigma: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of targets and the rounding error of Σ(y - J w)², the shape of σ, from Σ y²."""
    eps, number = torch.finfo(problem.dtype).eps, problem.data.facts.num_targets
    count = torch.full_like(sigma, number / sigma.numel())
    if problem.moments is not None:
        means = problem.moments[0].square().to(sigma)
        targets = targets + eps * count * (means if sigma.dim() else means.mean())
    return count, eps * targets
