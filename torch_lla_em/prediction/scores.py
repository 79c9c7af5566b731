"""How well predictions match their targets: NLL, accuracy, calibration error, RMSE, coverage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.prediction.collapse import stated_and_right
from torch_lla_em.prediction.prediction import Prediction

LEVEL = 0.9
"""Level of the prediction intervals whose coverage is measured."""

BINS = 15
"""Bins of the expected calibration error, all of the same width."""


class Outcomes(NamedTuple):
    """What each prediction said and what came true; an entry is None where it does not apply."""

    log_prob: Tensor
    """log p(y | x) of each example with a label, (B,)."""

    stated: Tensor | None = None
    """Probability given to the predicted class or label, one entry for each label."""

    right: Tensor | None = None
    """Whether the predicted class or label is the true one."""

    error: Tensor | None = None
    """y - E[y], one entry for each target."""

    y: Tensor | None = None
    """The targets of ``error``, or the 0/1 labels of several to an example."""

    inside: Tensor | None = None
    """Whether each target lies in its 90 % prediction interval."""


def outcomes(prediction: Prediction, y: Tensor) -> Outcomes:
    """Compare a prediction with its targets, (B, ...)."""
    likelihood = prediction.likelihood
    log_prob = prediction.log_prob(y).double()[likelihood.labelled(y)]
    if likelihood.gives_probabilities:
        stated, right = stated_and_right(prediction, y)
        labels = y.double().flatten() if likelihood.elementwise else None
        return Outcomes(log_prob, stated.double(), right, y=labels)
    mean = prediction.expectation
    if mean.shape != y.shape:
        return Outcomes(log_prob)
    error = (y - mean).double().flatten()
    if not likelihood.real_valued:
        return Outcomes(log_prob, error=error, y=y.double().flatten())
    lower, upper = prediction.credible_interval(LEVEL)
    inside = ((y >= lower) & (y <= upper)).flatten()
    return Outcomes(log_prob, error=error, y=y.double().flatten(), inside=inside)


def joined(parts: Iterable[Outcomes]) -> Outcomes:
    """Concatenate the outcomes of several batches."""
    fields = (None if each[0] is None else torch.cat(each) for each in zip(*parts))
    return Outcomes(*fields)


def scores(found: Outcomes) -> dict[str, float]:
    """Return NLL; accuracy, ECE and AUROC, or RMSE, MAE, R² and coverage; by name."""
    values = {"NLL": -found.log_prob.mean()}
    if found.stated is not None:
        values["accuracy"] = found.right.double().mean()
        values["ECE"] = calibration_error(found.stated, found.right)
        if found.y is not None:
            label = found.y > 0.5
            p = torch.where(found.right == label, found.stated, 1 - found.stated)
            values["AUROC"] = auroc(p[label], p[~label])
    if found.error is not None:
        squares = found.error.square()
        values["RMSE"] = squares.mean().sqrt()
        values["MAE"] = found.error.abs().mean()
        values["R²"] = 1 - squares.sum() / (found.y - found.y.mean()).square().sum()
    if found.inside is not None:
        values["90 % coverage"] = found.inside.double().mean()
    return {name: value.item() for name, value in values.items()}


def calibration_error(stated: Tensor, right: Tensor, bins: int = BINS) -> Tensor:
    """Return the expected calibration error (ECE) of stated probabilities, shape ()."""
    _, said, true = binned(stated, right, bins)
    return (true - said).abs().sum() / len(stated)


def auroc(positive: Tensor, negative: Tensor) -> Tensor:
    """Return how often a positive score is above a negative one, ties by half, shape ()."""
    ordered = negative.sort().values
    places = torch.stack([torch.searchsorted(ordered, positive, right=r) for r in (False, True)])
    return places.double().mean() / len(ordered)


def binned(stated: Tensor, right: Tensor, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the count, and the sums of stated probabilities and of hits, of each bin."""
    place = (bins * stated).long().clamp_max(bins - 1)
    zeros = stated.new_zeros(bins)
    count, said, true = (
        zeros.index_add(0, place, values.to(stated))
        for values in (torch.ones_like(stated), stated, right)
    )
    return count, said, true
