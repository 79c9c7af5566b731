"""The verbs of a predictive distribution: moments of f, and of targets y."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction.functions import log_mean_exp, quantile
from torch_lla_em.prediction.mixture import FunctionMixture, Part
from torch_lla_em.prediction.scores import (
    Interval,
    aligned,
    gaussian_entropy,
    gaussian_interval,
    require_share,
)

Own = TypeVar("Own", bound="Distribution")


@dataclass(frozen=True, repr=False, eq=False)
class Distribution:
    """The distribution of f and of y at B inputs: all that a ``Prediction`` is without a reference."""

    mixture: FunctionMixture
    """The components with their weights, classes last."""

    class_dim: int = -1
    """The axis of the classes in the network's outputs."""

    @classmethod
    def of(
        cls: type[Own],
        likelihood: Likelihood,
        centre: Tensor,
        deviations: Tensor,
        class_dim: int = -1,
    ) -> Own:
        """Return the prediction by a mean of f, (B, ..., C), and samples minus it, (K, B, ..., C).

        Args:
            likelihood (Likelihood): The likelihood.
            centre (Tensor): The mean, classes last.
            deviations (Tensor): The samples minus the mean.
            class_dim (int): The axis of the classes in the network's outputs. Default -1.
        """
        part = Part(likelihood, centre, deviations)
        return cls(FunctionMixture((part,), centre.new_ones(1)), class_dim)

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood, of an ensemble that of the first member: they may differ in σ."""
        return self.mixture.components[0].likelihood

    @property
    def centre(self) -> Tensor:
        """The mean of f, with the classes last."""
        return self.mixture.mean()

    @property
    def mean(self) -> Tensor:
        """The mean of f, shape (B, ..., C)."""
        return self._out(self.mixture.mean())

    @property
    def variance(self) -> Tensor:
        """The variance of f, without observation noise, shape (B, ..., C)."""
        return self._out(self.mixture.variance_of_f())

    @property
    def covariance(self) -> Tensor:
        """The covariance of f over all inputs and outputs, of ``mean.flatten()``, (B C, B C)."""
        return self.mixture.covariance(lambda rows: self._out(rows, 1).flatten(1))

    @property
    def samples(self) -> Tensor:
        """K samples of f, (K, B, ..., C), joint over inputs: f + √τ J w_k for a single posterior.

        Further functions of the mixture replace some of them in proportion to their weight. An
        ensemble has the samples of all members.
        """
        return self._out(self.mixture.samples(), 1)

    @property
    def functions(self) -> Tensor:
        """Functions of equal weight that averages such as ``probs`` are taken over, (S, B, ..., C).

        They have the mean and the covariance of the samples, and S is at least 2 K: each has its
        mirror image, and random rotations of the samples reduce the error of averages. Further
        functions of the mixture are repeated in proportion to their weight.
        """
        return self._out(self.mixture.alike(), 1)

    @property
    def predictive_samples(self) -> Tensor:
        """E[y | f_k]: the samples after the link function, such as softmax, (K, B, ..., C)."""
        return self._out(self.likelihood.mean(self.mixture.samples()), 1)

    @property
    def expectation(self) -> Tensor:
        """E[y], (B, ..., C): probabilities of classes and labels, rates of counts, or the mean."""
        return self._out(self.mixture.expected())

    @property
    def predictive_variance(self) -> Tensor:
        """The variance of y, with observation noise, (B, ..., C); of labels p (1 - p), that of each indicator."""
        if self.likelihood.gives_probabilities:
            return self.probs * (1 - self.probs)
        return self._out(self.mixture.variance())

    @property
    def standard_error(self) -> Tensor:
        """Monte Carlo standard error of ``expectation`` with K samples, (B, ..., C).

        It is that of the samples' covariance, and has not the errors of λ and of the curvature. On seven tables,
        fits with different seeds differed by 0.8 to 1.0 times as much. It is 0 for continuous targets and NaN for
        a single sample.
        """
        if self.likelihood.real_valued:
            return torch.zeros_like(self.expectation)
        return self._out(self.mixture.squared_error().sqrt())

    @property
    def probs(self) -> Tensor:
        """The probability of every class or label, (B, ..., C); a TypeError if E[y] is not a probability."""
        self._require(self.likelihood.gives_probabilities, "probs")
        return self.expectation

    @property
    def log_probs(self) -> Tensor:
        """The logarithm of ``probs``, (B, ..., C), which is finite even if they underflow."""
        self._require(self.likelihood.gives_probabilities, "log_probs")
        log_mean, weights = self.likelihood.log_mean, self.mixture.function_weights
        return self._out(self.mixture.over_rows(lambda f, _: log_mean_exp(log_mean(f), weights)))

    @property
    def entropy(self) -> Tensor:
        """The entropy of y in nats: one value per label for classes, (B, ...), else per output.

        For regression it is that of a Gaussian with the same mean and variance.
        """
        if self.likelihood.real_valued:
            return self._out(gaussian_entropy(self.mixture.variance()))
        entropy, weights = self.likelihood.entropy, self.mixture.function_weights
        more = () if weights is None else (weights,)
        return self._out(self.mixture.over_rows(lambda f, _: entropy(f, *more)))

    @property
    def aleatoric(self) -> Tensor:
        """Uncertainty that more data would not reduce: expected entropy, or E[Var[y | f]]."""
        return self._out(self.mixture.uncertainties()[0])

    @property
    def epistemic(self) -> Tensor:
        """Uncertainty that more data would reduce: mutual information, or Var[E[y | f]]."""
        return self._out(self.mixture.uncertainties()[1])

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
        require_share(level)
        mixture, mean, weights = self.mixture, self.likelihood.mean, self.mixture.function_weights
        if self.likelihood.real_valued:
            ends = gaussian_interval(mixture.expected(), mixture.variance(), level)
        elif self.likelihood.monotone and len(mixture.components) == 1:
            around = gaussian_interval(mixture.mean(), mixture.variance_of_f(), level)
            ends = Interval(*map(mean, around))
        else:
            tails = 0.5 - 0.5 * level, 0.5 + 0.5 * level

            def quantiles(f: Tensor, _: slice) -> Tensor:
                return torch.stack([quantile(mean(f), share, weights) for share in tails])

            ends = Interval(*mixture.over_rows(quantiles, 1))
        return Interval(*map(self._out, ends))

    def smoothed(self) -> Tensor:
        """Return E[y], (B, ..., C), from mean and variance of f in closed form: the probit approximation."""
        return self._out(self.mixture.smoothed())

    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Draw targets y, joint over inputs given f.

        Args:
            n (int): Number of draws. Default 1.
            generator (torch.Generator, optional): Source of randomness. Default None: torch's own.

        Returns:
            Tensor (n, B, ...): targets as in the training data, for each draw.

        Example:
            >>> y = regression.predict(x).sample(100)
        """
        f, chosen = self.mixture.drawn(n, generator)
        draw = self.likelihood.sample(f, generator)
        for number, part in enumerate(self.mixture.components[1:], 1):
            own = (chosen == number).nonzero()[:, 0]
            if part.likelihood is not self.likelihood and len(own):  # with a σ of its own
                draw[own] = part.likelihood.sample(f[own], generator)
        return self._out(draw, 1)

    def cdf(self, y: Tensor) -> Tensor:
        """Return P(Y <= y) of each continuous output on its own, (B, ..., C).

        Args:
            y (Tensor): Targets, as in the training data.
        """
        self._require(self.likelihood.real_valued, "cdf")
        return self._out(self.mixture.gaussians().cdf(self._aligned(y)))

    def quantile(self, q: float) -> Tensor:
        """Return the value that each continuous output is below with probability q, (B, ..., C).

        Args:
            q (float): A probability, between 0 and 1.

        Example:
            >>> median = regression.predict(x).quantile(0.5)
        """
        self._require(self.likelihood.real_valued, "quantile")
        return self._out(self.mixture.gaussians().quantile(require_share(q, "q")))

    def crps(self, y: Tensor) -> Tensor:
        """Return the continuous ranked probability score of each continuous output, (B, ..., C).

        It is E|Y - y| - E|Y - Y'| / 2 in closed form, in the units of y; lower is better.

        Args:
            y (Tensor): Targets, as in the training data.

        Example:
            >>> score = regression.predict(x).crps(regression.predict(x).mean).mean()
        """
        self._require(self.likelihood.real_valued, "crps")
        return self._out(self.mixture.gaussians().crps(self._aligned(y)))

    def log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y_n | x_n) of each example on its own, (B,); several continuous outputs count as independent.

        Args:
            y (Tensor): Targets, as in the training data.

        Raises:
            ValueError: If the targets do not fit the outputs.

        Example:
            >>> nll = -la.predict(x).log_prob(y).mean()
        """
        return self.mixture.log_prob(self._aligned(y))

    def joint_log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y_1..y_B | x_1..x_B), (): by the samples' covariance if it has a closed form.

        Args:
            y (Tensor): Targets, as in the training data.
        """
        return self.mixture.joint_log_prob(self._aligned(y))

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

    def _out(self, values: Tensor, leading: int = 0) -> Tensor:
        """Move the classes, if there are any, back to their axis in the model's outputs."""
        axis = self.class_dim
        if axis == -1 or values.dim() < self.mixture.f.dim() + leading:
            return values
        return values.movedim(-1, axis + leading * (axis >= 0))
