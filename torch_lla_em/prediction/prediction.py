"""Predictions of a posterior: moments of f and of targets y, and their comparison with a validation
set."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
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
from torch_lla_em.prediction.functions import (
    JOINT,
    Component,
    in_shares,
    log_mean_exp,
    over_rows,
    weights_of,
)
from torch_lla_em.prediction.printed import Cells, Printed, of_examples
from torch_lla_em.prediction.reference import Reference, Stated, ood_scores
from torch_lla_em.runtime import without_autocast

_FORMER = {"variance": "f_variance", "covariance": "f_covariance"}
"""Names of 0.4, which work for one more version, and what replaces them."""


@dataclass(frozen=True, repr=False, eq=False)
class Prediction(Printed):
    """The predictive distribution at B inputs, as returned by ``la.predict(x)``.

    ``f_mean``, ``f_variance``, ``f_covariance`` and ``samples`` are those of the network's function
    f, without observation noise; ``mean``, ``predictive_variance``, ``probs`` and what follows from
    them are those of targets y. After ``calibrate``, ``p_value``, ``is_ood``, ``prediction_set``
    and ``interval`` compare the inputs with the validation set. All shapes are those of the
    network's outputs, (B, ..., C). ``print`` shows a table.

    Example:
        >>> prediction = la.predict(x)
        >>> classes, uncertainty = prediction.probs.argmax(1), prediction.epistemic
    """

    _components: tuple[Component, ...]
    _class_dim: int = -1
    """The axis of the classes in the network's outputs."""

    _origin: Any = None
    """The ``Pushforward`` that it was made of; None: it cannot be compared with a validation
    set."""

    _reference: Reference | None = None
    """The scores of validation examples that inputs are compared with."""

    _stated: Stated = Stated()
    """The groups and weights of the inputs, if the reference has any."""

    _room: float = 0.0
    """Relative difference up to which scores are ties, at least: that of the reference's dtype."""

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood, of an ensemble that of the first member: they may differ in σ."""
        return self._components[0].likelihood

    @cached_property
    def members(self) -> tuple[Prediction, ...]:
        """The prediction of each posterior: of a single one, or of all members of an ensemble."""
        every = range(1 + self._components[-1].owner)
        return tuple(
            replace(self._of_owner(k), _origin=self._origin and self._origin.member(k))
            for k in every
        )

    def _of_owner(self, number: int) -> Prediction:
        """Return the prediction of one posterior alone."""
        owners = [part.owner for part in self._components]
        weights = weights_of(self._components)[[i for i, n in enumerate(owners) if n == number]]
        own = [part for part in self._components if part.owner == number]
        pairs = zip(own, weights / weights.sum(), strict=True)
        parts = tuple(part._replace(weight=weight, owner=0) for part, weight in pairs)
        return replace(self, _components=parts, _origin=None)

    def _map(self, change: Callable[[Tensor], Tensor], rows: slice = slice(None)) -> Prediction:
        """Return the prediction of some inputs, alone, with tensors changed whose last axes are (B,
        ..., C)."""
        parts = (
            part._replace(
                centre=change(part.centre[rows]), deviations=change(part.deviations[:, rows])
            )
            for part in self._components
        )
        return Prediction(tuple(parts), self._class_dim)

    @property
    def _f(self) -> Tensor:
        """The mean of the first component, for its shape, dtype and device."""
        return self._components[0].centre

    # f

    @property
    def _centre(self) -> Tensor:
        """The mean of f, with the classes last."""
        return self._averaged(part.centre for part in self._components)

    @property
    def f_mean(self) -> Tensor:
        """The mean of f, shape (B, ..., C)."""
        return self._shaped(self._centre)

    @property
    def f_variance(self) -> Tensor:
        """The variance of f, without observation noise, shape (B, ..., C)."""
        within = (mean_square(part.deviations) for part in self._components)
        return self._shaped(self._total(within, [part.centre for part in self._components]))

    @property
    def f_covariance(self) -> Tensor:
        """The covariance of f over all inputs and outputs, of ``f_mean.flatten()``, (B C, B C)."""
        mean, blocks = self._centre, []
        with without_autocast(mean.device):
            for part in self._components:
                size = max(1, len(part.deviations)) ** 0.5
                rows = torch.cat([part.deviations / size, (part.centre - mean)[None]])
                rows = self._shaped(rows, 1).flatten(1)
                blocks.append(rows.T @ rows)
        return self._averaged(blocks)

    @property
    def samples(self) -> Tensor:
        """K samples of f, (K, B, ..., C), joint over inputs: f + √τ J w_k for a single posterior.

        Further components replace some of them in proportion to their weight. An
        ensemble has the samples of all members.
        """
        drawn = []
        for member in self.members:
            first, *others = member._components
            samples = first.centre + first.deviations
            if others:
                functions = [part.centre for part in others]
                samples = in_shares(samples, functions, weights_of(member._components))
            drawn.append(samples)
        return self._shaped(torch.cat(drawn), 1)

    def _joint_deviations(self) -> Tensor:
        """Return samples minus the mean, classes last: those of the posterior, or those of all
        posteriors."""
        if self._components[-1].owner == 0:
            return self._components[0].deviations
        mean = self._centre
        return torch.cat([m._components[0].deviations + (m._centre - mean) for m in self.members])

    # y

    @property
    def expectation(self) -> Tensor:
        """E[y], (B, ..., C): probabilities of classes and labels, rates of counts, or the mean."""
        mean, parts = self.likelihood.mean, self._components
        if self.likelihood.real_valued:
            return self._shaped(mean(self._centre))
        return self._shaped(over_rows(parts, lambda f, weights, _: average(mean(f), weights)))

    @property
    def mean(self) -> Tensor:
        """The same as ``expectation``, under every likelihood."""
        return self.expectation

    @property
    def log_variance(self) -> Tensor:
        """The mean of the log variance of the noise, (B, ..., C), that a heteroscedastic network
        predicts."""
        holds = isinstance(self.likelihood, HeteroscedasticRegression)
        targets.require_kind(holds, self, "log_variance", "its network predicts no noise")
        return self._shaped(self._centre.chunk(2, -1)[1])

    @property
    def predictive_variance(self) -> Tensor:
        """The variance of y, with observation noise, (B, ..., C); of labels p (1 - p), that of each
        indicator."""
        if self.likelihood.gives_probabilities:
            return self.probs * (1 - self.probs)
        aleatoric, epistemic = self._uncertainties()
        return self._shaped(aleatoric + epistemic)

    @property
    def standard_error(self) -> Tensor:
        """Monte Carlo standard error of ``expectation`` with K samples, (B, ..., C).

        On seven tables, fits with different seeds differed by 0.8 to 1.0 times as much. It is 0 for
        continuous targets and NaN for a single sample.
        """
        if self.likelihood.real_valued:
            return torch.zeros_like(self.expectation)
        # an average over a sample and its mirror image is nearly quadratic in it, so its spread
        # over samples is that of their covariance, which rotations do not reduce
        variances = []
        for own in self.members:
            first = own._components[0]
            mean, K = own.likelihood.mean, len(first.deviations)

            def squared(f: Tensor, *_: Any, mean: Any = mean, K: int = K) -> Tensor:
                values, half = mean(f), len(f) // 2
                pairs = 0.5 * (values[:K] + values[half : half + K])
                # NaN for a single sample, and 0 without
                apart: Tensor = (pairs - pairs.mean(0)).square().sum(0)
                return apart / (K * (K - 1) if K else 1)

            variances.append(weights_of(own._components)[0] ** 2 * over_rows([first], squared))
        return self._shaped((torch.stack(variances).mean(0) / len(variances)).sqrt())

    @property
    def probs(self) -> Tensor:
        """The probability of every class or label, (B, ..., C); a TypeError if E[y] is not a
        probability."""
        self._require_probabilities("probs")
        return self.expectation

    @property
    def log_probs(self) -> Tensor:
        """The logarithm of ``probs``, (B, ..., C), which is finite even if they underflow."""
        self._require_probabilities("log_probs")
        log_mean = self.likelihood.log_mean

        def averaged(f: Tensor, weights: Tensor | None, _: slice) -> Tensor:
            return log_mean_exp(log_mean(f), weights)

        return self._shaped(over_rows(self._components, averaged))

    @property
    def entropy(self) -> Tensor:
        """The entropy of y in nats: one value per label for classes, (B, ...), else per output.

        For regression it is that of a Gaussian with the same mean and variance.
        """
        if self.likelihood.real_valued:
            return gaussian_entropy(self.predictive_variance)
        entropy = self.likelihood.entropy
        return self._shaped(over_rows(self._components, lambda f, w, _: entropy(f, w)))

    @property
    def aleatoric(self) -> Tensor:
        """Uncertainty that more data would not reduce: expected entropy, or E[Var[y | f]]."""
        return self._shaped(self._uncertainties()[0])

    @property
    def epistemic(self) -> Tensor:
        """Uncertainty that more data would reduce: mutual information, or Var[E[y | f]]."""
        return self._shaped(self._uncertainties()[1])

    def _uncertainties(self) -> tuple[Tensor, Tensor]:
        """Return the aleatoric and the epistemic uncertainty, classes last."""
        likelihood, mean, parts = self.likelihood, self.likelihood.mean, self._components
        if likelihood.observation_noise is not None:  # mean is linear
            within = (mean_square(mean(part.deviations)) for part in parts)
            spread = self._total(within, [mean(part.centre) for part in parts])
            noises = (part.likelihood.variance(part.centre) for part in parts)
            return self._averaged(noises), spread
        both = over_rows(parts, lambda f, w, _: torch.stack(likelihood.uncertainties(f, w)), 1)
        return both[0], both[1]

    credible_interval, sample = targets.credible_interval, targets.sample
    cdf, quantile, crps = targets.cdf, targets.quantile, targets.crps

    def log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y_n | x_n) of each example by itself, (B,).

        For an example with several labels, such as pixels, tokens or outputs, it is their joint
        log-probability: they depend on each other through the posterior (the outputs of one
        regression are independent). ``calibrate``, ``compare`` and ``report`` judge each label by
        itself. For classes that is ``nll_loss(prediction.log_probs, y)``.

        Args:
            y (Tensor): Targets, as in the training data.

        Example:
            >>> nll = -la.predict(x).log_prob(y).mean()
        """
        return self._log_density(self._aligned(y))

    def joint_log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y_1..y_B | x_1..x_B), (): by the samples' covariance if it has a closed
        form.

        Args:
            y (Tensor): Targets, as in the training data.
        """
        return self._log_density(self._aligned(y), joint=True)

    def _log_density(self, y: Tensor, joint: bool = False) -> Tensor:
        """Return the same of targets that are aligned; ``joint``: of all inputs together."""
        every = []
        for part in self._components:
            log_prob = part.likelihood.log_prob
            total = part.likelihood.predictive_log_prob(part.centre, part.deviations, y, joint)
            if total is None and joint:
                each = over_rows([part], lambda f, _, rows: log_prob(f, y[rows]), 1, JOINT)
                total = log_mean_exp(each.sum(1))
            elif total is None:
                total = over_rows([part], lambda f, _, rows: log_mean_exp(log_prob(f, y[rows])))
            every.append(total)
        return log_mean_exp(torch.stack(every), weights_of(self._components))

    # comparison with a validation set

    @cached_property
    def _scored(self) -> tuple[Tensor, Tensor]:
        """The out-of-distribution scores that p-values compare, and their units."""
        return ood_scores(self, *(self._origin.distances() if self._origin else (None, None)))

    @property
    def p_value(self) -> Tensor:
        """Conformal p-value of each input for being from the validation set's distribution, (B,).

        It is the share of reference examples that are at least as unusual as the input, the input
        included. For inputs from that distribution, P(p_value <= rate) <= rate; with ``groups``
        within each of them. An example is unusual if its ``epistemic`` uncertainty, or its
        distances to the nearest training example are large; ``p_values`` takes some of these scores
        alone.

        Raises:
            ValueError: Before ``calibrate``.
        """
        return self.p_values()

    p_values, is_ood, _judged = comparison.p_values, comparison.is_ood, comparison.judged
    _compared_scores = comparison.compared
    prediction_set, interval = comparison.prediction_set, comparison.interval

    @cached_property
    def _by_reference(self) -> Prediction:
        """The prediction by the numbers that the scores of the reference are of, classes last."""
        reference, sigma, noise = self._reference, self._origin.likelihood.observation_noise, None
        if reference.sigma is not None and sigma is not None:
            noise = reference.sigma / sigma.to(reference.sigma)
        found: Prediction = self._origin.prediction(reference.table, noise)
        return replace(found, _class_dim=-1)

    @property
    def _ties(self) -> float:
        """Relative difference up to which scores are ties."""
        return max(self._room, rounding(self._f.dtype))

    def _aligned(self, y: Tensor) -> Tensor:
        """Return targets with the outputs last; raise an error if they do not fit."""
        return aligned(self.likelihood, y, self._f, self._class_dim)

    def _require_probabilities(self, name: str) -> None:
        holds = self.likelihood.gives_probabilities
        targets.require_kind(holds, self, name, "its E[y] is not a probability")

    def _averaged(self, values: Iterable[Tensor]) -> Tensor:
        """Return the mean of a quantity over the components."""
        first, *others = values
        if not others:
            return first
        return average(torch.stack([first, *others]), weights_of(self._components))

    def _total(self, within: Iterable[Tensor], means: Sequence[Tensor]) -> Tensor:
        """Return the mean of a variance over the components, plus the variance of a mean."""
        first, *others = within
        if not others:
            return first
        mean, pairs = self._averaged(means), zip([first, *others], means, strict=True)
        return self._averaged(v + (m - mean).square() for v, m in pairs)

    def _shaped(self, values: Tensor, leading: int = 0) -> Tensor:
        """Move the classes, if there are any, back to their axis in the outputs, after ``leading``
        axes."""
        axis = self._class_dim
        if axis == -1 or values.dim() < self._f.dim() + leading:
            return values
        return values.movedim(-1, axis + leading if axis >= 0 else axis)

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
