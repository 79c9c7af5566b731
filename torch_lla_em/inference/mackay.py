"""M-step: the prior precision and the noise from the effective dimension γ."""

from __future__ import annotations

import warnings
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

PRECISION_BOUNDS = 1e-20, 1e20

_LEAST_FREEDOM = 0.05


class Estimate(NamedTuple):
    """A Monte Carlo mean and its standard error over samples."""

    value: Tensor
    standard_error: Tensor

    @classmethod
    def of(cls, samples: Tensor) -> Estimate:
        """Return the mean over the first axis; the error is NaN for one sample."""
        if len(samples) < 2:
            return cls(samples.mean(0), torch.full_like(samples[0], float("nan")))
        return cls(samples.mean(0), samples.std(0) / sqrt(len(samples)))


def function_space_Mackay_update(
    effective_dim: Tensor,
    squared_norm: Tensor,
    precision: Tensor,
    bounds: tuple[float, float] = PRECISION_BOUNDS,
) -> Tensor:
    """Return λ ← γ / ‖w_lin‖², () or (blocks,), the norm in scaled coordinates.

    Blocks that no datum determines (γ = 0) keep their precision.
    """
    return _bounded(effective_dim / squared_norm, precision, bounds)


def em_update(
    effective_dim: Tensor,
    squared_norm: Tensor,
    precision: Tensor,
    num_weights: Tensor,
) -> Tensor:
    """Return λ ← P / (‖w_lin‖² + Tr Σ), which never lowers the evidence; slower than MacKay's."""
    trace = (num_weights - effective_dim) / precision
    return _bounded(num_weights / (squared_norm + trace), precision, PRECISION_BOUNDS)


def resolved(residual: Tensor, targets: Tensor, eps: float) -> Tensor:
    """Return Σ(y - J w_lin)², but ε Σ y² with a warning where it is less: no solver goes further."""
    if not (targets > 0).all():
        raise ValueError(
            "All targets are 0 (of every output that has a noise of its own), so there is no "
            "observation noise to learn. Check the targets, or leave this output out."
        )
    least = eps * targets
    if (residual < least).any():
        warnings.warn(
            "The linear model reproduces the targets so closely that their observation noise is "
            f"lost to rounding: sigma_noise is held at {sqrt(eps):.0e} of their root mean square. "
            "Check that the targets are not constant or free of noise; if their noise is that "
            "small, subtract their mean, or convert the model and its data to float64.",
            stacklevel=2,
        )
    return torch.maximum(residual, least)


def mackay_noise(residual: Tensor, effective_dim: Tensor, count: Tensor) -> Tensor:
    """Return σ ← √(Σ(y - J w_lin)² / (N - γ)), for residual sums and counts of equal shape."""
    left, least = count - effective_dim, _LEAST_FREEDOM * count
    if (left < least).any():
        warnings.warn(
            "The weights' effective dimension reaches the number of targets, so that the data "
            "cannot tell noise from signal: sigma_noise is held as if a twentieth of the "
            "targets were free. Use more data, or fewer random weights with `parameters`.",
            stacklevel=2,
        )
    return (residual / torch.maximum(left, least)).sqrt()


def em_noise(residual: Tensor, effective_dim: Tensor, count: Tensor, sigma: Tensor) -> Tensor:
    """Return σ ← √((Σ(y - J w_lin)² + Tr Σ JᵀJ) / N), where Tr Σ JᵀJ = γ σ²."""
    return ((residual + effective_dim * sigma**2) / count).sqrt()


def _bounded(proposed: Tensor, current: Tensor, bounds: tuple[float, float]) -> Tensor:
    proposed = torch.where(proposed > 0, proposed, current)
    kept = proposed.clamp(*bounds)
    if not torch.equal(kept, proposed):
        warnings.warn(
            f"The prior precision left its bounds [{bounds[0]:g}, {bounds[1]:g}] and was held "
            "there: the evidence prefers a model without these weights, or without a prior. "
            "Check that the network is trained and the targets are the ones it was trained on.",
            stacklevel=3,
        )
    return kept
