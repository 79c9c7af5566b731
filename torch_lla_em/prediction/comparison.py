"""A prediction compared with a validation set: p-values, flags, sets and intervals; methods of
``Prediction``."""

from __future__ import annotations

from math import ceil
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.prediction.arrays import (
    ROUNDING,
    Compared,
    Interval,
    conformal_interval,
    conformal_set,
    crossed,
    has_classes,
    has_values,
    require_share,
)
from torch_lla_em.prediction.reference import Reference, Score, chosen


def p_values(prediction: Any, score: Score = "all") -> Tensor:
    """Return conformal p-values by some of the scores, (B,); see ``p_value``.

    Args:
        prediction: The prediction, which has this as a method.
        score: "all" (default), "epistemic", or "distance": all but that one, which regressions do
            not have.

    Raises:
        ValueError: If there are no reference examples, or none with this score.

    Example:
        >>> by_distance = la.predict(x).p_values("distance")
    """
    reference, own = prediction._judged("p_value")
    members, parts = (own,), (reference.unusual,)
    if reference.folds is not None:
        members = own.members
        parts = reference.unusual.split(reference.folds.tolist())
    found = []
    for member, known in zip(members, parts, strict=True):
        values, units = member._scored
        # references of 0.4 have the last scores only
        computed = values.shape[1]
        some = chosen(score, computed, known.shape[1])
        among = reference._replace(unusual=known[:, [i - computed for i in some]])
        ties = prediction._ties, units[some]
        found.append(among.p_values(values[:, some], prediction._stated, *ties))
    return found[0] if reference.folds is None else crossed(torch.stack(found), reference.folds)


def compared(prediction: Any) -> Compared:
    """Return the scores of inputs and of validation examples, which p-values combine.

    Args:
        prediction: The prediction, which has this as a method.
    """
    reference, own = prediction._judged("a monitor")
    known, (values, units) = reference.unusual, own._scored
    values, unit = values[:, -known.shape[1] :], units[-known.shape[1] :]
    both = prediction._stated.groups, reference.groups
    room = prediction._ties * (values + unit)
    return Compared(values, room, known.to(values), None if reference.groups is None else both)


def is_ood(prediction: Any, rate: float = 0.05, score: Score = "all") -> Tensor:
    """Return which inputs are out-of-distribution (OOD), as a mask of shape (B,).

    Args:
        prediction: The prediction, which has this as a method.
        rate (float): The largest accepted share of false alarms among inputs from the validation
            set's distribution. Default 0.05; it needs at least 1 / rate - 1 reference examples.
        score: "all" (default), "epistemic" or "distance", as in ``p_values``.

    Raises:
        ValueError: If there are no reference examples (see ``p_value``), or too few.

    Example:
        >>> suspicious = la.predict(x).is_ood(rate=0.1)
    """
    require_share(rate, "rate")
    reference, _ = prediction._judged("is_ood")
    reference.require(ceil(1 / rate - 1 - ROUNDING), f"rate={rate}", prediction._stated)
    flagged: Tensor = prediction.p_values(score) <= rate
    return flagged


def prediction_set(prediction: Any, level: float = 0.9) -> Tensor:
    """Return a set of classes that contains the label with probability ``level`` or more, a mask
    (B, C).

    It is an adaptive prediction set (APS) without randomisation: classes are added in the order of
    falling probability until their probability exceeds a conformal quantile.

    Args:
        prediction: The prediction, which has this as a method.
        level (float): Coverage, between 0 and 1. Default 0.9.

    Raises:
        ValueError: If the posterior has not been calibrated, or with too few examples.
        TypeError: If the targets are not one class label per example.

    Example:
        >>> sizes = la.predict(x).prediction_set(level=0.8).sum(1)
    """
    if not has_classes(prediction.likelihood, prediction._f):
        raise TypeError(
            "prediction_set is for one class label per example: use interval(level) for a "
            "regression, and RiskControl(la, validation_loader) for a label at every pixel or "
            "token."
        )
    reference, own = prediction._judged("prediction_set")
    probs = own.expectation
    threshold = reference.quantiles(reference.errors, level, prediction._stated, probs.shape[1])
    inside: Tensor = prediction._shaped(conformal_set(probs, threshold, prediction._ties))
    return inside


def interval(prediction: Any, level: float = 0.9, joint: bool = False) -> Interval:
    """Return conformal prediction intervals, which contain y with probability ``level`` or more.

    They are centred at the mean and proportional to the predictive standard deviation.

    Args:
        prediction: The prediction, which has this as a method.
        level (float): Coverage for each output, between 0 and 1. Default 0.9.
        joint (bool): Whether the level is that of all outputs of an example at once, which needs
            wider intervals.

    Returns:
        An ``Interval`` of ``lower`` and ``upper``, each of shape (B, C).

    Raises:
        ValueError: If the posterior has not been calibrated, or with too few examples.
        TypeError: If the targets are not continuous.

    Example:
        >>> lower, upper = regression.predict(x).interval(level=0.8)
    """
    if not has_values(prediction.likelihood, prediction._f):
        raise TypeError(
            "interval is for continuous targets of shape (B,) or (B, C): use prediction_set(level) "
            "for classes, and credible_interval(level) otherwise."
        )
    reference, own = prediction._judged("interval")
    centre, errors = own.expectation, reference.errors
    if joint and centre.shape[1:].numel() > 1:
        errors = errors.amax(1, keepdim=True)
    size = reference.quantiles(errors, level, prediction._stated)
    folds = reference.folds is not None
    variance = _variance_of_error(own) if folds else own.predictive_variance
    ends = conformal_interval(centre, variance, size, prediction._ties)
    return Interval(*map(prediction._shaped, ends))


def judged(prediction: Any, name: str) -> tuple[Reference, Any]:
    """Return the reference, and the prediction by the numbers that its scores are of; raise if
    there is none.

    Args:
        prediction: The prediction, which has this as a method.
        name: What needs them, for an error.
    """
    reference = prediction._reference
    if prediction._origin is None or reference is None:
        several = prediction._components[-1].owner > 0
        la, fit = ("ensemble", "") if several else ("la", " or la.fit(..., validation=loader),")
        raise ValueError(
            f"{name} compares inputs with a validation set, but this prediction has none. "
            f"Call {la}.calibrate(validation_loader),{fit} and then {la}.predict(x) without mean=."
        )
    reference.agree(prediction._stated)
    return reference, prediction._by_reference


def _variance_of_error(prediction: Any) -> Tensor:
    """Return the expected squared error of the mean of all members, v - D to first order in D: v /
    (1 + D / v)."""
    v = torch.stack([member.predictive_variance for member in prediction.members]).mean(0)
    means = torch.stack([member.expectation for member in prediction.members])
    return v / (1 + means.var(0, correction=0) / v)
