"""The posterior scale τ: one number, by the likelihood of held-out data."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import exp, log

logger = logging.getLogger("torch_lla_em")

_LOWEST, _HIGHEST, _POINTS = 1e-4, 1e2, 31
_GOLDEN = 0.5 * (5**0.5 - 1)


def best_scale(log_prob: Callable[[float], float]) -> float:
    """Return τ that maximises ``log_prob``: the best of a grid over six decades, then refined."""
    step = log(_HIGHEST / _LOWEST) / (_POINTS - 1)
    grid = [log(_LOWEST) + step * i for i in range(_POINTS)]
    best = max(range(_POINTS), key=lambda i: log_prob(exp(grid[i])))
    if best in (0, _POINTS - 1):
        logger.warning(
            "The posterior scale lies at the edge of [%g, %g]: the held-out data %s. Check that "
            "they come from the same source as the training data, and were not trained on.",
            _LOWEST,
            _HIGHEST,
            "ask for no uncertainty" if best == 0 else "ask for more than the prior holds",
        )
        return exp(grid[best])
    low, high = grid[best - 1], grid[best + 1]
    for _ in range(20):
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        if log_prob(exp(left)) > log_prob(exp(right)):
            high = right
        else:
            low = left
    return exp(0.5 * (low + high))
