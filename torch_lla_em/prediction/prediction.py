"""Predictions of a posterior, and their comparison with a validation set."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.prediction.distribution import Distribution
from torch_lla_em.prediction.reference import (
    Reference,
    Score,
    Scored,
    Stated,
    chosen,
    ood_scores,
    variance_of_error,
)
from torch_lla_em.prediction.regions import Ellipsoid, covariance_of
from torch_lla_em.prediction.scores import (
    ROUNDING,
    Interval,
    conformal_interval,
    conformal_set,
    crossed,
    has_classes,
    has_values,
    require_share,
    rounding,
)
from torch_lla_em.prediction.summary import Cells, Printed, of_examples
from torch_lla_em.runtime import report

_UNCALIBRATED = (
    "is_ood compares inputs with training examples, because calibrate has not been called, so its rate is "
    "not guaranteed. Call la.calibrate(validation_loader)."
)


@dataclass(frozen=True, repr=False, eq=False)
class Prediction(Printed, Distribution):
    """The predictive distribution at B inputs, as returned by ``la.predict(x)``.

    It describes the network's function f, without observation noise, by ``mean``,
    ``variance``, ``covariance`` and ``samples``; and the targets y by ``expectation``,
    ``probs``, ``predictive_variance``, ``credible_interval``, ``log_prob`` and ``sample``, continuous ones also
    by ``cdf``, ``quantile`` and ``crps``. After ``calibrate``,
    ``p_value``, ``is_ood``, ``prediction_set`` and ``interval`` compare the inputs with the
    validation set. All shapes are those of the network's outputs, (B, ..., C).

    The distribution is a ``mixture`` of components: each posterior, and single functions such as the
    network. ``print`` shows a table.

    Example:
        >>> prediction = la.predict(x)
        >>> classes, uncertainty = prediction.probs.argmax(1), prediction.epistemic
    """

    origin: Any = None
    """The ``Pushforward`` that it was made of; None: it cannot be compared with a validation set."""

    reference: Reference | None = None
    """The scores of validation examples, or of training examples, that inputs are compared with."""

    stated: Stated = Stated()
    """The groups and weights of the inputs, if the reference has any."""

    room: float = 0.0
    """Relative difference up to which scores are ties, at least: that of the reference's dtype."""

    @property
    def members(self) -> tuple[Prediction, ...]:
        """The prediction of each posterior: of a single one, or of all members of an ensemble."""
        each = self.mixture.posteriors
        origins = [None] * len(each) if self.origin is None else self.origin.each()
        return tuple(
            replace(self, mixture=own, origin=origin) for own, origin in zip(each, origins)
        )

    @cached_property
    def scored(self) -> Scored:
        """The out-of-distribution scores that p-values compare, and their units."""
        return ood_scores(self.mixture, *(self.origin.distances() if self.origin else (None, None)))

    @property
    def p_value(self) -> Tensor:
        """Conformal p-value of each input for being from the validation set's distribution, (B,).

        It is the share of reference examples that are at least as unusual as the input, the input
        included. For inputs from that distribution, P(p_value <= rate) <= rate. Scores that differ by
        rounding alone are equal, so that the p-value of an input is the same in every batch.

        For each of several scores, the share of examples with larger ones is taken, and an example is
        unusual if the harmonic mean of its shares is small. The scores are ``epistemic`` (for regression
        relative to the observation noise), with four times the weight of each other, and the distances to the
        nearest stored training example, where a distance is the posterior standard deviation of the
        difference of outputs, and the same relative to the outputs' own. Where no training examples are
        stored (regression, and other curvatures than the default), it is ``epistemic`` and the variance of
        the centred outputs. ``p_values`` takes some of them alone.

        After ``calibrate`` with ``groups``, the reference are the examples of the input's group; with
        ``groups="classes"`` those of each class, of which the input has the largest p-value. Before it, with the
        variational curvature, they are stored training examples, to which the network was fitted, so that
        false alarms are more frequent than stated.

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
        reference, prediction = self.judged("p_value")
        members: tuple[Prediction, ...] = (prediction,)
        parts: tuple[Tensor, ...] = (reference.unusual,)
        if reference.folds is not None:
            members = prediction.members
            parts = reference.unusual.split(reference.folds.tolist())
        found = []
        for member, known in zip(members, parts):
            values, units = member.scored
            # training examples, and references of earlier versions, have the last scores only
            computed = values.shape[1]
            some = chosen(score, computed, known.shape[1])
            own = reference._replace(unusual=known[:, [i - computed for i in some]])
            found.append(own.p_values(values[:, some], self.stated, self._room, units[some]))
        return found[0] if reference.folds is None else crossed(torch.stack(found), reference.folds)

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
        require_share(rate, "rate")
        reference, _ = self.judged("is_ood")
        if reference.errors is None:
            report("warn", _UNCALIBRATED)
        reference.require(ceil(1 / rate - 1 - ROUNDING), f"rate={rate}", self.stated)
        return self.p_values(score) <= rate

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
        if not has_classes(self.likelihood, self.mixture.f):
            remedy = (
                "use interval(level) for a regression"
                if not self.likelihood.gives_probabilities or self.likelihood.elementwise
                else "for a label at every pixel or token, use RiskControl(la, validation_loader)"
            )
            raise TypeError(f"prediction_set is for one class label per example; {remedy}.")
        reference, prediction = self.judged("prediction_set", by_labels=True)
        probs = prediction.mixture.expected()
        threshold = reference.quantiles(reference.errors, level, self.stated, probs.shape[1])
        return self._out(conformal_set(probs, threshold, self._room))

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
        if not has_values(self.likelihood, self.mixture.f):
            raise TypeError(
                "interval is for continuous targets of shape (B,) or (B, C); use "
                "prediction_set(level) for classes, and credible_interval(level) otherwise."
            )
        reference, prediction = self.judged("interval", by_labels=True)
        centre, errors = prediction.mixture.expected(), reference.errors
        if joint and centre.shape[1:].numel() > 1:
            errors = reference.joint_errors()[:, :1]
        size = reference.quantiles(errors, level, self.stated)
        variance = prediction._variance_by(reference)
        ends = conformal_interval(centre, variance, size, self._room)
        return Interval(*map(self._out, ends))

    def ellipsoid(self, level: float = 0.9) -> Ellipsoid:
        """Return conformal regions that contain all outputs of y together with probability ``level`` or more.

        They are ellipsoids around the mean, in the shape of the covariance of y given x, and smaller than
        ``interval(level, joint=True)`` if outputs are correlated.

        Args:
            level (float): Coverage, between 0 and 1. Default 0.9.

        Returns:
            An ``Ellipsoid`` of ``centre`` (B, C), ``covariance`` (B, C, C) and ``radius`` (B,), with a
            method ``contains(y)``.

        Raises:
            ValueError: If the posterior has not been calibrated, or with too few examples.
            TypeError: If the targets are not several continuous outputs.

        Example:
            >>> region = several.predict(x).ellipsoid(level=0.8)  # doctest: +SKIP
        """
        reference, prediction = self.judged("ellipsoid", by_labels=True)
        mixture = prediction.mixture
        centre = mixture.expected()
        if not has_values(self.likelihood, mixture.f) or centre.shape[1:].numel() < 2:
            raise TypeError("ellipsoid is for several continuous targets; use interval(level).")
        radius = reference.quantiles(reference.joint_errors()[:, 1:], level, self.stated)[:, 0]
        covariance = covariance_of(mixture, prediction._variance_by(reference))
        radius = radius.expand(len(centre)) * (1 + self._room)
        return Ellipsoid(centre.double(), covariance, radius)

    def judged(self, name: str, by_labels: bool = False) -> tuple[Reference, Prediction]:
        """Return the reference, and the prediction by the numbers that its scores are of.

        Args:
            name (str): What needs them, for an error.
            by_labels (bool): Whether errors of labelled examples are needed. Default False.

        Raises:
            ValueError: If there is no reference, or if groups or weights do not fit it.
        """
        reference = self.reference
        if self.origin is None or reference is None or (by_labels and reference.errors is None):
            several = self.mixture.components[-1].posterior > 0
            la, fit = ("ensemble", "") if several else ("la", " or la.fit(..., validation=loader),")
            raise ValueError(
                f"{name} compares inputs with a validation set, but this prediction has none. "
                f"Call {la}.calibrate(validation_loader),{fit} and then {la}.predict(x) without mean= and "
                "num_samples=."
            )
        reference.agree(self.stated)
        return reference, self._by_reference

    @cached_property
    def _by_reference(self) -> Prediction:
        reference, sigma, noise = self.reference, self.origin.likelihood.observation_noise, None
        if reference.sigma is not None and sigma is not None:
            noise = reference.sigma / sigma.to(reference.sigma)
        return replace(self, mixture=self.origin.mixture(reference.table, noise), reference=None)

    def first(self, count: int) -> Prediction:
        """Return the prediction of the first few inputs, detached, without what they are compared with.

        Args:
            count (int): The number of inputs.
        """
        rows = slice(count)
        mixture = self.mixture.map(lambda part: part.part(rows).map(Tensor.detach))
        return Prediction(mixture, self.class_dim)

    @property
    def _room(self) -> float:
        return max(self.room, rounding(self.mixture.f.dtype))

    def _variance_by(self, reference: Reference) -> Tensor:
        """Return the expected squared error of the mean, (B, C), relative to which errors are measured."""
        mixture = self.mixture
        return mixture.variance() if reference.folds is None else variance_of_error(mixture)

    def _table(self) -> tuple[str, Cells]:
        return of_examples("Prediction", self)
