"""Scores of predictions, and warnings about fits that have failed."""

from __future__ import annotations

from collections.abc import Iterator
from math import log
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.prediction.prediction import Prediction
from torch_lla_em.prediction.summary import CALL
from torch_lla_em.runtime import PRECISION_BOUNDS

LEVEL = 0.9
"""Level of the prediction intervals whose coverage is measured."""

_DETERMINED, _RESIDUALS = 0.3, 0.8
"""γ per target above which training residuals do not determine the noise, and the smallest acceptable ratio of the
network's squared residuals to those that σ and γ imply. The first was chosen on seven regressions with 200 and 800
examples: above it 90 % intervals covered 72 to 88 %, below it at least 80 %."""

_SHARED = 0.01
"""Smallest acceptable ratio of an output's squared residuals to the σ² that all outputs share."""


def covered(prediction: Prediction, y: Tensor, level: float = LEVEL) -> Tensor:
    """Return which targets lie in their prediction intervals, in the shape of the targets."""
    lower, upper = prediction.credible_interval(level)
    return (y >= lower) & (y <= upper)


def scores(prediction: Prediction, y: Tensor, log_prob: Tensor | None = None) -> dict[str, float]:
    """Return the scores that apply, by name, of a prediction and its targets, both with the classes last.

    ``log_prob`` is log p(y), (B,); None: that of the prediction, which aligns y itself. The scores are the NLL; for
    probabilities accuracy, ECE and AUROC; otherwise RMSE, MAE, R² (the mean over outputs) and the coverage of 90 %
    intervals.
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


def warnings_of(posterior: Any, prediction: Prediction, y: Tensor) -> Iterator[str]:
    """Yield a warning for each sign that a fit has failed, given predictions of training examples, classes last.

    If γ of the N C targets are needed to determine the weights, residuals have the variance σ² (1 - γ / N C). What is
    learnt of σ takes this into account, but not that the features were fitted to the same targets.
    """
    result, likelihood = posterior.result, prediction.likelihood
    gamma, error = result.effective_dim
    gamma, error = gamma.sum().item(), error.norm().item()
    collapsed = gamma < max(4 / len(result.w_samples), 2 * error)
    # where all λ are at their bound the fit has warned
    if collapsed and (result.prior_precision < PRECISION_BOUNDS[1]).any():
        scaling = 'prior="isotropic", ' if (result.scale != 1).any() else ""
        yield (
            f"The data determine hardly any parameters (γ = {gamma:.2g} ± {error:.1g}): the posterior is close "
            f"to the prior. Try {scaling}a smaller prior_precision, or parameters of later layers."
        )
    if likelihood.gives_probabilities:
        network = prediction.origin.network()
        count = stated_and_right(network, y)[0].numel()
        classes = 2 if likelihood.elementwise else network.probs.shape[-1]
        nll = -network.mixture.log_prob(y).double().sum().item() / max(count, 1)
        if count and nll >= log(classes):
            yield (
                f"The network's NLL on training data, {nll:.3g}, is not below that of equal probabilities, "
                f"{log(classes):.3g}. The posterior is that of a trained network: train it before fit."
            )
    if likelihood.observation_noise is None or y.shape != prediction.mean.shape:
        return
    squares = ((y - prediction.mean).square() / prediction.aleatoric).double()
    share, left = gamma / (posterior.num_data * y[0].numel()), squares.mean().item()
    if result.network_noise is not None:  # predictions are around the linear model
        left = min(left, result.network_noise.square().mean().item())
    left /= max(1 - share, 1e-9)
    why = f"squared training residuals are {left:.0%} of what σ implies"
    is_low = left * (1 + 2 * (2 / squares.numel()) ** 0.5) < _RESIDUALS
    if share > _DETERMINED:
        is_low, why = True, f"γ is {share:.0%} of the number of targets"
    if is_low and not collapsed:  # otherwise σ is too large
        yield (
            f"The network has overfitted ({why}), so σ is probably too small. {CALL} to learn it from other "
            "examples, or use more data."
        )
    count = y.shape[-1] if y.dim() > 1 else 1
    share, output = squares.reshape(-1, count).mean(0).min(0)
    if not result.sigma_noise.dim() and count > 1 and share < _SHARED:
        yield (
            f"All outputs share sigma_noise, but residuals of output {output} are only {share.sqrt():.1%} of "
            f"it: its intervals are far too wide. Pass Regression(torch.ones({count})) to learn one for each."
        )
