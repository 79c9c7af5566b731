"""The base class of predictions of posteriors and of students, from probabilities to conformal
sets."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, pi
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction.conformal import (
    ROUNDING,
    Compared,
    Interval,
    aligned,
    conformal_interval,
    crossed,
    has_classes,
    has_values,
    mass_above,
    require_share,
    rounding,
)
from torch_lla_em.prediction.printed import Cells, Printed
from torch_lla_em.prediction.reference import Reference, Score, Stated, chosen
from torch_lla_em.runtime import refuse_former

_FORMER = {
    "mean": "write .f_mean for the mean of f, or .expectation for that of y",
    "variance": "write .f_variance for f, or .predictive_variance for y",
    "covariance": "write .f_covariance",
    "reference": "write la.reference or student.reference",
}
"""Names of earlier versions, and what replaces them."""


class BasePrediction(Printed):
    """Base class of the predictions of posteriors and of students at B inputs.

    All shapes are those of the network's outputs, (B, ..., C).
    """

    likelihood: Likelihood
    _title: str
    _class_dim: int
    """The axis of the classes in the network's outputs."""

    _f: Tensor
    """Outputs of the network, classes last, for their shape, dtype and device."""

    _stated: Stated
    """The groups and weights of the inputs, if the reference has any."""

    _room: float
    """Smallest relative difference up to which scores are ties."""

    expectation: Tensor
    """E[y]: probabilities of classes and labels, rates of counts, or the mean."""

    _scored: tuple[Tensor, Tensor]
    """The out-of-distribution scores that p-values compare, (B, S), and their units, (S,)."""

    # what subclasses define

    def _log_expectation(self) -> Tensor:
        """Return log E[y] of labels, classes last."""
        raise NotImplementedError

    def _entropy(self) -> Tensor:
        """Return the entropy of targets that are not continuous, classes last."""
        raise NotImplementedError

    def _uncertainties(self) -> tuple[Tensor, Tensor]:
        """Return the aleatoric and the epistemic uncertainty, classes last."""
        raise NotImplementedError

    def _log_density(self, y: Tensor) -> Tensor:
        """Return log p(y_n | x_n), (B,), for targets with the outputs last."""
        raise NotImplementedError

    def _judged(self, name: str) -> tuple[Reference, BasePrediction]:
        """Return the reference, and the prediction with the numbers that were fitted together with
        it. Raise an error for the method ``name`` if there is no reference."""
        raise NotImplementedError

    def _map(
        self, change: Callable[[Tensor], Tensor], rows: slice | Tensor = slice(None)
    ) -> BasePrediction:
        """Return the prediction of some inputs, without a reference, with every tensor mapped."""
        raise NotImplementedError

    @property
    def _members(self) -> tuple[BasePrediction, ...]:
        """The prediction of each posterior of an ensemble."""
        return (self,)

    @property
    def _ties(self) -> float:
        """Relative difference up to which scores are ties."""
        return max(self._room, rounding(self._f.dtype))

    # y

    @property
    def predictive_variance(self) -> Tensor:
        """The variance of y, with observation noise, (B, ..., C); for classes and labels p (1 - p),
        the variance of each indicator."""
        if self.likelihood.gives_probabilities:
            return self.probs * (1 - self.probs)
        aleatoric, epistemic = self._uncertainties()
        return self._shaped(aleatoric + epistemic)

    @property
    def probs(self) -> Tensor:
        """The probability of every class or label, (B, ..., C). A TypeError is raised if E[y] is
        not a probability."""
        self._require_probabilities("probs")
        return self.expectation

    @property
    def log_probs(self) -> Tensor:
        """The logarithm of ``probs``, (B, ..., C), which is finite even if they underflow."""
        self._require_probabilities("log_probs")
        return self._shaped(self._log_expectation())

    @property
    def entropy(self) -> Tensor:
        """The entropy of y in nats: one value per label for classes, (B, ...), otherwise one per
        output.

        For regression it is that of a Gaussian with the same mean and variance; counts have none.
        """
        if self.likelihood.real_valued:
            return 0.5 * (2 * pi * self.predictive_variance).log() + 0.5
        return self._shaped(self._entropy())

    @property
    def aleatoric(self) -> Tensor:
        """Uncertainty that more data would not reduce: expected entropy, or E[Var[y | f]]."""
        return self._shaped(self._uncertainties()[0])

    @property
    def epistemic(self) -> Tensor:
        """Uncertainty that more data would reduce: mutual information, or Var[E[y | f]]."""
        return self._shaped(self._uncertainties()[1])

    def log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y_n | x_n) of each example by itself, (B,).

        For an example with several labels, such as pixels, tokens or outputs, it is their joint
        log-probability, since they depend on each other under the posterior (the outputs of a
        regression count as independent). ``calibrate``, ``compare`` and ``report`` score each label
        by itself; for classes this is ``nll_loss(prediction.log_probs, y)``.

        Args:
            y (Tensor): Targets, as in the training data.

        Example:
            >>> nll = -la.predict(x).log_prob(y).mean()
        """
        return self._log_density(self._aligned(y))

    # comparison with a validation set

    @property
    def p_value(self) -> Tensor:
        """Conformal p-value of each input for being from the validation set's distribution, (B,).

        It is the share of reference examples that are at least as unusual as the input, where the
        input itself is counted too. For inputs from that distribution P(p_value <= rate) <= rate;
        with ``groups`` this holds within each group. An example is unusual if its ``epistemic``
        uncertainty or its distances to the nearest training example are large; ``p_values`` can use
        some of these scores alone.

        Raises:
            ValueError: Before ``calibrate``.
        """
        return self.p_values()

    def p_values(self, score: Score = "all") -> Tensor:
        """Return conformal p-values by some of the scores, (B,); see ``p_value``.

        Args:
            score: "all" (default); "epistemic"; or "distance", which means all scores except the
                epistemic one, and exists only after fits with variational curvature.

        Raises:
            ValueError: If there are no reference examples, or none with this score.

        Example:
            >>> by_distance = la.predict(x).p_values("distance")
        """
        reference, judged = self._judged("p_value")
        folds, members, parts = reference.folds, judged._members, (reference.unusual,)
        if folds is None:
            members = (judged,)
        else:
            parts = reference.unusual.split(folds.tolist())
        each = []
        for member, known in zip(members, parts, strict=True):
            values, units = member._scored
            # references of version 0.4, except those of classifiers, have only the last score
            computed = values.shape[1]
            some = chosen(score, computed, known.shape[1])
            among = reference._replace(unusual=known[:, [i - computed for i in some]])
            each.append(among.p_values(values[:, some], self._stated, self._ties, units[some]))
        return each[0] if folds is None else crossed(torch.stack(each), folds)

    def compared(self) -> Compared:
        """Return the OOD scores of inputs and of validation examples, which p-values and monitors
        compare.

        Raises:
            ValueError: Before ``calibrate``.

        Example:
            >>> scores = la.predict(x).compared().scores
        """
        reference, judged = self._judged("a monitor")
        known, (values, units) = reference.unusual, judged._scored
        some = chosen("all", values.shape[1], known.shape[1])
        values, unit = values[:, some], units[some]
        room, groups, here = self._ties * (values + unit), None, self._stated.groups
        if reference.groups is not None and here is not None:
            groups = here, reference.groups
        return Compared(values, room, known.to(values), groups)

    def is_ood(self, rate: float = 0.05, score: Score = "all") -> Tensor:
        """Return which inputs are out-of-distribution (OOD), as a mask of shape (B,).

        Args:
            rate (float): The largest accepted share of false alarms among inputs from the
                validation set's distribution. Default 0.05; it needs at least 1 / rate - 1
                reference examples.
            score: "all" (default), "epistemic" or "distance", as in ``p_values``.

        Raises:
            ValueError: If there are no reference examples (see ``p_value``), or too few.

        Example:
            >>> suspicious = la.predict(x).is_ood(rate=0.1)
        """
        require_share(rate, "rate")
        reference, _ = self._judged("is_ood")
        reference.require(ceil(1 / rate - 1 - ROUNDING), f"rate={rate}", self._stated)
        return self.p_values(score) <= rate

    def prediction_set(self, level: float = 0.9) -> Tensor:
        """Return a set of classes that contains the label with probability ``level`` or more.

        It is an adaptive prediction set (APS) without randomisation: classes are added in the order
        of decreasing probability until their total probability exceeds a conformal quantile.

        Args:
            level (float): Coverage, between 0 and 1. Default 0.9.

        Raises:
            ValueError: If the predictions are not calibrated, or on too few examples.
            TypeError: If the targets are not one class label per example.

        Returns:
            A mask of shape (B, C).

        Example:
            >>> sizes = la.predict(x).prediction_set(level=0.8).sum(1)
        """
        if not has_classes(self.likelihood, self._f):
            raise TypeError(
                "prediction_set is for one class label per example: use interval(level) for a "
                "regression, and RiskControl(la, validation_loader) for a label at every pixel or "
                "token."
            )
        reference, judged = self._judged("prediction_set")
        probs = judged.expectation
        threshold = reference.quantiles(reference.errors, level, self._stated, probs.shape[1])
        return self._shaped(mass_above(probs, self._ties) <= threshold + self._ties)

    def interval(self, level: float = 0.9, joint: bool = False) -> Interval:
        """Return conformal prediction intervals, which contain y with probability ``level``.

        They are centred at the mean and proportional to the predictive standard deviation.

        Args:
            level (float): Coverage for each output, between 0 and 1. Default 0.9.
            joint (bool): Whether the level holds for all outputs of an example at once, which needs
                wider intervals. Default False.

        Returns:
            An ``Interval`` of ``lower`` and ``upper``, each of shape (B, C) or (B,).

        Raises:
            ValueError: If the predictions are not calibrated, or on too few examples.
            TypeError: If the targets are not continuous.

        Example:
            >>> lower, upper = regression.predict(x).interval(level=0.8)
        """
        if not has_values(self.likelihood, self._f):
            raise TypeError(
                "interval is for continuous targets of shape (B,) or (B, C): use "
                "prediction_set(level) for classes, and credible_interval(level) otherwise."
            )
        reference, judged = self._judged("interval")
        centre, errors, variance = judged.expectation, reference.errors, judged.predictive_variance
        if joint and centre.shape[1:].numel() > 1:
            errors = errors.amax(1, keepdim=True)
        size = reference.quantiles(errors, level, self._stated)
        if reference.folds is not None:
            variance = _variance_of_error(judged._members)
        lower, upper = conformal_interval(centre, variance, size, self._ties)
        return Interval(self._shaped(lower), self._shaped(upper))

    def _errors(self, y: Tensor) -> Tensor:
        """Return the error of each prediction, (B, outputs), without columns if errors are not
        defined for such targets.

        For classes it is the total probability of all classes that are more probable than the
        label, and for continuous targets the residual in predictive standard deviations.
        """
        mean = self.expectation
        if has_classes(self.likelihood, self._f):
            return mass_above(mean, rounding(mean.dtype)).gather(1, y.long()[:, None])
        if has_values(self.likelihood, self._f):
            errors = (y - mean).abs() / self.predictive_variance.sqrt()
            return errors.double().reshape(len(y), -1)
        return y.new_zeros(len(y), 0, dtype=torch.float64)

    def _aligned(self, y: Tensor) -> Tensor:
        """Return targets with the outputs last; raise an error if they do not fit."""
        return aligned(self.likelihood, y, self._f, self._class_dim)

    def _shaped(self, values: Tensor, leading: int = 0) -> Tensor:
        """Move the classes, if there are any, back to their axis in the outputs, after ``leading``
        axes."""
        axis = self._class_dim
        if axis == -1 or values.dim() < self._f.dim() + leading:
            return values
        return values.movedim(-1, axis + leading if axis >= 0 else axis)

    def _require(self, holds: bool, name: str, what: str) -> None:
        """Raise an error if the method ``name`` does not exist for the likelihood, for the reason
        ``what``."""
        if not holds:
            raise TypeError(
                f"A prediction under {type(self.likelihood).__name__} has no .{name}: {what}. Use "
                ".expectation, or .samples and log_prob(y) of la.predict(x)."
            )

    def _require_probabilities(self, name: str) -> None:
        holds = self.likelihood.gives_probabilities
        self._require(holds, name, "its E[y] is not a probability")

    if not TYPE_CHECKING:  # type checkers report attributes that do not exist

        def __getattr__(self, name: str) -> None:
            if name in _FORMER:
                refuse_former(type(self).__name__, [name], _FORMER, "attribute")
            object.__getattribute__(self, name)  # raises the error of an attribute or a property

    def _table(self) -> tuple[str, Cells]:
        likelihood, count, shown = self.likelihood, len(self._f), 6
        title = f"{self._title} under {type(likelihood).__name__}"
        if self._f.dim() != 2 or not count:
            return title, [("outputs", f"of shape {tuple(self.expectation.shape)}")]
        p = self._map(Tensor.detach, slice(shown))
        columns = {"E[y]": p.expectation}
        if likelihood.real_valued:
            columns = {"mean": p.expectation, "sd of y": p.predictive_variance.sqrt()}
            columns["sd of its mean"] = p.epistemic.sqrt()
        elif likelihood.gives_probabilities:
            if not likelihood.elementwise:
                best = p.probs.max(1)
                columns = {"class": best.indices, "probability": best.values, "entropy": p.entropy}
            columns["epistemic"] = p.epistemic
        values = zip(*columns.values(), strict=True)
        rows: Cells = [("example", *columns)]
        rows += [(str(i), *map(_cell, each)) for i, each in enumerate(values)]
        return title, rows if count <= shown else [*rows, (f"of {count}", *("…" for _ in columns))]


def _cell(values: Tensor) -> str:
    """Return the first four numbers, with three digits."""
    numbers = torch.atleast_1d(values).tolist()
    shown = [str(n) if isinstance(n, int) else f"{n:.3g}" for n in numbers[:4]]
    return " ".join(shown) + (" …" if len(numbers) > 4 else "")


def _variance_of_error(members: tuple[BasePrediction, ...]) -> Tensor:
    """Return the expected squared error of the mean of all members, v / (1 + D / v), for the mean v
    of their variances and the variance D of their means; to first order it is v - D."""
    v = torch.stack([member.predictive_variance for member in members]).mean(0)
    means = torch.stack([member.expectation for member in members])
    return v / (1 + means.var(0, correction=0) / v)
