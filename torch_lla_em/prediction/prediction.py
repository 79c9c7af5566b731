"""Predictions of a posterior: moments of f and of targets y, and their comparison with a validation set."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction.functions import log_mean_exp, quantile
from torch_lla_em.prediction.mixture import FunctionMixture, given
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
    aligned,
    conformal_interval,
    conformal_set,
    crossed,
    gaussian_entropy,
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

    @classmethod
    def of(
        cls, likelihood: Likelihood, centre: Tensor, deviations: Tensor, class_dim: int = -1
    ) -> Prediction:
        """Return the prediction by a mean of f, (B, ..., C), and samples minus it, (K, B, ..., C).

        Args:
            likelihood (Likelihood): The likelihood.
            centre (Tensor): The mean, classes last.
            deviations (Tensor): The samples minus the mean.
            class_dim (int): The axis of the classes in the network's outputs. Default -1.
        """
        parts = (likelihood,), (centre,), (deviations,)
        return cls(FunctionMixture(*parts, centre.new_ones(1)), class_dim)

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
        """Functions of equal weight, (S, B, ..., C), whose averages are as exact as ``probs``: S is at least 2 K.

        They are the samples, random rotations of them, and the mirror image of each. Further functions of the
        mixture are repeated in proportion to their weight.
        """
        return self._out(self.mixture.alike(), 1)

    # y

    @property
    def expectation(self) -> Tensor:
        """E[y], (B, ..., C): probabilities of classes and labels, rates of counts, or the mean."""
        found = self.mixture.expected()
        return found if self.class_dim == -1 else self._out(found)

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
        log_mean = self.likelihood.log_mean
        found = self.mixture.over_rows(lambda f, weights, _: log_mean_exp(log_mean(f), weights))
        return self._out(found)

    @property
    def entropy(self) -> Tensor:
        """The entropy of y in nats: one value per label for classes, (B, ...), else per output.

        For regression it is that of a Gaussian with the same mean and variance.
        """
        if self.likelihood.real_valued:
            return self._out(gaussian_entropy(self.mixture.variance()))
        entropy = self.likelihood.entropy
        return self._out(self.mixture.over_rows(lambda f, w, _: entropy(f, *given(w))))

    @property
    def aleatoric(self) -> Tensor:
        """Uncertainty that more data would not reduce: expected entropy, or E[Var[y | f]]."""
        return self._out(self.mixture.uncertainties()[0])

    @property
    def epistemic(self) -> Tensor:
        """Uncertainty that more data would reduce: mutual information, or Var[E[y | f]]."""
        return self._out(self.mixture.uncertainties()[1])

    def credible_interval(self, level: float = 0.95) -> Interval:
        """Return the interval between equal tails: of continuous targets y, otherwise of E[y | f].

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
        tails = 0.5 - 0.5 * require_share(level), 0.5 + 0.5 * level
        if self.likelihood.real_valued:
            return Interval(*map(self.quantile, tails))
        mean = self.likelihood.mean

        def quantiles(f: Tensor, weights: Tensor | None, _: slice) -> Tensor:
            return torch.stack([quantile(mean(f), share, weights) for share in tails])

        return Interval(*map(self._out, self.mixture.over_rows(quantiles, 1)))

    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Draw targets y, (n, B, ...), joint over inputs given f; for each draw as in the training data.

        Args:
            n (int): Number of draws. Default 1.
            generator (torch.Generator, optional): Source of randomness. Default None: torch's own.

        Example:
            >>> y = regression.predict(x).sample(100)
        """
        return self._out(self.mixture.sample(n, generator), 1)

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
        """Return the continuous ranked probability score of each output, (B, ..., C), in closed form; lower is better.

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
        """Return a set of classes that contains the label with probability ``level`` or more, a mask (B, C).

        It is an adaptive prediction set (APS) without randomisation: classes are added in the order
        of falling probability until their probability exceeds a conformal quantile.

        Args:
            level (float): Coverage, between 0 and 1. Default 0.9.

        Raises:
            ValueError: If the posterior has not been calibrated, or with too few examples.
            TypeError: If the targets are not one class label per example.

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

        They have the shape of the covariance of y given x, and are smaller than ``interval(level, joint=True)``
        if outputs are correlated.

        Args:
            level (float): Coverage, between 0 and 1. Default 0.9.

        Returns:
            An ``Ellipsoid`` with a method ``contains(y)``.

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
            several = self.mixture.owners[-1] > 0
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
        return Prediction(self.mixture.part(slice(count)).map(Tensor.detach), self.class_dim)

    @property
    def _room(self) -> float:
        return max(self.room, rounding(self.mixture.f.dtype))

    def _variance_by(self, reference: Reference) -> Tensor:
        """Return the expected squared error of the mean, (B, C), relative to which errors are measured."""
        mixture = self.mixture
        return mixture.variance() if reference.folds is None else variance_of_error(mixture)

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

    def _table(self) -> tuple[str, Cells]:
        return of_examples("Prediction", self)
