"""Warnings about fits that have collapsed, each with what helps."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from math import log

import torch
from torch import Tensor

from torch_lla_em.data import Batch, Data
from torch_lla_em.inference import PRECISION_BOUNDS, Estimate
from torch_lla_em.prediction.fitted import Fitted
from torch_lla_em.prediction.prediction import Prediction

logger = logging.getLogger("torch_lla_em")

# training examples that predictions are checked on, and numbers that their samples may take
_EXAMPLES = 256
_NUMBERS = 2**22
# accuracy minus mean confidence on training data beyond which predictions are too uncertain
_GAP = 0.2
# share of the predictive variance that squared residuals of training data have at least
_SHARE = 0.1

_REMEDY = (
    "Call la.calibrate(validation_loader), or fit(..., validation=loader), or use the default "
    "curvature."
)


def warn_of_collapse(fitted: Fitted, data: Data) -> None:
    """Log a warning for each sign that a fit has collapsed, by predictions of training data too."""
    batch = few_rows(data, len(fitted.w_samples)) if data.group.rank == 0 else None
    if batch is None:
        return
    prediction, y = fitted._predicted(batch.inputs, fitted.mixture), batch.targets
    y = y if y.is_floating_point() else y.long()
    gamma = Estimate(fitted.effective_dim, fitted.effective_dim_error)
    # a λ that nothing depends on may be anywhere
    signs = [
        *(list(of_weights(gamma, len(fitted.w_samples))) or of_precision(fitted.prior_precision)),
        *of_evidence(Estimate(*fitted._log_evidence), prediction, y, fitted.num_data),
        *of_certainty(prediction, y),
    ]
    for sign in signs:
        logger.warning("%s", sign)


def few_rows(data: Data, num_samples: int) -> Batch | None:
    """Return some training examples, or None where the samples of one take too much memory."""
    count = int(_NUMBERS * data.num_rows / (num_samples * max(data.num_outputs, 1)))
    count = min(_EXAMPLES, count)
    batch = next(data.first().split(count)) if count else None
    return batch if batch is not None and len(batch.rows) <= count else None


def of_precision(precision: Tensor) -> Iterator[str]:
    """Yield what is wrong with the λ of the last step: it ended at a bound."""
    low, high = PRECISION_BOUNDS
    if (precision <= 2 * low).any() or (precision >= high / 2).any():
        yield (
            f"The prior precision ended at a bound of [{low:g}, {high:g}], so that the posterior is "
            "that without a prior, or the prior alone. Check that the network was trained on these "
            "targets; else try g_prior=False, fewer parameters, or em_steps=0 with a "
            "prior_precision of your own."
        )


def of_weights(effective_dim: Estimate, num_samples: int) -> Iterator[str]:
    """Yield what is wrong with γ: below 4 / K, its error is half of it or more."""
    gamma, error = effective_dim.value.sum().item(), effective_dim.standard_error.norm().item()
    if gamma < max(4 / num_samples, 2 * error):
        yield (
            f"The data determine next to none of the weights (γ = {gamma:.2g} ± {error:.1g}), so "
            "that the posterior is the prior. If the network fits its data, try g_prior=False, a "
            "smaller prior_precision to start from, or parameters of layers nearer to the outputs."
        )


def of_evidence(
    evidence: Estimate, prediction: Prediction, y: Tensor, num_data: int
) -> Iterator[str]:
    """Yield what is wrong with the evidence; y are one batch's targets."""
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


def of_certainty(prediction: Prediction, y: Tensor) -> Iterator[str]:
    """Yield what is wrong with predictions of training data."""
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


def stated_and_right(prediction: Prediction, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the confidence in each predicted label, and whether it is right, of all labels."""
    p = prediction.probs
    if prediction.likelihood.elementwise:
        return torch.maximum(p, 1 - p).flatten(), ((p > 0.5) == (y > 0.5)).flatten()
    best, mask = p.max(prediction.class_dim), prediction.likelihood.mask(y)
    kept = torch.ones_like(y, dtype=torch.bool) if mask is None else mask
    return best.values[kept], (best.indices == y)[kept]
