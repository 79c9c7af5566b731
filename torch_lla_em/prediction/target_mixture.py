"""Mixtures of Gaussians, which continuous targets have."""

from __future__ import annotations

from math import log, pi
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.likelihoods import average


class TargetMixture(NamedTuple):
    """A mixture of P Gaussians for every output."""

    weights: Tensor
    """(P,)."""

    means: Tensor
    """(P, B, ..., C)."""

    deviations: Tensor
    """The standard deviations, (P, B, ..., C)."""

    def cdf(self, y: Tensor) -> Tensor:
        """Return P(Y <= y)."""
        return average(torch.special.ndtr((y - self.means) / self.deviations), self.weights)

    def quantile(self, q: float) -> Tensor:
        """Return the value that Y is below with probability q, by bisection."""
        weights, means, deviations = self
        each = means + NormalDist().inv_cdf(q) * deviations
        if len(each) == 1:
            return each[0]
        lower, upper = each.detach().amin(0), each.detach().amax(0)
        with torch.no_grad():
            for _ in range(64):  # after which the ends are equal in double precision
                middle = 0.5 * (lower + upper)
                is_below = self.cdf(middle) < q
                lower, upper = middle.where(is_below, lower), upper.where(is_below, middle)
            value = 0.5 * (lower + upper)
        if not each.requires_grad:
            return value
        # F(value) = q stays true, so the derivative of the value is that of -F, divided by the
        # density
        below, z = self.cdf(value), (value - means.detach()) / deviations.detach()
        density = average((-0.5 * z.square()).exp() / deviations.detach(), weights.detach())
        density = (density / (2 * pi) ** 0.5).clamp_min(torch.finfo(density.dtype).tiny)
        turned: Tensor = value - (below - below.detach()) / density
        return turned

    def crps(self, y: Tensor) -> Tensor:
        """Return E|Y - y| - E|Y - Y'| / 2 in closed form (Grimit et al., 2006)."""
        weights, means, deviations = self
        score = average(_mean_size(y - means, deviations), weights)
        for weight, mean, deviation in zip(weights, means, deviations, strict=True):
            apart = _mean_size(mean - means, (deviation**2 + deviations**2).sqrt())
            score = score - 0.5 * weight * average(apart, weights)
        return score

    def log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y) of each output by itself."""
        normal = torch.distributions.Normal(self.means, self.deviations, validate_args=False)
        return log_mean_exp(normal.log_prob(y), self.weights)


def _mean_size(mean: Tensor, deviation: Tensor) -> Tensor:
    """Return E|z| of Gaussian numbers."""
    z = mean / deviation
    density = (-0.5 * z.square()).exp() / (2 * pi) ** 0.5
    found: Tensor = mean * (2 * torch.special.ndtr(z) - 1) + 2 * deviation * density
    return found


def log_mean_exp(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the logarithm of the mean of exp(values) over the first axis."""
    if weights is None:
        return values.logsumexp(0) - log(len(values))
    return (values.movedim(0, -1) + weights.log().to(values)).logsumexp(-1)
