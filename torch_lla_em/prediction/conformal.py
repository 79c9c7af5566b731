"""Conformal p-values, prediction sets and intervals: statements whose error rate is guaranteed.

``calibrate`` fits its numbers to the first half of the validation set once more, and scores the
second half by the predictions that follow. Nothing was fitted to these reference scores, so a new
input from the same source is as likely to have any rank among them as any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction.mixture import FunctionMixture

# comparisons that are held at a time
_NUMBERS = 2**22
# of products of a level and a count, whose last bit is rounded
_ROUNDING = 1e-9


class Interval(NamedTuple):
    """The ends of an interval."""

    lower: Tensor
    upper: Tensor


class Reference(NamedTuple):
    """What ``calibrate`` finds by splitting the validation set in two halves."""

    table: Tensor
    """The parts of predictions, fitted to the first half."""

    sigma: Tensor | None
    """The observation noise of a regression, fitted to the first half."""

    unusual: Tensor
    """Out-of-distribution scores of the second half, (n, 2)."""

    errors: Tensor
    """Errors of the second half, (n, outputs), sorted."""


REFERENCE = tuple(f"conformal_{name}" for name in Reference._fields)
"""The names of these as buffers."""


@dataclass(frozen=True)
class Judge:
    """Reference scores, and the prediction by which inputs are compared with them."""

    reference: Reference
    prediction: Callable[[], Conformal]


class Conformal(FunctionMixture):
    """What is said of inputs by their ranks among the reference examples."""

    likelihood: Likelihood
    judge: Judge | None

    @property
    def p_value(self) -> Tensor:
        """The conformal p-value that the input is from the validation set's distribution, (B,).

        The share of reference examples that are at least as unusual as the input, which is counted
        as one of them. An example is as unusual as the larger of its ranks by two scores: mutual
        information (of a regression: the variance of f relative to the observation noise), which
        finds inputs between classes, and the variance of the centred outputs, which finds those far
        away. For inputs from the distribution of the validation set, P(p_value <= rate) <= rate.
        """
        judge = self._judge("p_value")
        return p_values(judge.reference.unusual, unusual(judge.prediction()))

    def is_ood(self, rate: float = 0.05) -> Tensor:
        """Return which inputs are out-of-distribution, at this rate of false alarms at most, (B,)."""
        if not 0 < rate < 1:
            raise ValueError(f"rate must lie between 0 and 1, not {rate}.")
        count, needed = len(self._judge("is_ood").reference.unusual), ceil(1 / rate - 1 - _ROUNDING)
        _require(count, needed, f"rate={rate}")
        return self.p_value <= rate

    def prediction_set(self, level: float = 0.9) -> Tensor:
        """Return a set of classes that holds the label with this probability at least, as mask (B, C).

        The classes by falling probability, until those before have more of it than a threshold,
        which is the conformal quantile of the reference examples: an adaptive prediction set (APS)
        without randomisation. The most probable class is always in the set.
        """
        judge = self._judge("prediction_set")
        if not _has_classes(self.likelihood, self.centre):
            raise TypeError(
                "prediction_set is for one class label per example; use interval(level) for a "
                "regression."
            )
        threshold = quantiles(judge.reference.errors, level)
        return self._out(_mass_above(judge.prediction()._expected()) <= threshold)

    def interval(self, level: float = 0.9) -> Interval:
        """Return intervals that hold the target with this probability at least, for each output.

        They are around the mean, in proportion to the predictive standard deviation.
        """
        judge = self._judge("interval")
        if not _has_values(self.likelihood, self.centre):
            raise TypeError(
                "interval is for continuous targets of shape (B,) or (B, C); use "
                "prediction_set(level) for classes, and credible_interval(level) otherwise."
            )
        prediction = judge.prediction()
        centre = prediction._expected()
        half = quantiles(judge.reference.errors, level).to(centre) * prediction._variance().sqrt()
        return Interval(self._out(centre - half), self._out(centre + half))

    def _judge(self, name: str) -> Judge:
        if self.judge is None:
            raise ValueError(
                f"{name} compares inputs with a validation set, and this prediction has none: call "
                "la.calibrate(validation_loader), or la.fit(..., validation=loader), and then "
                "la.predict(x) with neither mean= nor num_samples=."
            )
        return self.judge

    def _expected(self) -> Tensor:
        raise NotImplementedError

    def _variance(self) -> Tensor:
        raise NotImplementedError

    def _uncertainties(self) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


def unusual(prediction: Conformal) -> Tensor:
    """Return two scores of each input that are large out of distribution, (B, 2)."""
    deviations, likelihood = prediction.deviations, prediction.likelihood
    if likelihood.gives_probabilities and not likelihood.elementwise:
        deviations = deviations - deviations.mean(-1, keepdim=True)
    epistemic = variance = deviations.square().mean(0)
    if likelihood.gives_probabilities:
        epistemic = prediction._uncertainties()[1]
    elif likelihood.real_valued:
        aleatoric, epistemic = prediction._uncertainties()
        variance = epistemic = epistemic / aleatoric
    scores = (s.flatten(1).mean(1) if s.dim() > 1 else s for s in (epistemic, variance))
    return torch.stack([s.double().nan_to_num(nan=torch.inf) for s in scores], 1)


def errors(prediction: Conformal, y: Tensor) -> Tensor:
    """Return how far each prediction is from its target, (B, outputs); without outputs if unknown.

    For classes the probability of all that are more probable than the label, for regression the
    residual in predictive standard deviations.
    """
    if _has_classes(prediction.likelihood, prediction.centre):
        return _mass_above(prediction._expected()).gather(1, y.long()[:, None]).double()
    if not _has_values(prediction.likelihood, prediction.centre):
        return prediction.centre.new_zeros(len(y), 0).double()
    return ((y - prediction._expected()).abs() / prediction._variance().sqrt()).double()


def p_values(reference: Tensor, scores: Tensor) -> Tensor:
    """Return the conformal p-values of scores (B, 2) among those of a reference (n, 2), shape (B,).

    Ranks are taken among the reference examples and the input together, so that all of them are
    treated alike and the p-value is exact.
    """
    reference, count = reference.to(scores.device), len(reference)
    in_order = reference.sort(0).values.T.contiguous()

    def number_above(values: Tensor) -> Tensor:
        return (count - torch.searchsorted(in_order, values.T.contiguous())).T

    own = 1 + number_above(scores).min(1).values
    theirs = number_above(reference)
    found = [
        (theirs + (some[:, None] >= reference)).min(2).values.le(rank[:, None]).sum(1)
        for some, rank in zip(*(t.split(max(1, _NUMBERS // max(1, count))) for t in (scores, own)))
    ]
    return (1 + torch.cat(found)).double() / (1 + count)


def quantiles(errors: Tensor, level: float) -> Tensor:
    """Return the conformal quantile of each column of sorted errors, (outputs,)."""
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, not {level}.")
    _require(len(errors), ceil(level / (1 - level) - _ROUNDING), f"level={level}")
    return errors[ceil((len(errors) + 1) * level - _ROUNDING) - 1]


def _require(count: int, needed: int, asked: str) -> None:
    if count < needed:
        raise ValueError(
            f"{asked} needs at least {needed} reference examples, and there are {count}: half of the "
            f"validation set serves as such, so calibrate with {2 * needed} examples or more."
        )


def _mass_above(probs: Tensor) -> Tensor:
    """Return the probability of all classes that are more probable, for each class, (B, C)."""
    falling, order = probs.double().sort(dim=1, descending=True, stable=True)
    above = torch.zeros_like(falling)
    above[:, 1:] = falling.cumsum(1)[:, :-1]
    return above.scatter(1, order, above)


def _has_classes(likelihood: Likelihood, f: Tensor) -> bool:
    return likelihood.gives_probabilities and not likelihood.elementwise and f.dim() == 2


def _has_values(likelihood: Likelihood, f: Tensor) -> bool:
    return likelihood.real_valued and f.dim() == 2
