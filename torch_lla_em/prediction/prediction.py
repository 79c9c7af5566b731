"""Predictive distributions: of functions f + √τ J w_k, and of targets given them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import pi
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import as_targets
from torch_lla_em.likelihoods import Regression, average, sum_rows
from torch_lla_em.prediction.conformal import Conformal, Interval
from torch_lla_em.prediction.functions import (
    JOINT,
    joint_gaussian,
    log_mean,
    number_of_functions,
    own_precision,
    pair_error,
    quantile,
)
from torch_lla_em.prediction.summary import Cells, Printed, of_prediction


class Moments(NamedTuple):
    """Mean and variance of y, with observation noise."""

    mean: Tensor
    variance: Tensor


@dataclass(frozen=True, repr=False)
class Prediction(Printed, Conformal):
    """The predictive distribution at B inputs, as returned by ``la.predict(x)``.

    It describes the network's function f, without observation noise, by ``mean``,
    ``function_variance``, ``covariance`` and ``samples``; and the targets y by ``expectation``,
    ``probs``, ``predictive_variance``, ``credible_interval`` and ``log_prob``. After ``calibrate``,
    ``p_value``, ``is_ood``, ``prediction_set`` and ``interval`` compare the inputs with the
    validation set. All shapes are those of the network's outputs, (B, ..., C).

    The distribution is a mixture of the posterior and of further functions without uncertainty. The
    prediction of a ``LaplaceEnsemble`` averages the mixtures of its members. ``print`` shows a table.

    Example:
        >>> prediction = la.predict(x)
        >>> classes, uncertainty = prediction.probs.argmax(1), prediction.epistemic
    """

    @staticmethod
    def averaged(members: Sequence[Prediction], class_dim: int = -1) -> Prediction:
        """Return the equally weighted mixture of predictions at the same inputs.

        Args:
            members (sequence of Prediction): The predictions of several posteriors.
            class_dim (int): The axis of the classes in the networks' outputs. Default -1.
        """
        members = tuple(replace(member, class_dim=class_dim) for member in members)
        means = torch.stack([member._mean() for member in members])
        centre = means.mean(0)
        apart = torch.cat([m.deviations + (at - centre) for m, at in zip(members, means)])
        found = members[0].likelihood, centre, apart, class_dim
        known = [member.nearest for member in members if member.nearest is not None]
        if len(known) < len(members):
            return Prediction(*found, members=members)

        def nearest() -> Tensor:
            return torch.stack([distance() for distance in known]).mean(0)

        return Prediction(*found, members=members, nearest=nearest)

    @property
    def mean(self) -> Tensor:
        """The mean of f, shape (B, ..., C)."""
        return self._out(self._mean())

    @property
    def function_variance(self) -> Tensor:
        """The variance of f, without observation noise, shape (B, ..., C)."""
        return self._out(self._variance_of_f())

    @property
    def variance(self) -> Tensor:
        """The variance of f, without observation noise: the same as ``function_variance``."""
        return self.function_variance

    @property
    def covariance(self) -> Tensor:
        """The covariance of f over all inputs and outputs, of ``mean.flatten()``, (B C, B C)."""
        parts = self.members or self._centres()
        means = [p.mean if self.members else self._out(p) for p in parts]
        apart = (torch.stack(means) - self.mean).flatten(1)
        weights = self._weights_of_parts(len(apart)).to(apart)
        if self.members:
            within = torch.stack([member.covariance for member in self.members]).mean(0)
        else:
            flat = self._out(self.deviations, leading=1).flatten(1)
            with own_precision(flat):
                within = weights[0] * (flat.T @ flat / len(flat))
        with own_precision(apart):
            return within + apart.T @ (weights[:, None] * apart)

    @property
    def samples(self) -> Tensor:
        """K samples of f, (K, B, ..., C), joint over inputs: f + √τ J w_k for a single posterior.

        Further functions of the mixture replace some of them in proportion to their weight. An
        ensemble has the samples of all members.
        """
        return self._out(torch.cat([member._samples() for member in self._parts]), leading=1)

    @property
    def functions(self) -> Tensor:
        """Functions of equal weight that averages such as ``probs`` are taken over, (S, B, ..., C).

        They have the mean and the covariance of the samples, and S is at least 2 K: each has its
        mirror image, and random rotations of the samples reduce the error of averages. Further
        functions of the mixture are repeated in proportion to their weight.
        """
        return self._out(torch.cat([member._alike() for member in self._parts]), leading=1)

    @property
    def predictive_samples(self) -> Tensor:
        """E[y | f_k]: the samples after the link function, such as softmax, (K, B, ..., C)."""
        samples = torch.cat([member._samples() for member in self._parts])
        return self._out(self.likelihood.mean(samples), leading=1)

    @property
    def expectation(self) -> Tensor:
        """E[y], (B, ..., C): probabilities of classes and labels, rates of counts, or the mean."""
        return self._out(self._expected())

    @property
    def predictive_variance(self) -> Tensor:
        """The variance of y, with observation noise, shape (B, ..., C).

        For regression it is ``function_variance`` + σ², the second value that ``la(x)`` returns. For
        classes and labels it is p (1 - p), the variance of the indicator of each.
        """
        if self.likelihood.gives_probabilities:
            return self.probs * (1 - self.probs)
        return self._site_values(self._variance())

    @property
    def standard_error(self) -> Tensor:
        """Monte Carlo standard error of ``expectation`` with K samples, (B, ..., C).

        It does not include the errors of λ and of the curvature, so fits with different seeds differ
        by more. It is 0 for continuous targets and NaN for a single sample.
        """
        errors = torch.stack([member._standard_error() for member in self._parts])
        return self._out(errors.square().sum(0).sqrt() / len(errors))

    @property
    def probs(self) -> Tensor:
        """The probability of every class or label, (B, ..., C).

        Raises:
            TypeError: If E[y] is not a probability; use ``expectation`` then.
        """
        self._require_probabilities("probs")
        return self.expectation

    @property
    def log_probs(self) -> Tensor:
        """The logarithm of ``probs``, (B, ..., C), which is finite even if they underflow.

        Raises:
            TypeError: If E[y] is not a probability.
        """
        self._require_probabilities("log_probs")
        weights = self._weights()
        values = self._over_rows(lambda f, _: log_mean(self.likelihood.log_mean(f), weights))
        return self._out(values)

    @property
    def entropy(self) -> Tensor:
        """The entropy of y in nats: one value per label for classes, (B, ...), else per output.

        For regression it is that of a Gaussian with the same mean and variance.
        """
        if self.likelihood.real_valued:
            return self._out(0.5 * (2 * pi * self._variance()).log() + 0.5)
        weights = self._weighting()
        return self._site_values(self._over_rows(lambda f, _: self.likelihood.entropy(f, *weights)))

    @property
    def aleatoric(self) -> Tensor:
        """Uncertainty that more data would not reduce: expected entropy, or E[Var[y | f]]."""
        return self._site_values(self._uncertainties()[0])

    @property
    def epistemic(self) -> Tensor:
        """Uncertainty that more data would reduce: mutual information, or Var[E[y | f]]."""
        return self._site_values(self._uncertainties()[1])

    def moments(self) -> Moments:
        """Return E[y] and the variance of y, with observation noise.

        Returns:
            ``Moments`` of ``mean`` and ``variance``, each of shape (B, ..., C).
        """
        return Moments(self.expectation, self.predictive_variance)

    def credible_interval(self, level: float = 0.95) -> Interval:
        """Return an interval that contains y, or E[y | f], with probability ``level``.

        For regression it is a prediction interval of y, with observation noise. Otherwise it is a
        credible interval of the probability or rate E[y | f].

        Args:
            level (float): Probability under the posterior, between 0 and 1. Default 0.95. For a
                guaranteed coverage use ``interval``, after ``calibrate``.

        Returns:
            An ``Interval`` of ``lower`` and ``upper``, each of shape (B, ..., C).

        Raises:
            ValueError: If ``level`` does not lie between 0 and 1.

        Example:
            >>> lower, upper = la.predict(x).credible_interval(0.9)
        """
        if not 0 < level < 1:
            raise ValueError(f"level must lie between 0 and 1, not {level}.")
        tail = 0.5 - 0.5 * level
        z = -torch.special.ndtri(torch.tensor(tail, dtype=torch.float64, device="cpu")).item()
        if self.likelihood.real_valued:
            centre, half = self._expected(), z * self._variance().sqrt()
            lower, upper = centre - half, centre + half
        elif self.likelihood.monotone and self.beside is None:
            half = z * self._variance_of_f().sqrt()
            lower = self.likelihood.mean(self.centre - half)
            upper = self.likelihood.mean(self.centre + half)
        else:
            weights = self._weights()

            def quantiles(f: Tensor, _: slice) -> Tensor:
                values = self.likelihood.mean(f)
                return torch.stack([quantile(values, q, weights) for q in (tail, 1 - tail)])

            lower, upper = self._over_rows(quantiles, dim=1)
        return Interval(self._out(lower), self._out(upper))

    def smoothed(self, shared: bool = False) -> Tensor:
        """Return E[y] in closed form from mean and variance of f: the probit approximation.

        Args:
            shared (bool): Give all classes of an input the same variance, so that the most probable
                class stays the network's. Default False.

        Returns:
            Probabilities or rates, shape (B, ..., C).
        """
        each = [member._smoothed(shared) for member in self._parts]
        return self._out(torch.stack(each).mean(0))

    def log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y_n | x_n) of each example on its own, shape (B,).

        Args:
            y (Tensor): Targets, as in the training data.

        Raises:
            ValueError: If the targets do not fit the outputs.

        Example:
            >>> nll = -la.predict(x).log_prob(y).mean()
        """
        return self._log_prob(self._aligned(y))

    def joint_log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y_1..y_B | x_1..x_B), shape (): the samples are joint over inputs.

        Under a Gaussian likelihood it is computed in closed form from the samples' covariance,
        otherwise as an average over functions.

        Args:
            y (Tensor): Targets, as in the training data.

        Raises:
            ValueError: If the targets do not fit the outputs.
        """
        y = self._aligned(y)
        return log_mean(torch.stack([member._own_joint_log_prob(y) for member in self._parts]))

    def _log_prob(self, y: Tensor) -> Tensor:
        return log_mean(torch.stack([member._own_log_prob(y) for member in self._parts]))

    def _own_log_prob(self, y: Tensor) -> Tensor:
        if self._is_gaussian:
            variance = self._variance()
            error = y - self.likelihood.mean(self.centre)
            return sum_rows(-0.5 * (error**2 / variance + (2 * pi * variance).log()), y)
        weights = self._weights()
        return self._over_rows(
            lambda f, rows: log_mean(self.likelihood.log_prob(f, y[rows]), weights)
        )

    def _own_joint_log_prob(self, y: Tensor) -> Tensor:
        if self._is_gaussian:
            residual = y - self.likelihood.mean(self.centre)
            sigma = self.likelihood.variance(self.centre).sqrt()
            return joint_gaussian(residual, self.likelihood.mean(self.deviations), sigma)
        every = self._over_rows(lambda f, rows: self.likelihood.log_prob(f, y[rows]), 1, JOINT)
        return log_mean(every.sum(1), self._weights(JOINT))

    @property
    def _is_gaussian(self) -> bool:
        return isinstance(self.likelihood, Regression) and self.beside is None

    def _aligned(self, y: Tensor) -> Tensor:
        """Move the outputs' axis of targets last, and check that they fit."""
        y = self.likelihood.align(as_targets(y).to(self.centre.device), -1)
        if self.likelihood.elementwise and y.dim() == self.centre.dim():
            y = y.movedim(self.class_dim, -1)
        self.likelihood.check(self.centre, y)
        return y

    def _require_probabilities(self, name: str) -> None:
        if not self.likelihood.gives_probabilities:
            raise TypeError(
                f"A prediction under {type(self.likelihood).__name__} has no .{name}: its E[y] is "
                "not a probability. Use .expectation, or log_prob(y) for the density of a target."
            )

    def _expected(self) -> Tensor:
        if self.likelihood.real_valued:
            return average(self.likelihood.mean(self._centres()), self.weights)
        weights = self._weights()
        return self._over_rows(lambda f, _: average(self.likelihood.mean(f), weights))

    def _uncertainties(self) -> tuple[Tensor, Tensor]:
        """Return the aleatoric and the epistemic uncertainty."""
        if self.likelihood.real_valued and self.members:
            each = zip(*(member._uncertainties() for member in self.members))
            aleatoric, epistemic = (torch.stack(values).mean(0) for values in each)
            return aleatoric, epistemic + self._spread(Prediction._expected)
        if self._is_gaussian:  # E[y | f] is linear in f
            deviations = self.likelihood.mean(self.deviations)
            return self.likelihood.variance(self.centre), deviations.square().mean(0)
        weights = self._weighting()
        both = self._over_rows(
            lambda f, _: torch.stack(self.likelihood.uncertainties(f, *weights)), dim=1
        )
        return both[0], both[1]

    def _standard_error(self) -> Tensor:
        if self.likelihood.real_valued:
            return torch.zeros_like(self.likelihood.mean(self.centre))
        count, samples = number_of_functions(self.deviations), len(self.deviations)
        share = 1.0 if self.weights is None else self.weights[0].to(self.centre)
        return share * self._over_rows(
            lambda f, _: pair_error(self.likelihood.mean(f[:count]), samples)
        )

    def _smoothed(self, shared: bool) -> Tensor:
        variance = self.deviations.square().mean(0)
        if shared and not self.likelihood.monotone and self.centre.shape[-1] > 1:
            # half the mean variance of a difference of two outputs, which a shift does not change
            contrasts = self.deviations - self.deviations.mean(-1, keepdim=True)
            total = contrasts.square().mean(0).sum(-1, keepdim=True)
            variance = total / (self.centre.shape[-1] - 1)
        smoothed = self.likelihood.smoothed_mean(self.centre, variance)[None]
        if self.beside is not None:
            certain = self.likelihood.smoothed_mean(self.beside, torch.zeros_like(variance))
            smoothed = torch.cat([smoothed, certain])
        return average(smoothed, self.weights)

    def first(self, count: int) -> Prediction:
        """Return the prediction of the first few inputs, detached.

        Args:
            count (int): The number of inputs.
        """
        if self.members:
            return self.averaged([member.first(count) for member in self.members], self.class_dim)
        beside = None if self.beside is None else self.beside[:, :count].detach()
        centre, deviations = self.centre[:count].detach(), self.deviations[:, :count].detach()
        return replace(self, centre=centre, deviations=deviations, beside=beside, judge=None)

    def _table(self) -> tuple[str, Cells]:
        return of_prediction(self)
