"""Sums over sites, and averages over functions."""

from __future__ import annotations

from torch import Tensor


def sum_rows(terms: Tensor, y: Tensor) -> Tensor:
    """Sum over sites and outputs: (..., B, *sites, C) becomes (..., B), for targets y (B, ...)."""
    within = y.dim() - 1
    return terms.flatten(terms.dim() - within).sum(-1) if within else terms


def average(values: Tensor, weights: Tensor | None) -> Tensor:
    """Return the mean of values (S, ...) over S functions, with weights (S,) if they are given."""
    if weights is None:
        return values.mean(0)
    weights = weights.to(values).view(-1, *(1,) * (values.dim() - 1))
    return (weights * values).sum(0)


def mean_square(deviations: Tensor) -> Tensor:
    """Return the variance of samples, 0 if there are none."""
    return deviations.square().sum(0) / max(1, len(deviations))
