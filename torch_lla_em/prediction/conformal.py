"""Comparisons of inputs with a validation set: p-values, prediction sets and intervals.

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
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from torch_lla_em.prediction.functions import Functions
from torch_lla_em.prediction.neighbours import centred
from torch_lla_em.prediction.ranks import (
    ROUNDING,
    crossed,
    infinite_if_nan,
    mass_above,
    rounding,
)
from torch_lla_em.prediction.reference import Reference, Stated
from torch_lla_em.runtime import check_choice, report

# scores below this are rounding errors of double precision
_SMALLEST = 1e-9

Own = TypeVar("Own", bound="Conformal")
Score = Literal["all", "epistemic", "distance"]

_UNCALIBRATED = (
    "is_ood compares inputs with training examples, because calibrate has not been called, so its rate is "
    "not guaranteed. Call la.calibrate(validation_loader)."
)


def chosen(score: Score, computed: int, known: int, real_valued: bool) -> list[int]:
    """Return which of the computed scores are compared; of the last ones, the reference knows so many."""
    check_choice("score", score, ("all", "epistemic", "distance"))
    if score == "distance" and real_valued and computed < 3:
        raise ValueError(
            'score="distance" needs distances to training examples, which regressions do not keep: their only '
            "score is the epistemic one. Leave score out."
        )
    if score == "epistemic" and computed < 2:
        raise ValueError(
            'score="epistemic" needs a student with this score, and this one, of an earlier version, has a '
            "single other one: distil it again with la.distil(inputs)."
        )
    if score == "epistemic" and known < computed:
        raise ValueError(
            'score="epistemic" needs a reference with this score, which only calibrate of this version makes: '
            "call la.calibrate(validation_loader)."
        )
    columns = list(range(computed - known, computed))
    if score == "all":
        return columns
    return [0] if score == "epistemic" else [i for i in columns if i or computed == 1]


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
    """Returns the distances of each input to the nearest training example, (B, 2), if some are kept."""

    unit: Callable[[], Tensor] | None = field(default=None, kw_only=True)
    """Returns the scale of the second distance, (), relative to which it is rounded."""

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

        For each of several scores, the share of examples with larger ones is taken, and an example is
        unusual if the harmonic mean of its shares is small. The scores are ``epistemic`` (for regression
        relative to the observation noise), with twice the weight of all others, and the distances to the
        nearest stored training example, where a distance is the posterior standard deviation of the
        difference of outputs, and the same relative to the outputs' own. Where no training examples are
        stored (regression, and other curvatures than the default), it is ``epistemic`` and the variance of
        the centred outputs. ``p_values`` takes some of them alone.

        If ``calibrate`` had ``groups``, the reference are the examples of the input's group. With
        ``groups="classes"`` the input is compared with the examples of each class, and has the largest
        p-value.

        Before ``calibrate``, with the variational curvature, stored training examples are the
        reference. The network was fitted to them, so false alarms are more frequent than stated.

        Raises:
            ValueError: If there are no reference examples: before ``calibrate``, if the curvature is
                not variational.
        """
        return self.p_values()

    def p_values(self, score: Score = "all") -> Tensor:
        """Return conformal p-values by some of the scores, (B,); see ``p_value``.

        Args:
            score (str): "all" (default), "epistemic" alone, or "distance": all scores but that one, which
                regressions do not have.

        Raises:
            ValueError: If there are no reference examples, or none with this score.

        Example:
            >>> by_distance = la.predict(x).p_values("distance")
        """
        return self._p_values(*self._judged("p_value"), score)

    def is_ood(self, rate: float = 0.05, score: Score = "all") -> Tensor:
        """Return which inputs are out-of-distribution (OOD), as a mask of shape (B,).

        Args:
            rate (float): The largest accepted share of false alarms among inputs from the
                validation set's distribution. Default 0.05; it needs at least 1 / rate - 1
                reference examples.
            score (str): "all" (default), "epistemic" or "distance", as in ``p_values``.

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
        return self._p_values(reference, prediction, score) <= rate

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
        """Return scores of each input that are large out of distribution, (B, 2) or (B, 3), epistemic first."""
        likelihood, double = self.likelihood, self._double()
        epistemic = variance = centred(likelihood, double.deviations).square().mean(0)
        if likelihood.gives_probabilities:
            epistemic = double._uncertainties()[1]
        elif likelihood.real_valued:
            aleatoric, epistemic = double._uncertainties()
            variance = epistemic = epistemic / aleatoric
        scores = [epistemic] if self.nearest is not None else [epistemic, variance]
        columns = [(s.flatten(1).mean(1) if s.dim() > 1 else s)[:, None].double() for s in scores]
        if self.nearest is not None:
            columns.append(self.nearest().double())
        return infinite_if_nan(torch.cat(columns, 1))

    def _units(self) -> Tensor:
        """Return the scale of each score, relative to which it is rounded, (S,)."""
        if self.unit is None:
            return torch.full((2,), _SMALLEST, dtype=torch.float64, device=self.centre.device)
        unit = self.unit().double()
        return torch.stack([_SMALLEST * torch.ones_like(unit), torch.ones_like(unit), unit])

    def _p_values(
        self, reference: Reference, prediction: Conformal, score: Score = "all"
    ) -> Tensor:
        room = self._room()

        def of(reference: Reference, prediction: Conformal) -> Tensor:
            scores, units = prediction._ood_scores(), prediction._units()
            # training examples, and references of earlier versions, have the last scores only
            count = reference.unusual.shape[1]
            some = chosen(score, scores.shape[1], count, self.likelihood.real_valued)
            known = reference._replace(
                unusual=reference.unusual[:, [i - scores.shape[1] for i in some]]
            )
            return known.p_values(scores[:, some], self.stated, room, units[some])

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
