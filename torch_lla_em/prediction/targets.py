"""Continuous targets y under a prediction, draws of them and intervals; methods of
``Prediction``."""

from __future__ import annotations

from collections.abc import Sequence
from math import pi
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood, average, mean_square, require_labels
from torch_lla_em.prediction.arrays import Interval, require_share
from torch_lla_em.prediction.functions import functions_at, log_mean_exp, over_rows, weights_of
from torch_lla_em.runtime import check_whole, without_autocast


def credible_interval(prediction: Any, level: float = 0.95) -> Interval:
    """Return the interval of continuous targets between equal tails.

    Args:
        prediction: The prediction, which has this as a method.
        level (float): Probability under the posterior, between 0 and 1. Default 0.95. For a
            guaranteed coverage use ``interval``, after ``calibrate``.

    Returns:
        An ``Interval`` of ``lower`` and ``upper``, each of shape (B, ..., C).

    Example:
        >>> lower, upper = regression.predict(x).credible_interval(0.9)
    """
    half = 0.5 * require_share(level)
    return Interval(*prediction.quantile([0.5 - half, 0.5 + half]))


def sample(prediction: Any, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
    """Draw targets y, (n, B, ...), joint over inputs given f; for each draw as in the training
    data.

    Args:
        prediction: The prediction, which has this as a method.
        n (int): Number of draws. Default 1.
        generator (torch.Generator, optional): Source of randomness. Default None: torch's own.

    Example:
        >>> y = regression.predict(x).sample(100)
    """
    check_whole(1, n=n)
    device = prediction._f.device if generator is None else generator.device
    weights = weights_of(prediction._components).detach().to(device)
    chosen = torch.multinomial(weights, n, True, generator=generator).to(prediction._f.device)
    rows, draws = [], []
    for i, part in enumerate(prediction._components):
        own = (chosen == i).nonzero()[:, 0]
        if len(own):
            deviations = part.deviations
            K = len(deviations)
            weights = torch.randn(len(own), K, generator=generator, device=device)
            weights = weights.to(deviations) / max(1, K) ** 0.5
            with without_autocast(deviations.device):
                f = part.centre + torch.tensordot(weights, deviations, 1)
            rows.append(own)
            draws.append(part.likelihood.sample(f, generator))
    found: Tensor = prediction._shaped(torch.cat(draws)[torch.cat(rows).argsort()], 1)
    return found


def cdf(prediction: Any, y: Tensor) -> Tensor:
    """Return P(Y <= y) of each continuous output on its own, (B, ..., C).

    Args:
        prediction: The prediction, which has this as a method.
        y (Tensor): Targets, as in the training data.
    """
    found: Tensor = prediction._shaped(_below(gaussians(prediction, "cdf"), prediction._aligned(y)))
    return found


def quantile(prediction: Any, q: float | Sequence[float] | Tensor) -> Tensor:
    """Return the value that each continuous output is below with probability q, (B, ..., C).

    It is differentiable in the inputs.

    Args:
        prediction: The prediction, which has this as a method.
        q (float, sequence or Tensor): A probability between 0 and 1; of several, the result has one
            more axis in front, (levels, B, ..., C).

    Example:
        >>> median = regression.predict(x).quantile(0.5)
        >>> lower, upper = regression.predict(x).quantile([0.05, 0.95])
    """
    mixture = gaussians(prediction, "quantile")
    levels = torch.as_tensor(q, dtype=torch.float64, device="cpu")
    if levels.dim() > 1 or not levels.numel():
        raise ValueError(f"q must be one probability or a list of them, not {q}.")
    each: list[Tensor] = [
        prediction._shaped(_quantile(mixture, require_share(level, "q")))
        for level in levels.flatten().tolist()
    ]
    found: Tensor = torch.stack(each) if levels.dim() else each[0]
    return found


def _quantile(mixture: tuple[Tensor, Tensor, Tensor], q: float) -> Tensor:
    """Return a quantile of a mixture of Gaussians by bisection."""
    weights, means, deviations = mixture
    each = means + NormalDist().inv_cdf(q) * deviations
    if len(each) == 1:
        return each[0]
    lower, upper = each.detach().amin(0), each.detach().amax(0)
    with torch.no_grad():
        for _ in range(64):  # after which the ends are equal in double precision
            middle = 0.5 * (lower + upper)
            is_below = _below(mixture, middle) < q
            lower, upper = middle.where(is_below, lower), upper.where(is_below, middle)
        value = 0.5 * (lower + upper)
    if not each.requires_grad:
        return value
    # F(value) = q stays true, so the derivative of the value is that of -F, divided by the density
    below, z = _below(mixture, value), (value - means.detach()) / deviations.detach()
    density = average((-0.5 * z.square()).exp() / deviations.detach(), weights.detach())
    density = (density / (2 * pi) ** 0.5).clamp_min(torch.finfo(density.dtype).tiny)
    turned: Tensor = value - (below - below.detach()) / density
    return turned


def crps(prediction: Any, y: Tensor) -> Tensor:
    """Return the continuous ranked probability score of each output, (B, ..., C); lower is better.

    It is E|Y - y| - E|Y - Y'| / 2 in closed form (Grimit et al., 2006).

    Args:
        prediction: The prediction, which has this as a method.
        y (Tensor): Targets, as in the training data.

    Example:
        >>> score = regression.predict(x).crps(regression.predict(x).mean).mean()
    """
    weights, means, deviations = gaussians(prediction, "crps")
    score = average(_mean_size(prediction._aligned(y) - means, deviations), weights)
    for weight, mean, deviation in zip(weights, means, deviations, strict=True):
        apart = _mean_size(mean - means, (deviation**2 + deviations**2).sqrt())
        score = score - 0.5 * weight * average(apart, weights)
    found: Tensor = prediction._shaped(score)
    return found


def label_log_prob(prediction: Any, y: Tensor) -> Tensor:
    """Return log p(y | x) of each label by itself, (B, labels): of a site, or of an output that has
    a target of its own.

    Where outputs are independent given x it is that of all of them together, (B, 1).

    Args:
        prediction: The prediction.
        y (Tensor): Targets with the outputs last.
    """
    likelihood: Likelihood = prediction.likelihood
    is_gaussian = likelihood.observation_noise is not None
    if y[:1].numel() <= 1 or (is_gaussian and len(prediction._components) == 1):
        found: Tensor = prediction._log_density(y)[:, None]
        return found
    if is_gaussian:
        weights, means, deviations = gaussians(prediction, "log_prob")
        each = torch.distributions.Normal(means, deviations, validate_args=False).log_prob(y)
        return log_mean_exp(each, weights).flatten(1)

    def take(f: Tensor, weights: Tensor | None, rows: slice) -> Tensor:
        require_labels(likelihood, f[:1].detach(), y[rows])
        return log_mean_exp(likelihood.label_log_prob(f, y[rows]), weights)

    return over_rows(prediction._components, take)


def count_labels(likelihood: Likelihood, y: Tensor) -> int:
    """Return the number of labels that count."""
    mask = likelihood.mask(y)
    return y.numel() if mask is None else int((mask != 0).sum())


def gaussians(prediction: Any, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights (P,), means and standard deviations (P, B, ..., C) of Gaussians whose
    mixture the targets are."""
    likelihood, mean = prediction.likelihood, prediction.likelihood.mean
    require_kind(likelihood.real_valued, prediction, name, "its targets are not continuous")
    if likelihood.observation_noise is not None:
        parts = prediction._components
        variances = [
            mean_square(mean(part.deviations)) + part.likelihood.variance(part.centre)
            for part in parts
        ]
        means = torch.stack([mean(part.centre) for part in parts])
        return weights_of(parts), means, torch.stack(variances).sqrt()
    with without_autocast(prediction._f.device):
        f, weights = functions_at(prediction._components)
    weights = f.new_full((len(f),), 1 / len(f)) if weights is None else weights
    return weights, mean(f), likelihood.variance(f).sqrt()


def _below(mixture: tuple[Tensor, Tensor, Tensor], y: Tensor) -> Tensor:
    """Return P(Y <= y) of a mixture of Gaussians."""
    weights, means, deviations = mixture
    return average(torch.special.ndtr((y - means) / deviations), weights)


def _mean_size(mean: Tensor, deviation: Tensor) -> Tensor:
    """Return E|z| of Gaussian numbers."""
    z = mean / deviation
    density = (-0.5 * z.square()).exp() / (2 * pi) ** 0.5
    found: Tensor = mean * (2 * torch.special.ndtr(z) - 1) + 2 * deviation * density
    return found


def require_kind(holds: bool, prediction: Any, name: str, what: str) -> None:
    """Raise an error if a prediction has no method ``name``, because of ``what`` its likelihood
    is."""
    if not holds:
        raise TypeError(
            f"A prediction under {type(prediction.likelihood).__name__} has no .{name}: {what}. "
            "Use .expectation, .samples or log_prob(y)."
        )
