"""What follows from probabilities, or from means and variances, as functions of arrays.

Predictions of posteriors and of students use the same functions. Outputs are last.
"""

from __future__ import annotations

from math import pi
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import as_targets
from torch_lla_em.likelihoods import Likelihood, average
from torch_lla_em.prediction.ranks import mass_above, rounding


class Interval(NamedTuple):
    """The ends of an interval, as tensors of the same shape."""

    lower: Tensor
    upper: Tensor


def require_share(value: float, name: str = "level") -> float:
    """Return a level or a rate; raise an error if it is not between 0 and 1."""
    if not 0 < value < 1:
        raise ValueError(f"{name} must lie between 0 and 1, not {value}.")
    return value


def has_classes(likelihood: Likelihood, f: Tensor) -> bool:
    """Return whether targets are one class label per example."""
    return likelihood.gives_probabilities and not likelihood.elementwise and f.dim() == 2


def has_values(likelihood: Likelihood, f: Tensor) -> bool:
    """Return whether targets are continuous and have no sites."""
    return likelihood.real_valued and f.dim() <= 2


def aligned(likelihood: Likelihood, y: Tensor, f: Tensor, class_dim: int) -> Tensor:
    """Return targets with the axis of the outputs last; raise an error if they do not fit."""
    y = likelihood.align(as_targets(y).to(f.device), class_dim)
    likelihood.check(f, y)
    return y


def gaussian_entropy(variance: Tensor) -> Tensor:
    """Return the entropy of a Gaussian in nats."""
    return 0.5 * (2 * pi * variance).log() + 0.5


def gaussian_interval(mean: Tensor, variance: Tensor, level: float) -> Interval:
    """Return the interval around the mean of a Gaussian that has this probability."""
    half = NormalDist().inv_cdf(0.5 + 0.5 * level) * variance.sqrt()
    return Interval(mean - half, mean + half)


def conformal_interval(
    mean: Tensor, variance: Tensor, size: Tensor, room: float | Tensor
) -> Interval:
    """Return intervals of a size in standard deviations.

    Targets at the ends, as in discrete data, are inside whichever way they are rounded.
    """
    size = size.flatten() if mean.dim() == 1 else size
    half = size.to(mean) * variance.sqrt() * (1 + room)
    half = half + 8 * torch.finfo(mean.dtype).eps * mean.abs()
    return Interval(mean - half, mean + half)


def conformal_set(probs: Tensor, threshold: Tensor, room: float | Tensor) -> Tensor:
    """Return the classes that are less probable than classes of at most this mass, (B, C)."""
    return mass_above(probs, room) <= threshold + room


def errors_of_classes(probs: Tensor, y: Tensor) -> Tensor:
    """Return the probability of all classes that are more probable than the label, (B, 1)."""
    return mass_above(probs, rounding(probs.dtype)).gather(1, y.long()[:, None])


def errors_of_values(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """Return residuals in predictive standard deviations, (B, outputs)."""
    return ((y - mean).abs() / variance.sqrt()).double().reshape(len(y), -1)


class GaussianTargets(NamedTuple):
    """A mixture of P Gaussians for each output."""

    weights: Tensor
    """(P,), with sum 1."""

    means: Tensor
    """(P, B, ..., C)."""

    deviations: Tensor
    """Their standard deviations, (P, B, ..., C)."""

    def cdf(self, y: Tensor) -> Tensor:
        """Return P(Y <= y), in the shape of y."""
        return average(torch.special.ndtr((y - self.means) / self.deviations), self.weights)

    def quantile(self, share: float) -> Tensor:
        """Return the y with P(Y <= y) = share, by bisection between quantiles of the components."""
        each = self.means + NormalDist().inv_cdf(share) * self.deviations
        lower, upper = each.amin(0), each.amax(0)
        halvings = 64 if len(each) > 1 else 0  # after which the ends are equal in double precision
        for _ in range(halvings):
            middle = 0.5 * (lower + upper)
            is_below = self.cdf(middle) < share
            lower, upper = middle.where(is_below, lower), upper.where(is_below, middle)
        return 0.5 * (lower + upper)

    def crps(self, y: Tensor) -> Tensor:
        """Return E|Y - y| - E|Y - Y'| / 2 in closed form (Grimit et al., 2006), in the shape of y."""
        found = average(_mean_size(y - self.means, self.deviations), self.weights)
        for weight, mean, deviation in zip(*self):
            apart = _mean_size(mean - self.means, (deviation**2 + self.deviations**2).sqrt())
            found = found - 0.5 * weight * average(apart, self.weights)
        return found


def _mean_size(mean: Tensor, deviation: Tensor) -> Tensor:
    """Return E|z| of Gaussian numbers."""
    z = mean / deviation
    density = (-0.5 * z.square()).exp() / (2 * pi) ** 0.5
    found: Tensor = mean * (2 * torch.special.ndtr(z) - 1) + 2 * deviation * density
    return found
