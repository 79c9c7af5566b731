"""Predictive distributions: of functions f + √τ J w_k, and of targets given them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import pi

import torch
from torch import Tensor

from torch_lla_em.data import as_targets
from torch_lla_em.likelihoods import mean_square
from torch_lla_em.prediction.conformal import Conformal, Interval
from torch_lla_em.prediction.functions import Functions, log_mean_exp, quantile
from torch_lla_em.prediction.regions import Ellipsoid, covariance_of
from torch_lla_em.prediction.summary import Cells, Printed, of_examples
from torch_lla_em.runtime import without_autocast

# largest number of functions of equal weight that stand for a mixture
_ALIKE = 1024


@dataclass(frozen=True, repr=False)
class Prediction(Printed, Conformal):
    """The predictive distribution at B inputs, as returned by ``la.predict(x)``.

    It describes the network's function f, without observation noise, by ``mean``,
    ``variance``, ``covariance`` and ``samples``; and the targets y by ``expectation``,
    ``probs``, ``predictive_variance``, ``credible_interval`` and ``log_prob``. After ``calibrate``,
    ``p_value``, ``is_ood``, ``prediction_set`` and ``interval`` compare the inputs with the
    validation set. All shapes are those of the network's outputs, (B, ..., C).

    The distribution is a mixture of ``members``, the posterior and further functions without
    uncertainty; the members of a ``LaplaceEnsemble`` are such mixtures. ``print`` shows a table.

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
        mixture = Prediction(members[0].likelihood, centre, apart, class_dim, members)
        if any(member.nearest is None for member in members):
            return mixture

        def mean_of(name: str) -> Tensor:
            return torch.stack([getattr(member, name)() for member in members]).mean(0)

        nearest, unit = partial(mean_of, "nearest"), partial(mean_of, "unit")
        return replace(mixture, nearest=nearest, unit=unit)

    @property
    def mean(self) -> Tensor:
        """The mean of f, shape (B, ..., C)."""
        return self._out(self._mean())

    @property
    def variance(self) -> Tensor:
        """The variance of f, without observation noise, shape (B, ..., C)."""
        return self._out(self._variance_of_f())

    @property
    def covariance(self) -> Tensor:
        """The covariance of f over all inputs and outputs, of ``mean.flatten()``, (B C, B C)."""
        mean = self._mean()

        def of(part: Functions) -> Tensor:
            apart = (part.centre - mean)[None]
            rows = torch.cat([part.deviations / max(1, len(part.deviations)) ** 0.5, apart])
            flat = self._out(rows, leading=1).flatten(1)
            with without_autocast(flat.device):
                return flat.T @ flat

        return self._averaged(of)

    @property
    def samples(self) -> Tensor:
        """K samples of f, (K, B, ..., C), joint over inputs: f + √τ J w_k for a single posterior.

        Further functions of the mixture replace some of them in proportion to their weight. An
        ensemble has the samples of all members.
        """
        return self._out(self._samples(), leading=1)

    @property
    def functions(self) -> Tensor:
        """Functions of equal weight that averages such as ``probs`` are taken over, (S, B, ..., C).

        They have the mean and the covariance of the samples, and S is at least 2 K: each has its
        mirror image, and random rotations of the samples reduce the error of averages. Further
        functions of the mixture are repeated in proportion to their weight.
        """
        each = [(part, part._functions()) for part in self._parts]
        shares, found = self._shares.tolist(), []
        counts = [len(functions) if len(part.deviations) else 0 for part, functions in each]
        total = min(n / max(share, 1e-9) for n, share in zip(counts, shares) if n)
        total = min(total, max(_ALIKE, sum(counts)))
        for (part, functions), share in zip(each, shares):
            if len(part.deviations):
                pairs = functions.unflatten(0, (2, -1))
                found.append(pairs[:, : round(0.5 * total * share)].flatten(0, 1))
            else:
                found.append(functions.expand(round(total * share), *part.centre.shape))
        return self._out(torch.cat(found), leading=1)

    @property
    def weighted_functions(self) -> tuple[Tensor, Tensor]:
        """The functions that averages are taken over, (S, B, ..., C), and the weight of each, (S,).

        They are those of ``functions``, but every function of the mixture without uncertainty occurs
        once. The weights add up to 1, and averages with them are exactly ``probs``, for example.
        """
        functions, weights = self._functions(), self._weights
        if weights is None:
            weights = functions.new_full((len(functions),), 1 / len(functions))
        return self._out(functions, leading=1), weights.to(functions)

    @property
    def predictive_samples(self) -> Tensor:
        """E[y | f_k]: the samples after the link function, such as softmax, (K, B, ..., C)."""
        return self._out(self.likelihood.mean(self._samples()), leading=1)

    @property
    def expectation(self) -> Tensor:
        """E[y], (B, ..., C): probabilities of classes and labels, rates of counts, or the mean."""
        return self._out(self._expected())

    @property
    def predictive_variance(self) -> Tensor:
        """The variance of y, with observation noise, shape (B, ..., C).

        For regression it is ``variance`` + σ², the second value that ``la(x)`` returns. For
        classes and labels it is p (1 - p), the variance of the indicator of each.
        """
        if self.likelihood.gives_probabilities:
            return self.probs * (1 - self.probs)
        return self._site_values(self._variance())

    @property
    def standard_error(self) -> Tensor:
        """Monte Carlo standard error of ``expectation`` with K samples, (B, ..., C).

        It has the errors of the samples' covariance and of the posterior mean, but not those of λ and of the
        curvature. On seven tables, fits with different seeds differed by 0.8 to 1.0 times as much. It is 0 for
        continuous targets and NaN for a single sample.
        """
        if self.likelihood.real_valued:
            return torch.zeros_like(self.expectation)
        return self._out(self._squared_error().sqrt())

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
        weights = self._weights
        values = self._over_rows(lambda f, _: log_mean_exp(self.likelihood.log_mean(f), weights))
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
        elif self.likelihood.monotone and not self.members:
            half = z * self._variance_of_f().sqrt()
            lower = self.likelihood.mean(self.centre - half)
            upper = self.likelihood.mean(self.centre + half)
        else:
            weights = self._weights

            def quantiles(f: Tensor, _: slice) -> Tensor:
                values = self.likelihood.mean(f)
                return torch.stack([quantile(values, q, weights) for q in (tail, 1 - tail)])

            lower, upper = self._over_rows(quantiles, dim=1)
        return Interval(self._out(lower), self._out(upper))

    def ellipsoid(self, level: float = 0.9) -> Ellipsoid:
        """Return conformal regions that contain all outputs of y together with probability ``level`` or more.

        They are ellipsoids around the mean, in the shape of the covariance of y given x, and smaller than
        ``interval(level, joint=True)`` if outputs are correlated.

        Args:
            level (float): Coverage, between 0 and 1. Default 0.9.

        Returns:
            An ``Ellipsoid`` of ``centre`` (B, C), ``covariance`` (B, C, C) and ``radius`` (B,), with a
            method ``contains(y)``.

        Raises:
            ValueError: If the posterior has not been calibrated, or with too few examples.
            TypeError: If the targets are not several continuous outputs.

        Example:
            >>> region = several.predict(x).ellipsoid(level=0.8)  # doctest: +SKIP
        """
        reference, prediction = self._judged("ellipsoid", by_labels=True)
        centre = prediction._expected()
        if not self._has_values or centre.shape[1:].numel() < 2:
            raise TypeError("ellipsoid is for several continuous targets; use interval(level).")
        radius = reference.quantiles(reference.joint_errors()[:, 1:], level, self.stated)[:, 0]
        covariance = covariance_of(prediction, prediction._variance_by(reference))
        radius = radius.expand(len(centre)) * (1 + self._room())
        return Ellipsoid(centre.double(), covariance, radius)

    def smoothed(self) -> Tensor:
        """Return E[y] in closed form from mean and variance of f: the probit approximation.

        Returns:
            Probabilities or rates, shape (B, ..., C).
        """

        def of(part: Functions) -> Tensor:
            return part.likelihood.smoothed_mean(part.centre, mean_square(part.deviations))

        return self._out(self._averaged(of))

    def log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y_n | x_n) of each example on its own, shape (B,).

        Several continuous outputs count as independent given x; ``joint_log_prob`` includes their
        covariance.

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
        return self._joint_log_prob(self._aligned(y))

    def _aligned(self, y: Tensor) -> Tensor:
        """Move the outputs' axis of targets last, and check that they fit."""
        y = self.likelihood.align(as_targets(y).to(self.centre.device), self.class_dim)
        self.likelihood.check(self.centre, y)
        return y

    def _require_probabilities(self, name: str) -> None:
        if not self.likelihood.gives_probabilities:
            raise TypeError(
                f"A prediction under {type(self.likelihood).__name__} has no .{name}: its E[y] is "
                "not a probability. Use .expectation, or log_prob(y) for the density of a target."
            )

    def first(self, count: int) -> Prediction:
        """Return the prediction of the first few inputs, detached.

        Args:
            count (int): The number of inputs.
        """
        centre, deviations = self.centre[:count].detach(), self.deviations[:, :count].detach()
        members = tuple(member.first(count) for member in self.members)
        drift = None if self.drift is None else self.drift[:count].detach()
        found = replace(self, centre=centre, deviations=deviations, drift=drift, members=members)
        return replace(found, judge=None)

    def _table(self) -> tuple[str, Cells]:
        return of_examples("Prediction", self)
