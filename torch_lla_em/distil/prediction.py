"""The prediction of a student: its network's approximation of the posterior's prediction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import pi

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood, sum_rows
from torch_lla_em.prediction import BasePrediction, Reference, Stated, conformal


@dataclass(frozen=True, repr=False)
class StudentPrediction(BasePrediction):
    """The prediction of a ``Student`` at B inputs, as returned by ``student.predict(x)``.

    Its properties and methods have the names, shapes and meanings of those of ``la.predict(x)``. A
    student learns the distribution of each target separately, so it has no joint predictions and no
    samples of functions. ``p_value``, ``is_ood``, ``prediction_set`` and ``interval`` need
    ``student.calibrate``.
    """

    likelihood: Likelihood
    _f: Tensor
    log_uncertainty: Tensor
    """Logarithms of the epistemic part and, unless E[y] is a probability, of the aleatoric part."""

    log_scores: Tensor
    """Logarithms of the out-of-distribution scores, (B, S)."""

    _class_dim: int = -1
    _reference: Reference | None = None
    _stated = Stated()
    _room = conformal.rounding(torch.float32)  # to which students are cast
    _title = "Prediction of a student"

    @property
    def expectation(self) -> Tensor:
        """E[y], (B, ..., C): probabilities of classes and labels, rates of counts, or the mean."""
        return self._shaped(self.likelihood.mean(self._f))

    @property
    def ood_score(self) -> Tensor:
        """The out-of-distribution scores that p-values compare, (B, S) in float64."""
        return self._scored[0]

    def _log_expectation(self) -> Tensor:
        return self.likelihood.log_mean(self._f)

    def _entropy(self) -> Tensor:
        self._require_probabilities("entropy")
        return self.likelihood.entropy(self._f[None])

    def _uncertainties(self) -> tuple[Tensor, Tensor]:
        uncertainty = self.log_uncertainty.exp()
        if not self.likelihood.gives_probabilities:
            epistemic, aleatoric = uncertainty.chunk(2, -1)
            return aleatoric, epistemic
        entropy = self.likelihood.entropy(self._f[None])
        epistemic = torch.minimum(uncertainty.reshape(entropy.shape), entropy)
        return entropy - epistemic, epistemic

    def _log_density(self, y: Tensor) -> Tensor:
        """Continuous targets are Gaussian; counts have a mean and a variance, but no density."""
        if self.likelihood.gives_probabilities:
            return self.likelihood.log_prob(self._f, y)
        self._require(self.likelihood.real_valued, "log_prob", "its network predicts no density")
        variance, error = self.predictive_variance, self._shaped(y) - self.expectation
        return sum_rows(-0.5 * (error.square() / variance + (2 * pi * variance).log()), y)

    @property
    def _scored(self) -> tuple[Tensor, Tensor]:
        scores = conformal.infinite_if_nan(self.log_scores.double().exp())
        return scores, scores.new_zeros(scores.shape[1])

    def _judged(self, name: str) -> tuple[Reference, StudentPrediction]:
        if self._reference is None:
            words = "needs the student's own scores of a validation set, not those of la.calibrate"
            raise ValueError(f"{name} {words}: call student.calibrate(validation_loader).")
        unusual, errors = (
            part.to(self._f.device) for part in (self._reference.unusual, self._reference.errors)
        )
        return self._reference._replace(unusual=unusual, errors=errors), self

    def _map(
        self, change: Callable[[Tensor], Tensor], rows: slice | Tensor = slice(None)
    ) -> StudentPrediction:
        each = self._f, self.log_uncertainty, self.log_scores
        f, uncertainty, scores = (change(values[rows]) for values in each)
        return replace(self, _f=f, log_uncertainty=uncertainty, log_scores=scores)
