"""How well predictions match their targets, and warnings about fits that have collapsed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import Batch, Data
from torch_lla_em.inference import PRECISION_BOUNDS, Estimate
from torch_lla_em.likelihoods import Regression
from torch_lla_em.prediction.prediction import Prediction

LEVEL = 0.9
"""Level of the prediction intervals whose coverage is measured."""

BINS = 15
"""Number of bins of the expected calibration error, all of the same width."""

# number of training examples that are checked, and of values that their samples may take
_EXAMPLES, _NUMBERS = 256, 2**22
# accuracy minus mean confidence on training data above which predictions are too uncertain
_GAP = 0.2
# smallest acceptable ratio of squared residuals of training data to their predictive variance
_SHARE = 0.1

# γ per target above which training residuals say little of the noise. It was chosen on seven regressions
# with 200 and 800 examples: above it 90 % intervals covered 72 to 88 %, below it at least 80 %
_DETERMINED = 0.3
# smallest acceptable ratio of the network's squared residuals to those that σ and γ imply
_RESIDUALS = 0.8

_REMEDY = (
    "Call la.calibrate(validation_loader), or fit(..., validation=loader), or use the default "
    "curvature."
)


class Outcomes(NamedTuple):
    """Predictions compared with their targets; a field is None where it does not apply."""

    log_prob: Tensor
    """log p(y | x) of each example with a label, (B,)."""

    stated: Tensor | None = None
    """The probability of each predicted class or label, (labels,)."""

    right: Tensor | None = None
    """Whether the predicted class or label is the true one, (labels,)."""

    error: Tensor | None = None
    """y - E[y], (targets,)."""

    y: Tensor | None = None
    """The targets of ``error``, or the 0/1 labels of several to an example."""

    inside: Tensor | None = None
    """Whether each target lies in its 90 % prediction interval, (targets,)."""


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
    error, targets, inside = (y - mean).double().flatten(), y.double().flatten(), None
    if likelihood.real_valued:
        lower, upper = prediction.credible_interval(LEVEL)
        inside = ((y >= lower) & (y <= upper)).flatten()
    return Outcomes(log_prob, error=error, y=targets, inside=inside)


def concatenated(parts: Iterable[Outcomes]) -> Outcomes:
    """Concatenate the outcomes of several batches."""
    return Outcomes(*(None if each[0] is None else torch.cat(each) for each in zip(*parts)))


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


def stated_and_right(prediction: Prediction, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the confidence in each predicted label, and whether it is right, (labels,)."""
    p = prediction.probs
    if prediction.likelihood.elementwise:
        return torch.maximum(p, 1 - p).flatten(), ((p > 0.5) == (y > 0.5)).flatten()
    best, mask = p.max(prediction.class_dim), prediction.likelihood.mask(y)
    kept = torch.ones_like(y, dtype=torch.bool) if mask is None else mask
    return best.values[kept], (best.indices == y)[kept]


def calibration_error(stated: Tensor, right: Tensor, bins: int = BINS) -> Tensor:
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
    zeros = stated.new_zeros(bins)
    count, confidence, correct = (
        zeros.index_add(0, place, values.to(stated))
        for values in (torch.ones_like(stated), stated, right)
    )
    return count, confidence, correct


def few_examples(data: Data, num_samples: int) -> Batch | None:
    """Return some training examples, or None if one of them takes too much memory."""
    count = int(_NUMBERS * data.num_rows / (num_samples * max(data.num_outputs, 1)))
    count = min(_EXAMPLES, count)
    batch = next(data.first().split(count)) if count else None
    return batch if batch is not None and len(batch.rows) <= count else None


def check_weights(effective_dim: Estimate, num_samples: int) -> Iterator[str]:
    """Yield a warning if the effective dimension γ is below 4 / K, or not known to half of it."""
    gamma, error = effective_dim.value.sum().item(), effective_dim.standard_error.norm().item()
    if gamma < max(4 / num_samples, 2 * error):
        yield (
            f"The data determine next to none of the weights (γ = {gamma:.2g} ± {error:.1g}), so "
            "that the posterior is the prior. If the network fits its data, try g_prior=False, a "
            "smaller prior_precision to start from, or parameters of layers nearer to the outputs."
        )


