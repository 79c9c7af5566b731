"""Scores of predictions, given targets: NLL of single labels, accuracy, ECE, RMSE, coverage."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood, require_labels
from torch_lla_em.prediction.mixture import log_mean_exp
from torch_lla_em.prediction.prediction import Prediction


def label_log_prob(prediction: Prediction, y: Tensor) -> Tensor:
    """Return log p(y | x) of each single label, (B, labels). A label is that of a site, or of an
    output with its own target.

    If the outputs are independent given x, it is the sum over all of them, (B, 1).

    Args:
        prediction: The prediction.
        y (Tensor): Targets with the outputs last.
    """
    likelihood, mixture = prediction.likelihood, prediction._mixture
    is_gaussian = likelihood.observation_noise is not None
    if y[:1].numel() <= 1 or (is_gaussian and len(mixture.components) == 1):
        return mixture.log_density(y)[:, None]
    if is_gaussian:
        return mixture.gaussians().log_prob(y).flatten(1)

    def take(f: Tensor, weights: Tensor | None, rows: slice) -> Tensor:
        require_labels(likelihood, f[:1].detach(), y[rows])
        return log_mean_exp(likelihood.label_log_prob(f, y[rows]), weights)

    return mixture.over_rows(take)


def count_labels(likelihood: Likelihood, y: Tensor) -> int:
    """Return the number of labels that count."""
    mask = likelihood.mask(y)
    return y.numel() if mask is None else int((mask != 0).sum())


def covered(prediction: Prediction, y: Tensor, level: float = 0.9) -> Tensor:
    """Return which targets lie in their prediction intervals, in the shape of the targets."""
    lower, upper = prediction.credible_interval(level)
    return (y >= lower) & (y <= upper)


def scores(prediction: Prediction, y: Tensor) -> dict[str, float]:
    """Return the applicable scores of a prediction and its targets, both with the classes last, by
    name."""
    likelihood = prediction.likelihood
    values = {"NLL": -per_label(prediction, y).mean()}
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


def per_label(prediction: Prediction, y: Tensor) -> Tensor:
    """Return the log-probability of each labelled example divided by the mean number of labels,
    (N,).

    It is the sum over single labels, so that the mean over examples is the mean over labels
    (pixels, tokens or outputs).
    """
    likelihood = prediction.likelihood
    sums = label_log_prob(prediction, y).double().sum(1)[likelihood.labelled(y)]
    return sums * len(sums) / max(1, count_labels(likelihood, y))


def stated_and_right(prediction: Prediction, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the confidence of each predicted label, and whether the label is right, (labels,)."""
    p = prediction.probs
    if prediction.likelihood.elementwise:
        return torch.maximum(p, 1 - p).flatten(), ((p > 0.5) == (y > 0.5)).flatten()
    best, mask = p.max(prediction._class_dim), prediction.likelihood.mask(y)
    kept = torch.ones_like(y, dtype=torch.bool) if mask is None else mask
    return best.values[kept], (best.indices == y)[kept]


def calibration_error(stated: Tensor, right: Tensor, bins: int = 15) -> Tensor:
    """Return the expected calibration error (ECE) of stated probabilities, shape ()."""
    _, confidence, correct = binned(stated, right, bins)
    return (correct - confidence).abs().sum() / len(stated)


def auroc(positive: Tensor, negative: Tensor) -> Tensor:
    """Return the probability that a positive score exceeds a negative one, ties counted half,
    ()."""
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
