"""Predictions of a posterior: moments of f and of targets y, and their comparison with a validation
set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from torch_lla_em.likelihoods import HeteroscedasticRegression, Likelihood, average, mean_square
from torch_lla_em.prediction.base import BasePrediction
from torch_lla_em.prediction.conformal import (
    ROUNDING,
    Interval,
    infinite_if_nan,
    require_share,
)
from torch_lla_em.prediction.mixture import Mixture, TargetMixture, log_mean_exp
from torch_lla_em.prediction.neighbours import centred
from torch_lla_em.prediction.pushforward import Pushforward, Tables, posterior_alone
from torch_lla_em.prediction.reference import Reference, Stated
from torch_lla_em.runtime import check_whole, without_autocast


@dataclass(frozen=True, repr=False, eq=False)
class Prediction(BasePrediction):
    """The predictive distribution at B inputs, as returned by ``la.predict(x)``.

    ``f_mean``, ``f_variance``, ``f_covariance`` and ``samples`` are those of the network's function
    f, without observation noise; ``expectation``, ``predictive_variance``, ``probs`` and all other
    quantities are those of targets y. After ``calibrate``, ``p_value``, ``is_ood``,
    ``prediction_set`` and ``interval`` compare the inputs with the validation set. All shapes are
    those of the network's outputs, (B, ..., C). ``print`` shows a table.

    Example:
        >>> prediction = la.predict(x)
        >>> classes, uncertainty = prediction.probs.argmax(1), prediction.epistemic
    """

    _mixture: Mixture
    _class_dim: int = -1
    _origin: Pushforward | None = None
    """The products of the inputs; None: the inputs cannot be compared with a validation set."""

    _reference: Reference | None = None
    """The scores of validation examples that inputs are compared with."""

    _stated: Stated = Stated()
    _room: float = 0.0  # that of the reference's dtype

    _title = "Prediction"

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood; for an ensemble that of the first member (members may differ in σ)."""
        return self._mixture.components[0].likelihood

    @cached_property
    def members(self) -> tuple[Prediction, ...]:
        """The prediction of each posterior: a single one, or one for each member of an ensemble."""
        every = range(1 + self._mixture.components[-1].owner)
        return tuple(
            replace(
                self,
                _mixture=self._mixture.of_owner(k),
                _origin=None if self._origin is None else self._origin.member(k),
            )
            for k in every
        )

    @property
    def _members(self) -> tuple[Prediction, ...]:
        return self.members

    def _map(
        self, change: Callable[[Tensor], Tensor], rows: slice | Tensor = slice(None)
    ) -> Prediction:
        return Prediction(self._mixture.mapped(change, rows), self._class_dim)

    @property
    def _f(self) -> Tensor:
        return self._mixture.components[0].centre

    # f

    @property
    def f_mean(self) -> Tensor:
        """The mean of f, shape (B, ..., C)."""
        return self._shaped(self._mixture.centre())

    @property
    def f_variance(self) -> Tensor:
        """The variance of f, without observation noise, shape (B, ..., C)."""
        parts = self._mixture.components
        within = (mean_square(part.deviations) for part in parts)
        return self._shaped(self._mixture.variance(within, [part.centre for part in parts]))

    @property
    def f_covariance(self) -> Tensor:
        """The covariance of f over all inputs and outputs, of ``f_mean.flatten()``, (B C, B C)."""
        mean, blocks = self._mixture.centre(), []
        with without_autocast(mean.device):
            for part in self._mixture.components:
                size = max(1, len(part.deviations)) ** 0.5
                rows = torch.cat([part.deviations / size, (part.centre - mean)[None]])
                rows = self._shaped(rows, 1).flatten(1)
                blocks.append(rows.T @ rows)
        return self._mixture.mean(blocks)

    @property
    def samples(self) -> Tensor:
        """K samples of f, (K, B, ..., C), joint over inputs: the mean of f plus √τ J w_k, where w_k
        are posterior samples and τ is their scale, for a single posterior.

        If the prediction has further components, these replace some samples in proportion to their
        weight. An ensemble has the samples of all members.
        """
        each = [member._mixture.samples() for member in self.members]
        return self._shaped(torch.cat(each), 1)

    # y

    @property
    def expectation(self) -> Tensor:
        """E[y], (B, ..., C): probabilities of classes and labels, rates of counts, or the mean."""
        mean, mixture = self.likelihood.mean, self._mixture
        if self.likelihood.real_valued:
            return self._shaped(mean(mixture.centre()))
        return self._shaped(mixture.over_rows(lambda f, weights, _: average(mean(f), weights)))

    @property
    def log_variance(self) -> Tensor:
        """The mean of the log variance of the noise, (B, ..., C), that a heteroscedastic network
        predicts."""
        holds = isinstance(self.likelihood, HeteroscedasticRegression)
        self._require(holds, "log_variance", "its network predicts no noise")
        return self._shaped(self._mixture.centre().chunk(2, -1)[1])

    @property
    def standard_error(self) -> Tensor:
        """Monte Carlo standard error of ``expectation`` with K samples, (B, ..., C).

        On seven tables, the standard deviation between fits with different seeds was 0.8 to 1.0
        times this. It is 0 for continuous targets and NaN for a single sample.
        """
        if self.likelihood.real_valued:
            return torch.zeros_like(self.expectation)
        # the average over a sample and its mirror image is nearly quadratic in the sample, so its
        # spread over samples reflects the error of their covariance, which rotations do not reduce
        variances = []
        for member in self.members:
            first = member._mixture.components[0]

            def squared(f: Tensor, weights: Tensor | None, rows: slice) -> Tensor:
                values, half, K = first.likelihood.mean(f), len(f) // 2, len(first.deviations)
                pairs = 0.5 * (values[:K] + values[half : half + K])
                # NaN for a single sample, and 0 without samples
                apart: Tensor = (pairs - pairs.mean(0)).square().sum(0)
                return apart / (K * (K - 1) if K else 1)

            weight = member._mixture.weights[0]
            variances.append(weight**2 * Mixture((first,)).over_rows(squared))
        return self._shaped((torch.stack(variances).mean(0) / len(variances)).sqrt())

    def _log_expectation(self) -> Tensor:
        log_mean = self.likelihood.log_mean
        return self._mixture.over_rows(lambda f, weights, _: log_mean_exp(log_mean(f), weights))

    def _entropy(self) -> Tensor:
        entropy = self.likelihood.entropy
        return self._mixture.over_rows(lambda f, weights, _: entropy(f, weights))

    def _uncertainties(self) -> tuple[Tensor, Tensor]:
        likelihood, mean, mixture = self.likelihood, self.likelihood.mean, self._mixture
        if likelihood.observation_noise is not None:  # mean is linear
            parts = mixture.components
            within = (mean_square(mean(part.deviations)) for part in parts)
            spread = mixture.variance(within, [mean(part.centre) for part in parts])
            noises = (part.likelihood.variance(part.centre) for part in parts)
            return mixture.mean(noises), spread
        both = mixture.over_rows(lambda f, w, _: torch.stack(likelihood.uncertainties(f, w)), 1)
        return both[0], both[1]

    def _log_density(self, y: Tensor) -> Tensor:
        return self._mixture.log_density(y)

    def joint_log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y_1..y_B | x_1..x_B), (); if it has a closed form, from the covariance of
        the samples.

        Args:
            y (Tensor): Targets, as in the training data.
        """
        return self._mixture.log_density(self._aligned(y), joint=True)

    def sample(self, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Draw targets y, (n, B, ...), jointly over inputs; each draw has the form of the training
        targets.

        Args:
            n (int): Number of draws. Default 1.
            generator (torch.Generator, optional): Source of randomness. Default None: torch's own.

        Example:
            >>> y = regression.predict(x).sample(100)
        """
        check_whole(1, n=n)
        return self._shaped(self._mixture.sample(n, generator), 1)

    def credible_interval(self, level: float = 0.95) -> Interval:
        """Return the equal-tailed interval of continuous targets under the posterior.

        Args:
            level (float): Probability under the posterior, between 0 and 1. Default 0.95. For a
                guaranteed coverage use ``interval``, after ``calibrate``.

        Returns:
            An ``Interval`` of ``lower`` and ``upper``, each of shape (B, ..., C).

        Example:
            >>> lower, upper = regression.predict(x).credible_interval(0.9)
        """
        half = 0.5 * require_share(level)
        lower, upper = self.quantile([0.5 - half, 0.5 + half])
        return Interval(lower, upper)

    def cdf(self, y: Tensor) -> Tensor:
        """Return P(Y <= y) for each single continuous output, (B, ..., C).

        Args:
            y (Tensor): Targets, as in the training data.
        """
        return self._shaped(self._gaussians("cdf").cdf(self._aligned(y)))

    def quantile(self, q: float | Sequence[float] | Tensor) -> Tensor:
        """Return the value that each continuous output is below with probability q, (B, ..., C).

        It is differentiable in the inputs.

        Args:
            q (float, sequence or Tensor): A probability between 0 and 1; for several, the result
                has an additional first axis, (levels, B, ..., C).

        Example:
            >>> median = regression.predict(x).quantile(0.5)
            >>> lower, upper = regression.predict(x).quantile([0.05, 0.95])
        """
        mixture = self._gaussians("quantile")
        levels = torch.as_tensor(q, dtype=torch.float64, device="cpu")
        if levels.dim() > 1 or not levels.numel():
            raise ValueError(f"q must be one probability or a list of them, not {q}.")
        each = [
            self._shaped(mixture.quantile(require_share(level, "q")))
            for level in levels.flatten().tolist()
        ]
        return torch.stack(each) if levels.dim() else each[0]

    def crps(self, y: Tensor) -> Tensor:
        """Return the continuous ranked probability score of each output, (B, ..., C); lower is
        better.

        Args:
            y (Tensor): Targets, as in the training data.

        Example:
            >>> score = regression.predict(x).crps(regression.predict(x).expectation).mean()
        """
        return self._shaped(self._gaussians("crps").crps(self._aligned(y)))

    def _gaussians(self, name: str) -> TargetMixture:
        """Return the mixture of Gaussians of the targets; ``name`` is the method that needs it."""
        self._require(self.likelihood.real_valued, name, "its targets are not continuous")
        return self._mixture.gaussians()

    # comparison with a validation set

    @cached_property
    def _scored(self) -> tuple[Tensor, Tensor]:
        """The OOD scores, (B, 2 or 3), epistemic first, and the unit of each score, which
        determines its rounding error."""
        distances = None if self._origin is None else self._origin.distances()
        likelihood = self.likelihood
        # small scores can be differences of large numbers
        double = self._map(Tensor.double)
        if likelihood.real_valued:
            aleatoric, epistemic = double._uncertainties()
            variance = epistemic = epistemic / aleatoric
        else:
            deviations = double._mixture.deviations()
            epistemic = variance = centred(likelihood, deviations).square().mean(0)
            if likelihood.gives_probabilities:
                epistemic = double._uncertainties()[1]
        scores = [epistemic, variance] if distances is None else [epistemic]
        columns = [(s.flatten(1).mean(1) if s.dim() > 1 else s)[:, None].double() for s in scores]
        units = torch.full((2,), ROUNDING, dtype=torch.float64, device=self._f.device)
        if distances is not None:
            # training examples are on the device of the vectors
            columns.append(distances.to(columns[0]))
            units = torch.cat([units[:1], torch.ones_like(units)])
        return infinite_if_nan(torch.cat(columns, 1)), units

    def _judged(self, name: str) -> tuple[Reference, Prediction]:
        reference, judged = self._reference, self._by_reference
        if reference is None or judged is None:
            several = self._mixture.is_of_several
            la, fit = ("ensemble", "") if several else ("la", " or la.fit(..., validation=loader),")
            raise ValueError(
                f"{name} compares inputs with a validation set, but this prediction has none. Call "
                f"{la}.calibrate(validation_loader),{fit} and then {la}.predict(x) without mean=."
            )
        reference.agree(self._stated)
        return reference, judged

    @cached_property
    def _by_reference(self) -> Prediction | None:
        """The prediction with the numbers that were fitted together with the reference, classes
        last."""
        origin, reference = self._origin, self._reference
        if origin is None or reference is None or reference.table is None:
            return None
        sigma, noise = origin.likelihood.observation_noise, None
        if reference.sigma is not None and sigma is not None:
            noise = reference.sigma / sigma.to(reference.sigma)
        return Prediction(origin.mixture(reference.table, noise), _origin=origin)


def predicted_by(data: Pushforward, table: Tables, noise: Tensor | None = None) -> Prediction:
    """Return the prediction of examples for a table of components; for regression σ is multiplied
    by ``noise``."""
    return Prediction(data.mixture(table, noise), data.class_dim, data)


def network_of(data: Pushforward) -> Prediction:
    """Return the prediction of the network alone, which has no samples."""
    return predicted_by(data.without_samples(), posterior_alone())


def functions_of(prediction: Prediction) -> tuple[Tensor, Tensor | None]:
    """Return the functions over which a prediction is averaged, (S, B, ..., C) with the classes
    last, and their weights, (S,); None if all weights are equal."""
    return prediction._mixture.functions()
