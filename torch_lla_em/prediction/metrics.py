"""Scores of predictions and their targets."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_lla_em.prediction.prediction import Prediction


def covered(prediction: Prediction, y: Tensor, level: float = 0.9) -> Tensor:
    """Return which targets lie in their prediction intervals, in the shape of the targets."""
    lower, upper = prediction.credible_interval(level)
    return (y >= lower) & (y <= upper)


def scores(prediction: Prediction, y: Tensor, log_prob: Tensor | None = None) -> dict[str, float]:
    """Return the scores that apply, by name, of a prediction and its targets, both with the classes last.

    They are the NLL, by ``log_prob`` (B,) if given; for probabilities accuracy, ECE and AUROC; otherwise RMSE, MAE, R²
    (the mean over outputs) and the coverage of 90 % intervals.
    """
    likelihood = prediction.likelihood
    log_prob = prediction.log_prob(y) if log_prob is None else log_prob
    values = {"NLL": -log_prob.double()[likelihood.labelled(y)].mean()}
    if likelihood.gives_probabilities:
        stated, right = stated_and_right(prediction, y)
        values["accuracy"] = right.double().mean()
        values["ECE"] = calibration_error(stated.double(), right)
        if likelihood.elementwise:
            p, label = prediction.probs.flatten(), y.flatten() > 0.5
            values["AUROC"] = auroc(p[label], p[~label])
    elif prediction.expectation.shape == y.shape:
        shape = (-1, 1) if y.dim() == 1 else (-1, y.shape[-1])
        targets, mean = (v.double().reshape(shape) for v in (y, prediction.expectation))
        squares, spread = (targets - mean).square(), (targets - targets.mean(0)).square()
        values["RMSE"], values["MAE"] = squares.mean().sqrt(), squares.sqrt().mean()
        values["R²"] = (1 - squares.sum(0) / spread.sum(0)).mean()
        if likelihood.real_valued:
            values["90 % coverage"] = covered(prediction, y).double().mean()
    return {name: value.item() for name, value in values.items()}


def stated_and_right(prediction: Prediction, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the confidence in each predicted label, and whether it is right, (labels,)."""
    p = prediction.probs
    if prediction.likelihood.elementwise:
        return torch.maximum(p, 1 - p).flatten(), ((p > 0.5) == (y > 0.5)).flatten()
    best, mask = p.max(prediction.class_dim), prediction.likelihood.mask(y)
    kept = torch.ones_like(y, dtype=torch.bool) if mask is None else mask
    return best.values[kept], (best.indices == y)[kept]


def calibration_error(stated: Tensor, right: Tensor, bins: int = 15) -> Tensor:
    """Return the expected calibration error (ECE) of stated probabilities, shape ()."""
    _, confidence, correct = binned(stated, right, bins)
    return (correct - confidence).abs().sum() / len(stated)


def auroc(positive: Tensor, negative: Tensor) -> Tensor:
    """Return the probability that a positive score exceeds a negative one, ties counted half, ()."""
    ordered = negative.sort().values
    places = torch.stack([torch.searchsorted(ordered, positive, right=r) for r in (False, True)])
    return places.double().mean() / len(ordered)


def binned(stated: Tensor, right: Tensor, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the count of each bin, the sum of stated probabilities, and the number right."""
    place = (bins * stated).long().clamp_max(bins - 1)
    zeros = stated.new_zeros(bins)  # torch.bincount is not deterministic on a GPU
    each = torch.ones_like(stated), stated, right
    count, confidence, correct = (zeros.index_add(0, place, v.to(stated)) for v in each)
    return count, confidence, correct
