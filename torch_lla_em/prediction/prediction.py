"""Predictions of a posterior: moments of f and of targets y, and their comparison with a validation set."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction import comparison
from torch_lla_em.prediction.functions import log_mean_exp, quantile
from torch_lla_em.prediction.mixture import FunctionMixture
from torch_lla_em.prediction.reference import Reference, Scored, Stated, ood_scores
from torch_lla_em.prediction.scores import (
    Interval,
    aligned,
    gaussian_entropy,
    require_share,
    rounding,
)
from torch_lla_em.prediction.summary import Cells, Printed, of_examples


@dataclass(frozen=True, repr=False, eq=False)
class Prediction(Printed):
    """The predictive distribution at B inputs, as returned by ``la.predict(x)``.

    ``mean``, ``variance``, ``covariance`` and ``samples`` are those of the network's function f, without
    observation noise; ``expectation``, ``predictive_variance``, ``probs`` and what follows from them are those of
    targets y. After ``calibrate``, ``p_value``, ``is_ood``, ``prediction_set`` and ``interval`` compare the inputs
    with the validation set. All shapes are those of the network's outputs, (B, ..., C). ``print`` shows a table.

    Example:
        >>> prediction = la.predict(x)
        >>> classes, uncertainty = prediction.probs.argmax(1), prediction.epistemic
    """

    mixture: FunctionMixture
    """The components with their weights, classes last: each posterior, and single functions such as the network."""

    class_dim: int = -1
    """The axis of the classes in the network's outputs."""

    origin: Any = None
    """The ``Pushforward`` that it was made of; None: it cannot be compared with a validation set."""

    reference: Reference | None = None
    """The scores of validation examples, or of training examples, that inputs are compared with."""

    stated: Stated = Stated()
    """The groups and weights of the inputs, if the reference has any."""

    room: float = 0.0
    """Relative difference up to which scores are ties, at least: that of the reference's dtype."""

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood, of an ensemble that of the first member: they may differ in σ."""
        return self.mixture.likelihoods[0]

    @property
    def members(self) -> tuple[Prediction, ...]:
        """The prediction of each posterior: of a single one, or of all members of an ensemble."""
        return tuple(
            replace(self, mixture=own, origin=self.origin and self.origin.member(i))
            for i, own in enumerate(self.mixture.posteriors)
        )

    # f

    @property
    def centre(self) -> Tensor:
        """The mean of f, with the classes last."""
        return self.mixture.mean()

    @property
    def mean(self) -> Tensor:
        """The mean of f, shape (B, ..., C)."""
        return self.shaped(self.mixture.mean())

    @property
    def variance(self) -> Tensor:
        """The variance of f, without observation noise, shape (B, ..., C)."""
        return self.shaped(self.mixture.variance_of_f())

    @property
    def covariance(self) -> Tensor:
        """The covariance of f over all inputs and outputs, of ``mean.flatten()``, (B C, B C)."""
        return self.mixture.covariance(lambda rows: self.shaped(rows, 1).flatten(1))

    @property
    def samples(self) -> Tensor:
        """K samples of f, (K, B, ..., C), joint over inputs: f + √τ J w_k for a single posterior.

        Further functions of the mixture replace some of them in proportion to their weight. An
        ensemble has the samples of all members.
        """
        return self.shaped(self.mixture.samples(), 1)

    # y

    @property
    def expectation(self) -> Tensor:
        """E[y], (B, ..., C): probabilities of classes and labels, rates of counts, or the mean."""
        found = self.mixture.expected()
        return found if self.class_dim == -1 else self.shaped(found)

    @property
    def predictive_variance(self) -> Tensor:
        """The variance of y, with observation noise, (B, ..., C); of labels p (1 - p), that of each indicator."""
        if self.likelihood.gives_probabilities:
            return self.probs * (1 - self.probs)
        return self.shaped(self.mixture.variance())

    @property
    def standard_error(self) -> Tensor:
        """Monte Carlo standard error of ``expectation`` with K samples, (B, ..., C).

        It is that of the samples' covariance, and has not the errors of λ and of the curvature. On seven tables,
        fits with different seeds differed by 0.8 to 1.0 times as much. It is 0 for continuous targets and NaN for
        a single sample.
        """
        if self.likelihood.real_valued:
            return torch.zeros_like(self.expectation)
        return self.shaped(self.mixture.squared_error().sqrt())

    @property
    def probs(self) -> Tensor:
        """The probability of every class or label, (B, ..., C); a TypeError if E[y] is not a probability."""
        self._require(self.likelihood.gives_probabilities, "probs")
        return self.expectation

    @property
    def log_probs(self) -> Tensor:
        """The logarithm of ``probs``, (B, ..., C), which is finite even if they underflow."""
        self._require(self.likelihood.gives_probabilities, "log_probs")
        log_mean = self.likelihood.log_mean
        found = self.mixture.over_rows(lambda f, weights, _: log_mean_exp(log_mean(f), weights))
        return self.shaped(found)

    @property
    def entropy(self) -> Tensor:
        """The entropy of y in nats: one value per label for classes, (B, ...), else per output.

        For regression it is that of a Gaussian with the same mean and variance.
        """
        if self.likelihood.real_valued:
            return self.shaped(gaussian_entropy(self.mixture.variance()))
        entropy = self.likelihood.entropy
        return self.shaped(self.mixture.over_rows(lambda f, w, _: entropy(f, w)))

    @property
    def aleatoric(self) -> Tensor:
        """Uncertainty that more data would not reduce: expected entropy, or E[Var[y | f]]."""
        return self.shaped(self.mixture.uncertainties()[0])

    @property
    def epistemic(self) -> Tensor:
        """Uncertainty that more data would reduce: mutual information, or Var[E[y | f]]."""
        return self.shaped(self.mixture.uncertainties()[1])

    def credible_interval(self, level: float = 0.95) -> Interval:
        """Return the interval between equal tails: of continuous targets y, otherwise of E[y | f].

        Args:
            level (float): Probability under the posterior, between 0 and 1. Default 0.95. For a
                guaranteed coverage use ``interval``, after ``calibrate``.

        Returns:
            An ``Interval`` of ``lower`` and ``upper``, each of shape (B, ..., C).

        Example:
            >>> lower, upper = la.predict(x).credible_interval(0.9)
        """
        tails = 0.5 - 0.5 * require_share(level), 0.5 + 0.5 * level
        if self.likelihood.real_valued:
            return Interval(*map(self.quantile, tails))
        mean = self.likelihood.mean

        def quantiles(f: Tensor, weights: Tensor | None, _: slice) -> Tensor:
            return torch.stack([quantile(mean(f), share, weights) for share in tails])

        return Interval(*map(self.shaped, self.mixture.over_rows(quantiles, 1)))

    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Draw targets y, (n, B, ...), joint over inputs given f; for each draw as in the training data.

        Args:
            n (int): Number of draws. Default 1.
            generator (torch.Generator, optional): Source of randomness. Default None: torch's own.

        Example:
            >>> y = regression.predict(x).sample(100)
        """
        return self.shaped(self.mixture.sample(n, generator), 1)

    def cdf(self, y: Tensor) -> Tensor:
        """Return P(Y <= y) of each continuous output on its own, (B, ..., C).

        Args:
            y (Tensor): Targets, as in the training data.
        """
        self._require(self.likelihood.real_valued, "cdf")
        return self.shaped(self.mixture.gaussians().cdf(self._aligned(y)))

    def quantile(self, q: float) -> Tensor:
        """Return the value that each continuous output is below with probability q, (B, ..., C).

        Args:
            q (float): A probability, between 0 and 1.

        Example:
            >>> median = regression.predict(x).quantile(0.5)
        """
        self._require(self.likelihood.real_valued, "quantile")
        return self.shaped(self.mixture.gaussians().quantile(require_share(q, "q")))

    def crps(self, y: Tensor) -> Tensor:
        """Return the continuous ranked probability score of each output, (B, ..., C), in closed form; lower is better.

        Args:
            y (Tensor): Targets, as in the training data.

        Example:
            >>> score = regression.predict(x).crps(regression.predict(x).mean).mean()
        """
        self._require(self.likelihood.real_valued, "crps")
        return self.shaped(self.mixture.gaussians().crps(self._aligned(y)))

    def log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y_n | x_n) of each example on its own, (B,); several continuous outputs count as independent.

        Args:
            y (Tensor): Targets, as in the training data.

        Example:
            >>> nll = -la.predict(x).log_prob(y).mean()
        """
        return self.mixture.log_prob(self._aligned(y))

    def joint_log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y_1..y_B | x_1..x_B), (): by the samples' covariance if it has a closed form.

        Args:
            y (Tensor): Targets, as in the training data.
        """
        return self.mixture.log_prob(self._aligned(y), joint=True)

    # comparison with a validation set

    @cached_property
    def scored(self) -> Scored:
        """The out-of-distribution scores that p-values compare, and their units."""
        return ood_scores(self.mixture, *(self.origin.distances() if self.origin else (None, None)))

    @property
    def p_value(self) -> Tensor:
        """Conformal p-value of each input for being from the validation set's distribution, (B,).

        It is the share of reference examples that are at least as unusual as the input, the input included. For
        inputs from that distribution, P(p_value <= rate) <= rate; with ``groups`` within each of them. Before
        ``calibrate``, with variational curvature, the reference are training examples, to which the network was
        fitted, so that false alarms are more frequent. An example is unusual if its ``epistemic`` uncertainty, or
        its distances to the nearest training example are large; ``p_values`` takes some of these scores alone.

        Raises:
            ValueError: If there are no reference examples: before ``calibrate``, if the curvature is
                not variational.
        """
        return self.p_values()

    p_values, is_ood, judged = comparison.p_values, comparison.is_ood, comparison.judged
    prediction_set, interval = comparison.prediction_set, comparison.interval

    @cached_property
    def by_reference(self) -> Prediction:
        """The prediction by the numbers that the scores of the reference are of."""
        reference, sigma, noise = self.reference, self.origin.likelihood.observation_noise, None
        if reference.sigma is not None and sigma is not None:
            noise = reference.sigma / sigma.to(reference.sigma)
        return replace(self, mixture=self.origin.mixture(reference.table, noise), reference=None)

    def first(self, count: int) -> Prediction:
        """Return the prediction of the first few inputs, detached, without what they are compared with.

        Args:
            count (int): The number of inputs.
        """
        return Prediction(self.mixture.part(slice(count)).map(Tensor.detach), self.class_dim)

    @property
    def ties(self) -> float:
        """Relative difference up to which scores are ties."""
        return max(self.room, rounding(self.mixture.f.dtype))

    def _aligned(self, y: Tensor) -> Tensor:
        return aligned(self.likelihood, y, self.mixture.f, self.class_dim)

    def _require(self, holds: bool, name: str) -> None:
        if not holds:
            kind, what = type(self.likelihood).__name__, "its E[y] is not a probability"
            if not name.endswith("probs"):
                what = "its targets are not continuous"
            raise TypeError(
                f"A prediction under {kind} has no .{name}: {what}. Use .expectation, "
                ".credible_interval(level) or log_prob(y)."
            )

    def shaped(self, values: Tensor, leading: int = 0) -> Tensor:
        """Move the classes, if there are any, back to their axis in the model's outputs.

        Args:
            values (Tensor): Classes last.
            leading (int): The number of axes before the examples. Default 0.
        """
        axis = self.class_dim
        if axis == -1 or values.dim() < self.mixture.f.dim() + leading:
            return values
        return values.movedim(-1, axis + leading * (axis >= 0))

    def _table(self) -> tuple[str, Cells]:
        return of_examples("Prediction", self)