def check_precision(precision: Tensor) -> Iterator[str]:
    """Yield a warning if the prior precision ended at one of its bounds."""
    low, high = PRECISION_BOUNDS
    if (precision <= 2 * low).any() or (precision >= high / 2).any():
        yield (
            f"The prior precision ended at a bound of [{low:g}, {high:g}], so that the posterior is "
            "that without a prior, or the prior alone. Check that the network was trained on these "
            "targets; else try g_prior=False, fewer parameters, or em_steps=0 with a "
            "prior_precision of your own."
        )


def check_evidence(
    evidence: Estimate, prediction: Prediction, y: Tensor, num_data: int
) -> Iterator[str]:
    """Yield a warning if the evidence is no better than that of guessing."""
    likelihood, classes = prediction.likelihood, prediction.centre.shape[-1]
    if not likelihood.gives_probabilities or not len(y):
        return
    each = log(2) if likelihood.elementwise else log(classes)
    guessing = -num_data * y[0].numel() * each
    if evidence.value.item() <= guessing:
        yield (
            f"The log evidence ({evidence.value:.4g}) is no better than that of guessing "
            f"({guessing:.4g}): the linear model has learnt nothing from these data. Check that "
            "targets belong to their inputs and that the network was trained, or try g_prior=False."
        )


def check_certainty(prediction: Prediction, y: Tensor) -> Iterator[str]:
    """Yield a warning if predictions of training data are far too uncertain."""
    if not len(y):
        return
    if prediction.likelihood.real_valued:
        mean, variance = prediction.moments()
        if y.shape != mean.shape:
            return
        share = ((y - mean).square() / variance).mean().item()
        if share < _SHARE:
            yield (
                f"The errors of predictions of training data are {share**0.5:.0%} of the predicted "
                f"standard deviations, so the posterior is far too wide. {_REMEDY}"
            )
    elif prediction.likelihood.gives_probabilities:
        stated, right = stated_and_right(prediction, y)
        if not right.numel():
            return
        accuracy, confidence = right.double().mean().item(), stated.double().mean().item()
        if accuracy - confidence > _GAP + 1 / right.numel() ** 0.5:
            yield (
                f"On training data the accuracy is {accuracy:.0%} and the mean confidence "
                f"{confidence:.0%}, so predictions are far less certain than they could be. {_REMEDY}"
            )


def check_residuals(
    gamma: float, num_data: int, prediction: Prediction, y: Tensor
) -> Iterator[str]:
    """Yield a warning if a regression network has overfitted, so that σ is too small.

    ``prediction`` is of training examples, around the network. If γ of the N C targets are needed to
    determine the weights, their residuals have the variance σ² (1 - γ / N C); what is learnt of σ takes
    this into account, but not that the features were fitted to the same targets.
    """
    if not isinstance(prediction.likelihood, Regression) or y.shape != prediction.mean.shape:
        return
    if not len(y):
        return
    share = gamma / (num_data * y[0].numel())
    squares = ((y - prediction.mean).square() / prediction.aleatoric).double()
    left = squares.mean().item() / max(1 - share, 1e-9)
    overfitted = left * (1 + 2 * (2 / y.numel()) ** 0.5) < _RESIDUALS
    if share > _DETERMINED or overfitted:
        why = (
            f"γ is {share:.0%} of the number of targets"
            if share > _DETERMINED
            else f"the squared training residuals are {left:.0%} of what σ implies"
        )
        yield (
            f"The network has overfitted ({why}), so σ is probably too small and intervals too narrow. "
            "Call la.calibrate(validation_loader) to learn σ from other examples, and use "
            "la.predict(x).interval(level) for intervals with guaranteed coverage."
        )
