"""Signs that a fit has gone to one end, each with what helps."""

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

# rows of a batch that a fit is looked at by, and numbers that their samples may take
_ROWS = 256
_NUMBERS = 2**22

# steps of EM after which λ is near its end, and the factor it may still move by
_STEPS, _RUNS = 5, 1.5

# of probabilities, by which training rows are more often right than predictions say
_GAP = 0.2
# of the variance of real predictions, that residuals have at least
_SHARE = 0.1


def few_rows(data: Data, num_samples: int) -> Batch | None:
    """Return some rows that were fitted to, or None where one takes too much."""
    rows = min(_ROWS, int(_NUMBERS * data.num_rows / (num_samples * max(data.num_outputs, 1))))
    batch = next(data.first().split(rows)) if rows else None
    return batch if batch is not None and len(batch.rows) <= rows else None


def warn_of_collapse(fitted: Fitted, data: Data) -> None:
    """Log a warning for each sign that a fit has collapsed."""
    for sign in _signs(fitted, data):
        logger.warning("%s", sign)


def _signs(fitted: Fitted, data: Data) -> Iterator[str]:
    """Yield what is amiss with a fit, also by predictions of examples that it was fitted to."""
    batch = few_rows(data, len(fitted.w_samples)) if data.group.rank == 0 else None
    if batch is None:
        return
    prediction, y = fitted._predicted(batch.inputs, fitted.mixture), batch.targets
    y = y if y.is_floating_point() else y.long()
    gamma = Estimate(fitted.effective_dim, fitted.effective_dim_error)
    visited = [record["prior_precision"] for record in fitted.history]
    # a λ that nothing depends on may be anywhere
    yield from list(of_weights(gamma, len(fitted.w_samples))) or of_precision(
        torch.tensor([*visited, fitted.prior_precision.tolist()], device="cpu")
    )
    yield from of_evidence(Estimate(*fitted._log_evidence), prediction, y, fitted.num_data)
    yield from of_certainty(prediction, y)


def of_precision(path: Tensor) -> Iterator[str]:
    """Yield what is amiss with λ by that of every step and of the end: at a wall, or still moving."""
    last = path[-1].double()
    low, high = PRECISION_BOUNDS
    if (last <= 2 * low).any() or (last >= high / 2).any():
        yield (
            f"The prior precision ended at the wall of [{low:g}, {high:g}]: the data want no prior, "
            "or no weights. See whether the network was trained on these targets; g_prior=False, "
            "fewer parameters, or em_steps=0 with a prior_precision of your own give another."
        )
    elif len(path) > _STEPS:
        factor = (last / path[-2].double()).log().abs().max().exp().item()
        if factor > _RUNS:
            yield (
                f"The prior precision still moves by a factor of {factor:.3g} a step after "
                f"{len(path) - 1} steps: it runs away, or EM was stopped early. Raise em_steps; if "
                "it goes on, try g_prior=False, or em_steps=0 with a prior_precision of your own."
            )


def of_weights(effective_dim: Estimate, num_samples: int) -> Iterator[str]:
    """Yield what is amiss with γ: below 4 / K, its error is half of it or more."""
    gamma, error = effective_dim.value.sum().item(), effective_dim.standard_error.norm().item()
    if gamma < max(4 / num_samples, 2 * error):
        yield (
            f"The data determine next to none of the weights (γ = {gamma:.2g} ± {error:.1g}): the "
            "posterior is the prior. Where the network fits its data, another prior does better: "
            "try g_prior=False, a smaller prior_precision to start from, or parameters that lie "
            "nearer to the outputs."
        )


def of_evidence(
    evidence: Estimate, prediction: Prediction, y: Tensor, num_data: int
) -> Iterator[str]:
    """Yield what is amiss with the evidence; y are one batch's targets."""
    likelihood, classes = prediction.likelihood, prediction.centre.shape[-1]
    if not likelihood.gives_probabilities or not len(y):
        return
    each = log(2) if likelihood.elementwise else log(classes)
    guessing = -num_data * y[0].numel() * each
    if evidence.value.item() <= guessing:
        yield (
            f"The log evidence ({evidence.value:.4g}) is no better than guessing ({guessing:.4g}): "
            "the linear model has learnt nothing from these data. See whether targets belong to "
            "their rows, and whether the network was trained; g_prior=False may find another prior."
        )


def of_certainty(prediction: Prediction, y: Tensor) -> Iterator[str]:
    """Yield what is amiss with predictions of rows that were trained on."""
    if prediction.likelihood.real_valued:
        mean, variance = prediction.moments()
        if y.shape != mean.shape or not len(y):
            return
        share = ((y - mean).square() / variance).mean().item()
        if share < _SHARE:
            yield (
                f"Predictions of training rows are off by {share**0.5:.0%} of what they state: the "
                f"posterior is far too wide for them. {_REMEDY}"
            )
        return
    if not prediction.likelihood.gives_probabilities or not len(y):
        return
    stated, right = stated_and_right(prediction, y)
    if not right.numel():
        return
    accuracy, said = right.double().mean().item(), stated.double().mean().item()
    if accuracy - said > _GAP + 1 / right.numel() ** 0.5:
        yield (
            f"Training rows are predicted right in {accuracy:.0%} of cases with a mean probability "
            f"of {said:.0%}: as fitted, predictions are far less certain than they could be. "
            f"{_REMEDY}"
        )


def stated_and_right(prediction: Prediction, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probability of what is predicted, and whether it is so, of all that has a label."""
    p = prediction.probs
    if prediction.likelihood.elementwise:
        return torch.maximum(p, 1 - p).flatten(), ((p > 0.5) == (y > 0.5)).flatten()
    best, mask = p.max(prediction.class_dim), prediction.likelihood.mask(y)
    kept = torch.ones_like(y, dtype=torch.bool) if mask is None else mask
    return best.values[kept], (best.indices == y)[kept]


_REMEDY = "What helps: la.calibrate(held_out_loader), or fit(..., validation=loader); the default curvature."
