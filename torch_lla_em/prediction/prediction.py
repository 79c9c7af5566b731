"""Predictions of a posterior: moments of f and of targets y, and their comparison with a validation set."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.likelihoods import (
    HeteroscedasticRegression,
    Likelihood,
    average,
    mean_square,
)
from torch_lla_em.prediction import comparison, targets
from torch_lla_em.prediction.arrays import aligned, gaussian_entropy, rounding
from torch_lla_em.prediction.functions import JOINT, in_shares, log_mean_exp, over_rows
from torch_lla_em.prediction.reference import Reference, Stated, ood_scores
from torch_lla_em.prediction.summary import Cells, Printed, of_examples
from torch_lla_em.runtime import without_autocast

_FORMER = {"variance": "f_variance", "covariance": "f_covariance"}
"""Names of 0.4, which work for one more version, and what replaces them."""


@dataclass(frozen=True, repr=False, eq=False)
class Prediction(Printed):
    """The predictive distribution at B inputs, as returned by ``la.predict(x)``.

    ``f_mean``, ``f_variance``, ``f_covariance`` and ``samples`` are those of the network's function f, without
    observation noise; ``mean``, ``predictive_variance``, ``probs`` and what follows from them are those of
    targets y. After ``calibrate``, ``p_value``, ``is_ood``, ``prediction_set`` and ``interval`` compare the inputs
    with the validation set. All shapes are those of the network's outputs, (B, ..., C). ``print`` shows a table.

    Example:
        >>> prediction = la.predict(x)
        >>> classes, uncertainty = prediction.probs.argmax(1), prediction.epistemic
    """

    likelihoods: tuple[Likelihood, ...]
    """The likelihood of each component, with its observation noise: posteriors, and functions such as the network."""

    centres: tuple[Tensor, ...]
    """The mean of f of each, (B, ..., C), classes last."""

    deviations: tuple[Tensor, ...]
    """The samples of each minus its mean, √τ J w_k, (K, B, ..., C), joint over inputs; K is 0 for a function."""

    weights: Tensor
    """The weight of each, (components,), with sum 1."""

    owners: tuple[int, ...] = (0,)
    """The number of the posterior of each. The first component of a posterior has the samples."""

    class_dim: int = -1
    """The axis of the classes in the network's outputs."""

    origin: Any = None
    """The ``Pushforward`` that it was made of; None: it cannot be compared with a validation set."""

    reference: Reference | None = None
    """The scores of validation examples that inputs are compared with."""

    stated: Stated = Stated()
    """The groups and weights of the inputs, if the reference has any."""

    room: float = 0.0
    """Relative difference up to which scores are ties, at least: that of the reference's dtype."""

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood, of an ensemble that of the first member: they may differ in σ."""
        return self.likelihoods[0]

    @property
    def f(self) -> Tensor:
        """The mean of the first component, for its shape, dtype and device."""
        return self.centres[0]

    @cached_property
    def members(self) -> tuple[Prediction, ...]:
        """The prediction of each posterior: of a single one, or of all members of an ensemble."""
        return tuple(
            self._of_some(
                [i for i, n in enumerate(self.owners) if n == k],
                self.origin and self.origin.member(k),
            )
            for k in range(1 + self.owners[-1])
        )

    def _of_some(self, some: list[int], origin: Any = None) -> Prediction:
        """Return the prediction of some of the components, by their numbers, as one posterior."""
        lists = self.likelihoods, self.centres, self.deviations
        parts: list[Any] = [tuple(own[i] for i in some) for own in lists]
        weights = self.weights[some]
        parts += [weights / weights.sum(), (0,) * len(some), self.class_dim, origin]
        parts += [self.reference, self.stated, self.room]
        return Prediction(*parts)

    def map(self, change: Callable[[Tensor], Tensor], rows: slice = slice(None)) -> Prediction:
        """Return the prediction of some inputs, alone, with every tensor of values changed.

        Args:
            change (callable): Maps tensors whose last axes are (B, ..., C).
            rows (slice): Which inputs. Default: all.
        """
        centres = tuple(change(centre[rows]) for centre in self.centres)
        deviations = tuple(change(d[:, rows]) for d in self.deviations)
        parts = self.likelihoods, centres, deviations, self.weights, self.owners
        return Prediction(*parts, self.class_dim)

    # f

    @property
    def centre(self) -> Tensor:
        """The mean of f, with the classes last."""
        return self._averaged(self.centres)

    @property
    def f_mean(self) -> Tensor:
        """The mean of f, shape (B, ..., C)."""
        return self.shaped(self.centre)

    @property
    def f_variance(self) -> Tensor:
        """The variance of f, without observation noise, shape (B, ..., C)."""
        return self.shaped(self._total(map(mean_square, self.deviations), self.centres))

    @property
    def f_covariance(self) -> Tensor:
        """The covariance of f over all inputs and outputs, of ``f_mean.flatten()``, (B C, B C)."""
        mean, found = self.centre, []
        with without_autocast(mean.device):
            for centre, deviations in zip(self.centres, self.deviations):
                size = max(1, len(deviations)) ** 0.5
                rows = torch.cat([deviations / size, (centre - mean)[None]])
                rows = self.shaped(rows, 1).flatten(1)
                found.append(rows.T @ rows)
        return self._averaged(found)

    @property
    def samples(self) -> Tensor:
        """K samples of f, (K, B, ..., C), joint over inputs: f + √τ J w_k for a single posterior.

        Further components replace some of them in proportion to their weight. An
        ensemble has the samples of all members.
        """
        found = []
        for each in self.members:
            first, *others = each.centres
            samples = first + each.deviations[0]
            found.append(in_shares(samples, others, each.weights) if others else samples)
        return self.shaped(torch.cat(found), 1)

    def joint_deviations(self) -> Tensor:
        """Return samples minus the mean, classes last: those of the posterior, or those of all posteriors."""
        if self.owners[-1] == 0:
            return self.deviations[0]
        mean = self.centre
        return torch.cat([m.deviations[0] + (m.centre - mean) for m in self.members])

    # y

    @property
    def expectation(self) -> Tensor:
        """E[y], (B, ..., C): probabilities of classes and labels, rates of counts, or the mean."""
        mean = self.likelihoods[0].mean
        if self.likelihoods[0].real_valued:
            return self.shaped(mean(self.centre))
        return self.shaped(over_rows(self, lambda f, weights, _: average(mean(f), weights)))

    @property
    def mean(self) -> Tensor:
        """The same as ``expectation``, under every likelihood."""
        return self.expectation

    @property
    def log_variance(self) -> Tensor:
        """The mean of the log variance of the noise, (B, ..., C), that a heteroscedastic network predicts."""
        holds = isinstance(self.likelihood, HeteroscedasticRegression)
        targets.require_kind(holds, self, "log_variance", "its network predicts no noise")
        return self.shaped(self.centre.chunk(2, -1)[1])

    @property
    def predictive_variance(self) -> Tensor:
        """The variance of y, with observation noise, (B, ..., C); of labels p (1 - p), that of each indicator."""
        if self.likelihood.gives_probabilities:
            return self.probs * (1 - self.probs)
        aleatoric, epistemic = self.uncertainties()
        return self.shaped(aleatoric + epistemic)

    @property
    def standard_error(self) -> Tensor:
        """Monte Carlo standard error of ``expectation`` with K samples, (B, ..., C).

        On seven tables, fits with different seeds differed by 0.8 to 1.0 times as much. It is 0 for continuous
        targets and NaN for a single sample.
        """
        if self.likelihood.real_valued:
            return torch.zeros_like(self.expectation)
        # an average over a sample and its mirror image is nearly quadratic in it, so its spread over samples is that of
        # their covariance, which rotations do not reduce
        each = []
        for own in self.members:
            mean, K = own.likelihood.mean, len(own.deviations[0])

            def squared(f: Tensor, *_: Any, mean: Any = mean, K: int = K) -> Tensor:
                values, half = mean(f), len(f) // 2
                pairs = 0.5 * (values[:K] + values[half : half + K])
                # NaN for a single sample, and 0 without
                apart: Tensor = (pairs - pairs.mean(0)).square().sum(0)
                return apart / (K * (K - 1) if K else 1)

            each.append(own.weights[0] ** 2 * over_rows(own._of_some([0]), squared))
        return self.shaped((torch.stack(each).mean(0) / len(each)).sqrt())

    @property
    def probs(self) -> Tensor:
        """The probability of every class or label, (B, ..., C); a TypeError if E[y] is not a probability."""
        self._require_probabilities("probs")
        return self.expectation

    @property
    def log_probs(self) -> Tensor:
        """The logarithm of ``probs``, (B, ..., C), which is finite even if they underflow."""
        self._require_probabilities("log_probs")
        log_mean = self.likelihood.log_mean
        found = over_rows(self, lambda f, weights, _: log_mean_exp(log_mean(f), weights))
        return self.shaped(found)

    @property
    def entropy(self) -> Tensor:
        """The entropy of y in nats: one value per label for classes, (B, ...), else per output.

        For regression it is that of a Gaussian with the same mean and variance.
        """
        if self.likelihood.real_valued:
            return gaussian_entropy(self.predictive_variance)
        entropy = self.likelihood.entropy
        return self.shaped(over_rows(self, lambda f, w, _: entropy(f, w)))

    @property
    def aleatoric(self) -> Tensor:
        """Uncertainty that more data would not reduce: expected entropy, or E[Var[y | f]]."""
        return self.shaped(self.uncertainties()[0])

    @property
    def epistemic(self) -> Tensor:
        """Uncertainty that more data would reduce: mutual information, or Var[E[y | f]]."""
        return self.shaped(self.uncertainties()[1])

    def uncertainties(self) -> tuple[Tensor, Tensor]:
        """Return the aleatoric and the epistemic uncertainty, classes last."""
        likelihood, mean = self.likelihood, self.likelihood.mean
        if likelihood.observation_noise is not None:  # mean is linear
            means = map(mean, self.centres)
            spread = self._total((mean_square(mean(d)) for d in self.deviations), means)
            each = (own.variance(centre) for own, centre in zip(self.likelihoods, self.centres))
            return self._averaged(each), spread
        both = over_rows(self, lambda f, w, _: torch.stack(likelihood.uncertainties(f, w)), 1)
        return both[0], both[1]

    credible_interval, sample = targets.credible_interval, targets.sample
    cdf, quantile, crps = targets.cdf, targets.quantile, targets.crps

    def log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y_n | x_n) of each example by itself, (B,).

        For an example with several labels, such as pixels, tokens or outputs, it is their joint log-probability: they
        depend on each other through the posterior (the outputs of one regression are independent). ``calibrate``,
        ``compare`` and ``report`` judge each label by itself. For classes that is
        ``nll_loss(prediction.log_probs, y)``.

        Args:
            y (Tensor): Targets, as in the training data.

        Example:
            >>> nll = -la.predict(x).log_prob(y).mean()
        """
        return self.log_density(self.aligned(y))

    def joint_log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y_1..y_B | x_1..x_B), (): by the samples' covariance if it has a closed form.

        Args:
            y (Tensor): Targets, as in the training data.
        """
        return self.log_density(self.aligned(y), joint=True)

    def log_density(self, y: Tensor, joint: bool = False) -> Tensor:
        """Return the same of targets that are aligned.

        Args:
            y (Tensor): Targets with the outputs last.
            joint (bool): Whether it is that of all inputs together. Default False.
        """
        found = []
        for i, own in enumerate(self.likelihoods):
            known = own.predictive_log_prob(self.centres[i], self.deviations[i], y, joint)
            if known is None:
                one, log_prob = self._of_some([i]), own.log_prob
                if joint:
                    each = over_rows(one, lambda f, _, rows: log_prob(f, y[rows]), 1, JOINT)
                    known = log_mean_exp(each.sum(1))
                else:
                    known = over_rows(one, lambda f, _, rows: log_mean_exp(log_prob(f, y[rows])))
            found.append(known)
        return log_mean_exp(torch.stack(found), self.weights)

    # comparison with a validation set

    @cached_property
    def scored(self) -> tuple[Tensor, Tensor]:
        """The out-of-distribution scores that p-values compare, and their units."""
        return ood_scores(self, *(self.origin.distances() if self.origin else (None, None)))

    @property
    def p_value(self) -> Tensor:
        """Conformal p-value of each input for being from the validation set's distribution, (B,).

        It is the share of reference examples that are at least as unusual as the input, the input included. For
        inputs from that distribution, P(p_value <= rate) <= rate; with ``groups`` within each of them.
        An example is unusual if its ``epistemic`` uncertainty, or its distances to the nearest training example
        are large; ``p_values`` takes some of these scores alone.

        Raises:
            ValueError: Before ``calibrate``.
        """
        return self.p_values()

    p_values, is_ood, judged = comparison.p_values, comparison.is_ood, comparison.judged
    compared = comparison.compared
    prediction_set, interval = comparison.prediction_set, comparison.interval

    @cached_property
    def by_reference(self) -> Prediction:
        """The prediction by the numbers that the scores of the reference are of, classes last."""
        reference, sigma, noise = self.reference, self.origin.likelihood.observation_noise, None
        if reference.sigma is not None and sigma is not None:
            noise = reference.sigma / sigma.to(reference.sigma)
        found: Prediction = self.origin.prediction(reference.table, noise)
        return replace(found, class_dim=-1)

    @property
    def ties(self) -> float:
        """Relative difference up to which scores are ties."""
        return max(self.room, rounding(self.f.dtype))

    def aligned(self, y: Tensor) -> Tensor:
        """Return targets with the outputs last; raise an error if they do not fit.

        Args:
            y (Tensor): Targets, as in the training data.
        """
        return aligned(self.likelihood, y, self.f, self.class_dim)

    def _require_probabilities(self, name: str) -> None:
        holds = self.likelihood.gives_probabilities
        targets.require_kind(holds, self, name, "its E[y] is not a probability")

    def _averaged(self, values: Iterable[Tensor]) -> Tensor:
        """Return the mean of a quantity over the components."""
        first, *others = values
        return average(torch.stack([first, *others]), self.weights) if others else first

    def _total(self, within: Iterable[Tensor], means: Iterable[Tensor]) -> Tensor:
        """Return the mean of a variance over the components, plus the variance of a mean."""
        first, *others = within
        if not others:
            return first
        means = list(means)
        mean = self._averaged(means)
        return self._averaged(v + (m - mean).square() for v, m in zip([first, *others], means))

    def shaped(self, values: Tensor, leading: int = 0) -> Tensor:
        """Move the classes, if there are any, back to their axis in the model's outputs.

        Args:
            values (Tensor): Classes last.
            leading (int): The number of axes before the examples. Default 0.
        """
        axis = self.class_dim
        if axis == -1 or values.dim() < self.f.dim() + leading:
            return values
        return values.movedim(-1, axis + leading * (axis >= 0))

    def __getattr__(self, name: str) -> Any:
        if name not in _FORMER:
            raise AttributeError(f"A Prediction has no attribute {name!r}.")
        words = (
            f"Prediction.{name} is that of f, without observation noise: write .{_FORMER[name]}, or"
        )
        warnings.warn(f"{words} .predictive_variance for y.", DeprecationWarning, stacklevel=2)
        return getattr(self, _FORMER[name])

    def _table(self) -> tuple[str, Cells]:
        return of_examples("Prediction", self)
