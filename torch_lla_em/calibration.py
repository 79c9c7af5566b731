"""The posterior scale τ and, for classes, a factor of the mean: by the likelihood of held-out data."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import exp, log
from typing import NamedTuple

logger = logging.getLogger("torch_lla_em")

_SCALES = 1e-4, 1e2
_FACTORS = 0.1, 10.0
_DEVIATION = 0.5
"""Prior standard deviation of log τ and log c around 0."""

_GOLDEN = 0.5 * (5**0.5 - 1)
_ROUNDS = 4
_CUTS = 14

LogProb = Callable[[float, float], float]
"""(τ, c) -> Σ log p(y | x) of held-out data, with deviations √τ J w_k around c times the mean."""


class Calibration(NamedTuple):
    """What held-out data say."""

    scale: float
    """τ."""

    factor: float
    """c, one over the temperature of the mean; 1 where outputs are no scores of classes."""


def calibration(log_prob: LogProb, with_factor: bool) -> Calibration:
    """Return the most probable τ and c under log-normal priors of deviation ½ around 1.

    Few held-out rows hold few errors, and their likelihood alone then asks for no
    uncertainty at all; of many rows it overrules the prior. The average of softmaxes is
    flatter than the softmax of the average, which the factor makes up for.
    """

    def objective(scale: float, factor: float) -> float:
        penalty = 0.5 * (log(scale) ** 2 + log(factor) ** 2) / _DEVIATION**2
        return log_prob(scale, factor) - penalty

    scales, factors = _grid(*_SCALES, 19), _grid(*_FACTORS, 11) if with_factor else [1.0]
    best = max(((s, c) for s in scales for c in factors), key=lambda pair: objective(*pair))
    scale, factor = best
    for _ in range(_ROUNDS if with_factor else 1):
        scale = _refined(lambda s: objective(s, factor), scale, _step(scales))
        if with_factor:
            factor = _refined(lambda c: objective(scale, c), factor, _step(factors))
    if scale < 1.01 * _SCALES[0] or scale > 0.99 * _SCALES[1]:
        logger.warning(
            "The posterior scale lies at the edge of [%g, %g]: the held-out data %s. Check that "
            "they come from the same source as the training data, and were not trained on.",
            *_SCALES,
            "ask for no uncertainty" if scale < 1 else "ask for more than the prior holds",
        )
    return Calibration(scale, factor)


def best_scale(log_prob: Callable[[float], float]) -> float:
    """Return the most probable τ alone."""
    return calibration(lambda scale, _: log_prob(scale), with_factor=False).scale


def _grid(low: float, high: float, points: int) -> list[float]:
    step = log(high / low) / (points - 1)
    return [exp(log(low) + step * i) for i in range(points)]


def _step(grid: list[float]) -> float:
    return log(grid[1] / grid[0])


def _refined(function: Callable[[float], float], start: float, step: float) -> float:
    """Return the maximum of a function of log x within a step of the start."""
    low, high = log(start) - step, log(start) + step
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = function(exp(left)), function(exp(right))
    for _ in range(_CUTS):
        if at_left > at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = function(exp(left))
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = function(exp(right))
    return exp(0.5 * (low + high))
