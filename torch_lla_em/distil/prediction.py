"""The prediction of a student: what its network says of the posterior's prediction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, pi
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood, sum_rows
from torch_lla_em.prediction import Interval, Printed, arrays, of_examples


class Scores(NamedTuple):
    """OOD scores, (n, S), and sorted errors, (n, outputs or 0), of a student's validation set, in
    float64."""

    unusual: Tensor
    errors: Tensor


@dataclass(frozen=True, repr=False)
class StudentPrediction(Printed):
    """The prediction of a ``Student`` at B inputs, as returned by ``student.predict(x)``.

    Its properties and methods have the names, shapes and meanings of those of ``la.predict(x)``. A
    student learns the distribution of each target on its own, and has nothing that needs functions
    from the posterior, such as joint predictions and samples. ``p_value``, ``is_ood``,
    ``prediction_set`` and ``interval`` need ``student.calibrate``, whose scores are ``reference``.
    """

    likelihood: Likelihood
    _f: Tensor
    """The outputs of the network, classes last, (B, *sites, C)."""

    log_uncertainty: Tensor
    """Logarithms of the epistemic part and, unless E[y] is a probability, of the aleatoric part."""

    log_scores: Tensor
    """Logarithms of the out-of-distribution scores, (B, S)."""

    _class_dim: int = -1
    reference: Scores | None = None

    @property
    def expectation(self) -> Tensor:
        """E[y], (B, ..., C): probabilities of classes and labels, rates of counts, or the mean."""
        return self._out(self.likelihood.mean(self._f))

    @property
    def mean(self) -> Tensor:
        """The same as ``expectation``."""
        return self.expectation

    @property
    def probs(self) -> Tensor:
        """The probability of every class or label, (B, ..., C)."""
        self._require(self.likelihood.gives_probabilities, "probs", "expectation")
        return self.expectation

    @property
    def log_probs(self) -> Tensor:
        """The logarithm of ``probs``."""
        self._require(self.likelihood.gives_probabilities, "log_probs", "expectation")
        return self._out(self.likelihood.log_mean(self._f))

    @property
    def predictive_variance(self) -> Tensor:
        """The variance of y, with observation noise, (B, ..., C); p (1 - p) for probabilities."""
        if self.likelihood.gives_probabilities:
            return self.probs * (1 - self.probs)
        return self.aleatoric + self.epistemic

    @property
    def entropy(self) -> Tensor:
        """The entropy of y in nats; for regression that of a Gaussian."""
        if self.likelihood.real_valued:
            return arrays.gaussian_entropy(self.predictive_variance)
        self._require(self.likelihood.gives_probabilities, "entropy", "predictive_variance")
        return self._out(self.likelihood.entropy(self._f[None]))

    @property
    def aleatoric(self) -> Tensor:
        """Uncertainty that more data would not reduce: expected entropy, or E[Var[y | f]]."""
        if self.likelihood.gives_probabilities:
            return self.entropy - self.epistemic
        return self._out(self.log_uncertainty.exp().chunk(2, -1)[1])

    @property
    def epistemic(self) -> Tensor:
        """Uncertainty that more data would reduce: mutual information, or Var[E[y | f]]."""
        uncertainty = self.log_uncertainty.exp()
        if not self.likelihood.gives_probabilities:
            return self._out(uncertainty.chunk(2, -1)[0])
        entropy = self.likelihood.entropy(self._f[None])
        return self._out(torch.minimum(uncertainty.reshape(entropy.shape), entropy))

    @property
    def ood_score(self) -> Tensor:
        """The out-of-distribution scores that p-values compare, (B, S) in float64."""
        return arrays.infinite_if_nan(self.log_scores.double().exp())

    @property
    def _room(self) -> float:
        """Relative difference up to which scores are ties: the rounding of float32, to which
        students are cast."""
        return max(arrays.rounding(self._f.dtype), arrays.rounding(torch.float32))

    @property
    def p_value(self) -> Tensor:
        """Conformal p-value of each input for being from the validation set's distribution,
        (B,)."""
        unusual, _ = self._compared("p_value")
        return arrays.p_values(unusual, self.ood_score, self._room)

    def _compared_scores(self) -> arrays.Compared:
        """Return the scores of inputs and of validation examples, which p-values combine."""
        scores = self.ood_score
        return arrays.Compared(scores, self._room * scores, self._compared("a monitor").unusual)

    def is_ood(self, rate: float = 0.05) -> Tensor:
        """Return which inputs are out-of-distribution, (B,), with at most ``rate`` false alarms."""
        least = ceil(1 / arrays.require_share(rate, "rate") - 1 - 1e-9)
        arrays.require(len(self._compared("is_ood").unusual), least, f"rate={rate}")
        return self.p_value <= rate

    def prediction_set(self, level: float = 0.9) -> Tensor:
        """Return a set of classes that contains the label with probability ``level`` or more, (B,
        C)."""
        other = "interval, or RiskControl(la, validation_loader) for labels of pixels or tokens"
        self._require(arrays.has_classes(self.likelihood, self._f), "prediction_set", other)
        _, errors = self._compared("prediction_set")
        return arrays.conformal_set(self.expectation, arrays.quantiles(errors, level), self._room)

    def interval(self, level: float = 0.9) -> Interval:
        """Return intervals that contain each output with probability ``level`` or more, (B, C)."""
        self._require(arrays.has_values(self.likelihood, self._f), "interval", "prediction_set")
        _, errors = self._compared("interval")
        size = arrays.quantiles(errors, level)
        return arrays.conformal_interval(
            self.expectation, self.predictive_variance, size, self._room
        )

    def log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y_n | x_n) of each example, (B,), for targets as in the training data.

        Continuous targets are Gaussian. Counts have a mean and a variance, but no density.
        """
        likelihood = self.likelihood
        y = arrays.aligned(likelihood, y, self._f, self._class_dim)
        if likelihood.gives_probabilities:
            return likelihood.log_prob(self._f, y)
        self._require(likelihood.real_valued, "log_prob", "expectation")
        variance, error = self.predictive_variance, self._out(y) - self.expectation
        return sum_rows(-0.5 * (error.square() / variance + (2 * pi * variance).log()), y)

    def scores_of(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return what ``calibrate`` keeps of examples with labels: their OOD scores, and their
        errors."""
        y = arrays.aligned(self.likelihood, y, self._f, self._class_dim)
        kept = self.likelihood.labelled(y)
        own = self._map(Tensor.detach, kept)
        return own.ood_score, arrays.errors_of(own, y[kept]).double()

    def _map(self, change: Callable[[Tensor], Tensor], rows: slice | Tensor) -> StudentPrediction:
        """Return the prediction of some inputs, with every tensor changed."""
        each = self._f, self.log_uncertainty, self.log_scores
        f, uncertainty, scores = (change(values[rows]) for values in each)
        return replace(self, _f=f, log_uncertainty=uncertainty, log_scores=scores)

    def _compared(self, name: str) -> Scores:
        """Return the scores of the validation set."""
        if self.reference is None:
            words = "needs the student's own scores of a validation set, not those of la.calibrate"
            raise ValueError(f"{name} {words}: call student.calibrate(validation_loader).")
        return Scores(*(part.to(self._f.device) for part in self.reference))

    def _require(self, holds: bool, name: str, other: str) -> None:
        if not holds:
            own = f"A student under {type(self.likelihood).__name__} has no .{name}"
            raise TypeError(f"{own}. Use .{other}, or the posterior's la.predict(x).{name}.")

    def _out(self, values: Tensor) -> Tensor:
        """Move the classes, if values have them, back to their axis in the model's outputs."""
        same = values.dim() == self._f.dim()
        return values.movedim(-1, self._class_dim) if same else values

    def _table(self) -> tuple[str, list[tuple[str, ...]]]:
        return of_examples("Prediction of a student", self)
