"""Comparisons of inputs with stored examples: of the training data, and of a validation set.

An input is described by J w_k, the posterior's samples of its outputs. Its distance to a training
example is the posterior standard deviation of the difference of their outputs. Where outputs vary
more than they would at any of these examples without its label, the means of a prediction are
extrapolated, and shrunk in proportion.

Conformal p-values, prediction sets and intervals have guaranteed error rates: ``calibrate`` fits its
numbers a second time, to one half of the validation set, and computes scores of the other half.
Nothing was fitted to these reference scores, so a new input from the same distribution has any rank
among them with the same probability.

Scores that differ by no more than rounding are ties, of reference examples and of new inputs alike
(``rounding``). Results therefore do not depend on the batch or the device of an input, and ties are
counted in favour of an input, so that the guarantees hold for discrete data too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction.functions import Functions
from torch_lla_em.prediction.ranks import (
    NUMBERS,
    ROUNDING,
    crossed,
    infinite_if_nan,
    mass_above,
    rounding,
)
from torch_lla_em.prediction.reference import Reference, Stated
from torch_lla_em.runtime import report

# scores below this are rounding errors of double precision
_SMALLEST = 1e-9
# number of neighbours of a training example among which the nearest without it is looked for
_CANDIDATES = 64
# largest leverage; by the Monte Carlo error of a covariance of samples it can exceed 1
_MOST = 0.95

Own = TypeVar("Own", bound="Conformal")

_UNCALIBRATED = (
    "is_ood compares inputs with training examples, because calibrate has not been called, and its rate is "
    "not guaranteed: it flagged 4.6 % of test data at a rate of 5 % on average, and 8.5 % for the worst of "
    "40 networks. Call la.calibrate(validation_loader)."
)


class TrainingExamples(NamedTuple):
    """What is known of some training examples."""

    likelihood: Likelihood

    deviations: Tensor
    """J w_k, (n, K, ..., C)."""

    largest_variance: Tensor
    """The largest variance of their centred outputs, each without itself in the posterior, ()."""

    def distance(self, deviations: Tensor) -> Tensor:
        """Return the distance of inputs, given by J w_k (K, B, ..., C), to the nearest one, (B,)."""
        known = self._features()
        points = centred(self.likelihood, deviations).movedim(0, 1).flatten(1).to(known)
        step = max(1, NUMBERS // max(1, len(known)))
        # one part without a number of rows, so that exported programs take any
        parts = [points] if len(points) <= step else points.split(step)
        nearest = [(part - known[torch.cdist(part, known).argmin(1)]).norm(dim=1) for part in parts]
        distances = torch.cat(nearest) if len(nearest) > 1 else nearest[0]
        scaled: Tensor = distances / len(deviations) ** 0.5
        return scaled

    def distances(self, leverages: Tensor) -> Tensor:
        """Return the distance of each of these examples to the nearest other one, (n,).

        They are those of the posterior without the example itself, so that they are comparable to the
        distances of new inputs. Among many others the nearest few with the example are candidates.
        """
        known, K = self._features(), self.deviations.shape[1]
        count = min(len(known) - 1, _CANDIDATES)
        if not count:
            return torch.full_like(known[:, 0], torch.inf)
        apart = torch.cdist(known, known).fill_diagonal_(torch.inf)
        nearest = apart.topk(count, largest=False).indices
        least = [
            (factor @ (own - known[others]).view(count, K, -1)).flatten(1).norm(dim=1).min()
            for own, others, factor in zip(known, nearest, _without_itself(leverages))
        ]
        distances: Tensor = torch.stack(least) / K**0.5
        return distances

    def unit(self) -> Tensor:
        """Return the largest standard deviation of these examples, relative to which distances round."""
        outputs = self.deviations[:1, 0].numel()
        return (self.largest_variance.double() * outputs).sqrt()

    def kept_share(self, deviations: Tensor) -> Tensor:
        """Return the factor of the mean at inputs, (B,): 1 if the variance is within that of training data."""
        variance = output_variance(self.likelihood, deviations)
        largest = self.largest_variance.to(variance)
        return torch.where(variance > largest, largest / variance, torch.ones_like(variance))

    def _features(self) -> Tensor:
        # distances are differences of squares, in which float32 would lose half of its digits
        return centred(self.likelihood, self.deviations).flatten(1).double()


def centred(likelihood: Likelihood, deviations: Tensor) -> Tensor:
    """Return outputs without their mean over classes, which moves no prediction."""
    if likelihood.gives_probabilities and not likelihood.elementwise:
        return deviations - deviations.mean(-1, keepdim=True)
    return deviations


def output_variance(likelihood: Likelihood, deviations: Tensor) -> Tensor:
    """Return the variance of the centred outputs, averaged over them, (B,), of (K, B, ..., C)."""
    variance = centred(likelihood, deviations).square().mean(0)
    return variance[:, None].flatten(1).mean(1)


def variances_without(likelihood: Likelihood, deviations: Tensor, leverages: Tensor) -> Tensor:
    """Return this variance for training examples, each in the posterior without itself, (n,)."""
    moved = _without_itself(leverages) @ deviations.flatten(2).double()
    return output_variance(likelihood, moved.view_as(deviations).movedim(1, 0))


def _without_itself(leverages: Tensor) -> Tensor:
    """Return the factors that turn J w_k of an example into draws without it, (n, K, K).

    With the leverage L_i of an example, (K, K), the covariance of the samples' coefficients is I / K with, and
    (I - L_i)⁻¹ / K without it.
    """
    shares, vectors = torch.linalg.eigh(leverages.double())
    factors: Tensor = (1 - shares.clamp(0, _MOST)).rsqrt()[..., None] * vectors.mT
    return factors


class Interval(NamedTuple):
    """The ends of an interval, as tensors of the same shape."""

    lower: Tensor
    upper: Tensor


@dataclass(frozen=True, repr=False)
class Conformal(Functions):
    """A prediction's methods that compare its inputs with a validation set."""

    judge: Callable[[], tuple[Reference, Conformal]] | None = field(default=None, kw_only=True)
    """Returns reference scores, and the prediction by the numbers of the first half."""

    nearest: Callable[[], Tensor] | None = field(default=None, kw_only=True)
    """Returns the distance of each input to the nearest training example, (B,), if some are kept."""

    unit: Callable[[], Tensor] | None = field(default=None, kw_only=True)
    """Returns the scale of these distances, (), relative to which they are rounded."""

    stated: Stated = field(default=Stated(), kw_only=True)
    """The groups and weights of the inputs, if the reference has any."""

    room: float = field(default=0.0, kw_only=True)
    """Relative difference up to which scores are ties, at least: that of the reference's dtype."""

    @property
    def p_value(self) -> Tensor:
        """Conformal p-value of each input for being from the validation set's distribution, (B,).

        It is the share of reference examples that are at least as unusual as the input, the input
        included. For inputs from that distribution, P(p_value <= rate) <= rate. Scores that differ by
        rounding alone are equal, so that the p-value of an input is the same in every batch.

        With the variational curvature, the score of an example is its distance to the nearest stored
        training example, where the distance is the posterior standard deviation of the difference
        of their outputs. Otherwise there are two scores, and the larger rank is used: the mutual
        information (for regression the variance of f relative to the observation noise), and the
        variance of the centred outputs.

        If ``calibrate`` had ``groups``, the reference are the examples of the input's group. With
        ``groups="classes"`` the input is compared with the examples of each class, and has the largest
        p-value.

        Before ``calibrate``, with the variational curvature, stored training examples are the
        reference. The network was fitted to them, so false alarms are more frequent than stated.

        Raises:
            ValueError: If there are no reference examples: before ``calibrate``, if the curvature is
                not variational.
        """
        return self._p_values(*self._judged("p_value"))

    def is_ood(self, rate: float = 0.05) -> Tensor:
        """Return which inputs are out-of-distribution (OOD), as a mask of shape (B,).

        Args:
            rate (float): The largest accepted share of false alarms among inputs from the
                validation set's distribution. Default 0.05; it needs at least 1 / rate - 1
                reference examples.

        Raises:
            ValueError: If there are no reference examples (see ``p_value``), or too few.

        Example:
            >>> suspicious = la.predict(x).is_ood(rate=0.1)
        """
        if not 0 < rate < 1:
            raise ValueError(f"rate must lie between 0 and 1, not {rate}.")
        reference, prediction = self._judged("is_ood")
        if reference.errors is None:
            report("warn", _UNCALIBRATED)
        reference.require(ceil(1 / rate - 1 - ROUNDING), f"rate={rate}", self.stated)
        return self._p_values(reference, prediction) <= rate

    def prediction_set(self, level: float = 0.9) -> Tensor:
        """Return a set of classes that contains the label with probability ``level`` or more.

        It is an adaptive prediction set (APS) without randomisation: classes are added in the order
        of falling probability until their probability exceeds a conformal quantile.

        Args:
            level (float): Coverage, between 0 and 1. Default 0.9.

        Returns:
            A boolean mask of shape (B, C). The most probable class is always in the set.

        Raises:
            ValueError: If the posterior has not been calibrated, or with too few examples.
            TypeError: If the targets are not one class label per example. ``RiskControl`` has sets for
                labels of pixels or tokens.

        Example:
            >>> sizes = la.predict(x).prediction_set(level=0.8).sum(1)
        """
        if not self._has_classes:
            remedy = (
                "for a label at every pixel or token, use RiskControl(la, validation_loader)"
                if self._has_labels
                else "use interval(level) for a regression"
            )
            raise TypeError(f"prediction_set is for one class label per example; {remedy}.")
        reference, prediction = self._judged("prediction_set", by_labels=True)
        room, above = self._room(), mass_above(prediction._expected(), self._room())
        threshold = reference.quantiles_by_class(level, self.stated, above.shape[1])
        return self._out(above <= threshold + room)

    def interval(self, level: float = 0.9, joint: bool = False) -> Interval:
        """Return conformal prediction intervals, which contain y with probability ``level`` or more.

        They are centred at the mean and proportional to the predictive standard deviation.

        Args:
            level (float): Coverage for each output, between 0 and 1. Default 0.9.
            joint (bool): Whether the level is that of all outputs of an example at once, which needs wider
                intervals. Default False.

        Returns:
            An ``Interval`` of ``lower`` and ``upper``, each of shape (B, C).

        Raises:
            ValueError: If the posterior has not been calibrated, or with too few examples.
            TypeError: If the targets are not continuous.

        Example:
            >>> lower, upper = regression.predict(x).interval(level=0.8)
        """
        if not self._has_values:
            raise TypeError(
                "interval is for continuous targets of shape (B,) or (B, C); use "
                "prediction_set(level) for classes, and credible_interval(level) otherwise."
            )
        reference, prediction = self._judged("interval", by_labels=True)
        centre, variance = prediction._expected(), prediction._variance_by(reference)
        errors: Any = reference.errors
        if joint and centre.shape[1:].numel() > 1:
            errors = reference.joint_errors()[:, :1]
        half = reference.quantiles(errors, level, self.stated).to(centre) * variance.sqrt()
        # targets at the ends, as in discrete data, are inside whichever way they are rounded
        half = half * (1 + self._room()) + 8 * torch.finfo(centre.dtype).eps * centre.abs()
        return Interval(self._out(centre - half), self._out(centre + half))

    def _judged(self, name: str, by_labels: bool = False) -> tuple[Reference, Conformal]:
        judged = None if self.judge is None else self.judge()
        if judged is None or (by_labels and judged[0].errors is None):
            of_several = self.members and self.weights is None
            la, fit = (
                ("ensemble", "") if of_several else ("la", " or la.fit(..., validation=loader),")
            )
            raise ValueError(
                f"{name} compares inputs with a validation set, but this prediction has none. "
                f"Call {la}.calibrate(validation_loader),{fit} and then {la}.predict(x) without mean= and "
                "num_samples=."
            )
        judged[0].agree(self.stated)
        return judged

    def _ood_scores(self) -> Tensor:
        """Return scores of each input that are large out of distribution, (B, 1) or (B, 2)."""
        if self.nearest is not None:
            return infinite_if_nan(self.nearest()[:, None].double())
        likelihood, double = self.likelihood, self._double()
        epistemic = variance = centred(likelihood, double.deviations).square().mean(0)
        if likelihood.gives_probabilities:
            epistemic = double._uncertainties()[1]
        elif likelihood.real_valued:
            aleatoric, epistemic = double._uncertainties()
            variance = epistemic = epistemic / aleatoric
        scores = (s.flatten(1).mean(1) if s.dim() > 1 else s for s in (epistemic, variance))
        return torch.stack([infinite_if_nan(s.double()) for s in scores], 1)

    def _p_values(self, reference: Reference, prediction: Conformal) -> Tensor:
        room = self._room()

        def of(reference: Reference, prediction: Conformal) -> Tensor:
            unit = _SMALLEST if prediction.unit is None else prediction.unit()
            return reference.p_values(prediction._ood_scores(), self.stated, room, unit)

        if reference.folds is None:
            return of(reference, prediction)
        each = reference.unusual.split(reference.folds.tolist())
        folds = [reference._replace(unusual=unusual) for unusual in each]
        return crossed(torch.stack(list(map(of, folds, prediction.members))), reference.folds)

    def _variance_by(self, reference: Reference) -> Tensor:
        """Return the expected squared error of the mean, (B, C), relative to which errors are measured."""
        return self._variance() if reference.folds is None else self._variance_of_error()

    def _variance_of_error(self) -> Tensor:
        """Return the expected squared error of the mean of all members, from those of the members.

        Let v be the mean of the members' variances, and D the variance of their means. The squared
        errors of the members exceed that of their mean by D on average, which leaves v - D. This is
        v / (1 + D / v) to first order, which is positive.
        """
        v = torch.stack([member._variance() for member in self.members]).mean(0)
        means = torch.stack([member._expected() for member in self.members])
        return v / (1 + means.var(0, correction=0) / v)

    def _room(self) -> float:
        return max(self.room, rounding(self.centre.dtype))

    def _double(self: Own) -> Own:
        """Return the prediction in double precision: small scores are differences of large numbers."""
        members = tuple(member._double() for member in self.members)
        centre, deviations = self.centre.double(), self.deviations.double()
        return replace(self, centre=centre, deviations=deviations, members=members)

    def _errors(self, y: Tensor) -> Tensor:
        """Return the error of each prediction, (B, outputs); no columns for other likelihoods.

        For classes it is the probability of all classes that are more probable than the label, for
        regression the residual in predictive standard deviations.
        """
        if self._has_classes:
            above = mass_above(self._expected(), rounding(self.centre.dtype))
            return above.gather(1, y.long()[:, None])
        if not self._has_values:
            return self.centre.new_zeros(len(y), 0).double()
        errors = (y - self._expected()).abs() / self._variance().sqrt()
        return errors.double().reshape(len(y), -1)

    @property
    def _has_labels(self) -> bool:
        return self.likelihood.gives_probabilities and not self.likelihood.elementwise

    @property
    def _has_classes(self) -> bool:
        return self._has_labels and self.centre.dim() == 2

    @property
    def _has_values(self) -> bool:
        return self.likelihood.real_valued and self.centre.dim() <= 2
