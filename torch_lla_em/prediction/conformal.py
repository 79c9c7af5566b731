"""Scores by which inputs are compared with a validation set, and errors of its targets.

``calibrate`` fits its numbers a second time, to one half of the validation set, and computes scores of the other
half. Nothing was fitted to these, so a new input from the same distribution has any rank among them with the same
probability. Scores that differ by no more than rounding are ties (``rounding``), in favour of an input. Results
therefore depend neither on the batch nor on the device of an input, and guarantees hold for discrete data too.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.prediction.mixture import FunctionMixture
from torch_lla_em.prediction.neighbours import centred
from torch_lla_em.prediction.ranks import ROUNDING, infinite_if_nan
from torch_lla_em.prediction.scores import (
    errors_of_classes,
    errors_of_values,
    has_classes,
    has_values,
)
from torch_lla_em.runtime import check_choice

Score = Literal["all", "epistemic", "distance"]


class Scored(NamedTuple):
    """Out-of-distribution scores of inputs, large out of distribution."""

    values: Tensor
    """(B, 2) or (B, 3), epistemic first."""

    units: Tensor
    """The scale of each score, relative to which it is rounded, (S,)."""


def ood_scores(mixture: FunctionMixture, distances: Tensor | None, unit: Tensor | None) -> Scored:
    """Return the scores of inputs: of their predictions and, if they are known, their distances.

    Args:
        mixture (FunctionMixture): The predictive distribution.
        distances (Tensor, optional): To the nearest training example, (B, 2).
        unit (Tensor, optional): The scale of the second distance, ().
    """
    likelihood = mixture.likelihood
    # small scores are differences of large numbers
    double = mixture.map(lambda part: part.map(Tensor.double))
    if likelihood.real_valued:
        aleatoric, epistemic = double.uncertainties()
        variance = epistemic = epistemic / aleatoric
    else:
        epistemic = variance = centred(likelihood, double.deviations()).square().mean(0)
        if likelihood.gives_probabilities:
            epistemic = double.uncertainties()[1]
    scores = [epistemic, variance] if distances is None else [epistemic]
    columns = [(s.flatten(1).mean(1) if s.dim() > 1 else s)[:, None].double() for s in scores]
    units = torch.full((2,), ROUNDING, dtype=torch.float64, device=mixture.f.device)
    if distances is not None and unit is not None:
        columns.append(distances.double())
        units = torch.stack([units[0], torch.ones_like(units[0]), unit.double()])
    return Scored(infinite_if_nan(torch.cat(columns, 1)), units)


def chosen(score: Score, computed: int, known: int) -> list[int]:
    """Return which of the computed scores are compared; of the last ones, the reference knows so many."""
    check_choice("score", score, ("all", "epistemic", "distance"))
    if score == "distance" and computed < 3:
        raise ValueError(
            'score="distance" needs distances to training examples, which regressions do not keep: their only '
            "score is the epistemic one. Leave score out."
        )
    if score == "epistemic" and known < computed:
        raise ValueError(
            'score="epistemic" needs a reference with this score, which only calibrate of this version makes: '
            "call la.calibrate(validation_loader)."
        )
    columns = range(computed - known, computed)
    return [0] if score == "epistemic" else [i for i in columns if i or score == "all"]


def variance_of_error(mixture: FunctionMixture) -> Tensor:
    """Return the expected squared error of the mean of all members, from those of the members.

    Let v be the mean of the members' variances, and D the variance of their means. The squared
    errors of the members exceed that of their mean by D on average, which leaves v - D. This is
    v / (1 + D / v) to first order, which is positive.
    """
    v = torch.stack([member.variance() for member in mixture.posteriors]).mean(0)
    means = torch.stack([member.expected() for member in mixture.posteriors])
    return v / (1 + means.var(0, correction=0) / v)


def errors_of(mixture: FunctionMixture, y: Tensor) -> Tensor:
    """Return the error of each prediction, (B, outputs); no columns for other likelihoods.

    For classes it is the probability of all classes that are more probable than the label, for
    regression the residual in predictive standard deviations.
    """
    if has_classes(mixture.likelihood, mixture.f):
        return errors_of_classes(mixture.expected(), y)
    if has_values(mixture.likelihood, mixture.f):
        return errors_of_values(mixture.expected(), mixture.variance(), y)
    return mixture.f.new_zeros(len(y), 0).double()
