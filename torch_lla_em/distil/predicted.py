"""The prediction of a student: what its network says of the posterior's prediction."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import pi
from typing import NoReturn

import torch
from torch import Tensor

from torch_lla_em.data import as_targets
from torch_lla_em.likelihoods import Likelihood, Poisson, sum_rows
from torch_lla_em.prediction import (
    Conformal,
    Interval,
    Printed,
    Reference,
    Score,
    chosen,
    infinite_if_nan,
    of_examples,
    p_values,
)

_OF_FUNCTIONS = {
    "covariance",
    "functions",
    "joint_log_prob",
    "predictive_samples",
    "samples",
    "smoothed",
    "standard_error",
    "weighted_functions",
}


def has_log_prob(likelihood: Likelihood) -> bool:
    """Whether a student knows the density of targets, which it takes from their mean and variance."""
    return (
        likelihood.gives_probabilities or likelihood.real_valued or isinstance(likelihood, Poisson)
    )


def without_functions(name: str, of: str) -> str:
    """Return why a student lacks what needs functions from the posterior, which ``of`` has."""
    return (
        f"A student has no .{name}, because it predicts each target on its own and has no "
        f"functions from the posterior. Use {of}.{name}."
    )


@dataclass(frozen=True, repr=False)
class StudentPrediction(Printed, Conformal):
    """The prediction of a ``Student`` at B inputs, as returned by ``student.predict(x)``.

    Its properties have the names, shapes and meanings of those of ``la.predict(x)``. A student
    learns the distribution of each target on its own. What needs functions from the posterior, such
    as joint predictions and samples, raises an error. ``p_value``, ``is_ood``, ``prediction_set``
    and ``interval`` need ``student.calibrate``.

    Example:
        >>> prediction = student.predict(x)  # doctest: +SKIP
        >>> classes, uncertainty = prediction.probs.argmax(1), prediction.epistemic  # doctest: +SKIP
    """

    log_uncertainty: Tensor = field(kw_only=True)
    """Logarithms of the epistemic part and, unless E[y] is a probability, of the aleatoric part."""

    log_scores: Tensor = field(kw_only=True)
    """Logarithms of the out-of-distribution scores, (B, S)."""

    reference: Reference | None = field(default=None, kw_only=True)
    """Scores of the validation set that the student was calibrated on."""

    @property
    def expectation(self) -> Tensor:
        """E[y], (B, ..., C): probabilities of classes and labels, rates of counts, or the mean."""
        return self._out(self._expected())

    @property
    def probs(self) -> Tensor:
        """The probability of every class or label, (B, ..., C).

        Raises:
            TypeError: If E[y] is not a probability; use ``expectation`` then.
        """
        self._require(self.likelihood.gives_probabilities, "probs", "expectation")
        return self.expectation

    @property
    def log_probs(self) -> Tensor:
        """The logarithm of ``probs``.

        Raises:
            TypeError: If E[y] is not a probability.
        """
        self._require(self.likelihood.gives_probabilities, "log_probs", "expectation")
        return self._out(self.likelihood.log_mean(self.centre))

    @property
    def mean(self) -> Tensor:
        """The mean of f under ``Regression``, (B, ..., C).

        Raises:
            TypeError: For other likelihoods; use ``expectation``, the mean of y, then.
        """
        self._require(self._is_of_outputs(), "mean", "expectation")
        return self.expectation

    @property
    def variance(self) -> Tensor:
        """The variance of f under ``Regression``, without noise, (B, ..., C).

        Raises:
            TypeError: For other likelihoods; use ``epistemic`` then.
        """
        self._require(self._is_of_outputs(), "variance", "epistemic")
        return self.epistemic

    @property
    def predictive_variance(self) -> Tensor:
        """The variance of y, with observation noise, (B, ..., C); p (1 - p) for probabilities."""
        if self.likelihood.gives_probabilities:
            return self.probs * (1 - self.probs)
        return self._site_values(self._variance())

    @property
    def entropy(self) -> Tensor:
        """The entropy of y in nats; for regression that of a Gaussian.

        Raises:
            TypeError: For counts and for likelihoods without entropy.
        """
        if self.likelihood.real_valued:
            return self._out(0.5 * (2 * pi * self._variance()).log() + 0.5)
        self._require(self.likelihood.gives_probabilities, "entropy", "predictive_variance")
        return self._site_values(self.likelihood.entropy(self.centre[None]))

    @property
    def aleatoric(self) -> Tensor:
        """Uncertainty that more data would not reduce: expected entropy, or E[Var[y | f]]."""
        return self._site_values(self._uncertainties()[0])

    @property
    def epistemic(self) -> Tensor:
        """Uncertainty that more data would reduce: mutual information, or Var[E[y | f]]."""
        return self._site_values(self._uncertainties()[1])

    def log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y_n | x_n) of each example on its own, shape (B,).

        Continuous targets are Gaussian, and counts have a negative binomial distribution with the
        learnt mean and variance.

        Args:
            y (Tensor): Targets, as in the training data.

        Raises:
            ValueError: If the targets do not fit the outputs.
            TypeError: For likelihoods of your own whose targets are not labels or continuous.
        """
        return self._log_prob(self._aligned(y))

    def _log_prob(self, y: Tensor) -> Tensor:
        likelihood = self.likelihood
        if likelihood.gives_probabilities:
            return likelihood.log_prob(self.centre, y)
        mean = self._expected()
        aleatoric, epistemic = self._uncertainties()
        if likelihood.real_valued:
            variance = aleatoric + epistemic
            return sum_rows(-0.5 * ((y - mean).square() / variance + (2 * pi * variance).log()), y)
        self._require(has_log_prob(likelihood), "log_prob", "expectation")
        shape = (mean.square() / epistemic).clamp(max=1e6)  # of the Gamma distribution of rates
        counts = torch.distributions.NegativeBinomial(
            shape, logits=mean.log() - shape.log(), validate_args=False
        )
        return sum_rows(counts.log_prob(y.to(mean)), y)

    def credible_interval(self, level: float = 0.95) -> Interval:
        """Return an interval that contains y with probability ``level``, for continuous targets.

        Args:
            level (float): Probability, between 0 and 1. Default 0.95. For a guaranteed coverage use
                ``interval``, after ``student.calibrate``.

        Returns:
            An ``Interval`` of ``lower`` and ``upper``, each of shape (B, ..., C).

        Raises:
            ValueError: If ``level`` does not lie between 0 and 1.
            TypeError: For labels and counts, whose intervals need functions from the posterior.
        """
        if not 0 < level < 1:
            raise ValueError(f"level must lie between 0 and 1, not {level}.")
        if not self.likelihood.real_valued:
            self._refuse("credible_interval", TypeError)
        tail = torch.tensor(0.5 - 0.5 * level, dtype=torch.float64, device="cpu")
        centre = self._expected()
        half = -torch.special.ndtri(tail).item() * self._variance().sqrt()
        return Interval(self._out(centre - half), self._out(centre + half))

    def part(self, rows: Tensor | slice) -> StudentPrediction:
        """Return the prediction of some of the inputs.

        Args:
            rows (Tensor or slice): Their numbers, or a mask.
        """
        return replace(
            self,
            centre=self.centre[rows],
            deviations=self.deviations[:, rows],
            log_uncertainty=self.log_uncertainty[rows],
            log_scores=self.log_scores[rows],
        )

    def first(self, count: int) -> StudentPrediction:
        """Return the prediction of the first few inputs.

        Args:
            count (int): The number of inputs.
        """
        return self.part(slice(count))

    def __getattr__(self, name: str) -> NoReturn:
        """Raise an error; for what needs functions from the posterior, one that says so."""
        if name in _OF_FUNCTIONS:
            self._refuse(name, AttributeError)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")

    def _is_of_outputs(self) -> bool:
        """Whether the targets are the outputs with noise, so that their means are the same."""
        return self.likelihood.real_valued and torch.equal(self._expected(), self.centre)

    def _expected(self) -> Tensor:
        return self.likelihood.mean(self.centre)

    def _uncertainties(self) -> tuple[Tensor, Tensor]:
        uncertainty = self.log_uncertainty.exp()
        if not self.likelihood.gives_probabilities:
            epistemic, aleatoric = uncertainty.chunk(2, -1)
            return aleatoric, epistemic
        entropy = self.likelihood.entropy(self.centre[None])
        if not self.likelihood.elementwise:
            uncertainty = uncertainty[..., 0]
        epistemic = torch.minimum(uncertainty, entropy)
        return entropy - epistemic, epistemic

    def _ood_scores(self) -> Tensor:
        return infinite_if_nan(self.log_scores.double().exp())

    def _p_values(
        self, reference: Reference, prediction: Conformal, score: Score = "all"
    ) -> Tensor:
        scores = self._ood_scores()
        some = chosen(score, scores.shape[1], scores.shape[1])
        return p_values(reference.unusual[:, some], scores[:, some], self._room())

    def _judged(self, name: str, by_labels: bool = False) -> tuple[Reference, Conformal]:
        if self.reference is None:
            raise ValueError(
                f"{name} compares inputs with a validation set, but this student has none. Call "
                "student.calibrate(validation_loader) first: the reference of la.calibrate is for "
                "the posterior's own scores."
            )
        return self.reference, self

    def _aligned(self, y: Tensor) -> Tensor:
        """Move the outputs' axis of targets last, and check that they fit."""
        y = self.likelihood.align(as_targets(y).to(self.centre.device), self.class_dim)
        self.likelihood.check(self.centre, y)
        return y

    def _require(self, holds: bool, name: str, other: str) -> None:
        if not holds:
            raise TypeError(
                f"A student under {type(self.likelihood).__name__} has no .{name}. Use .{other}, or "
                f"la.predict(x).{name} of the posterior if it has it."
            )

    def _refuse(self, name: str, kind: type[Exception]) -> NoReturn:
        raise kind(without_functions(name, "la.predict(x)"))

    def _table(self) -> tuple[str, list[tuple[str, ...]]]:
        return of_examples("Prediction of a student", self)
