"""A mixture of distributions over functions at B inputs: moments, averages and log-probabilities. Classes are last."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood, average, mean_square
from torch_lla_em.prediction.functions import (
    FUNCTIONS,
    JOINT,
    functions_of,
    log_mean_exp,
)
from torch_lla_em.prediction.scores import NUMBERS, GaussianTargets
from torch_lla_em.runtime import without_autocast

Take = Callable[[Tensor, Tensor | None, slice], Tensor]
"""Maps functions (S, b, ..., C), their weights (S,) or None, and the rows of these examples to values."""


@dataclass(frozen=True, repr=False, eq=False)
class FunctionMixture:
    """Components side by side: posteriors with K samples, and single functions such as the network.

    Those of an ensemble, or of an average of q, mean and network, are only more components.
    """

    likelihoods: tuple[Likelihood, ...]
    """The likelihood of each, with its observation noise."""

    centres: tuple[Tensor, ...]
    """The mean of each, (B, ..., C)."""

    deviations: tuple[Tensor, ...]
    """The samples of each minus its mean, √τ J w_k, (K, B, ..., C), joint over inputs; K is 0 for a function."""

    weights: Tensor
    """The weight of each, (components,), with sum 1."""

    owners: tuple[int, ...] = (0,)
    """The number of the posterior of each. The first component of a posterior has the samples."""

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood of the first component; they may differ in σ."""
        return self.likelihoods[0]

    @property
    def f(self) -> Tensor:
        """The mean of the first component, for its shape, dtype and device."""
        return self.centres[0]

    @cached_property
    def posteriors(self) -> tuple[FunctionMixture, ...]:
        """The mixture of each posterior."""
        numbers = range(1 + self.owners[-1])
        return tuple(self._of([i for i, n in enumerate(self.owners) if n == k]) for k in numbers)

    def map(self, change: Callable[[Tensor], Tensor]) -> FunctionMixture:
        """Return the mixture with every tensor of values changed, whose last axes are (B, ..., C)."""
        centres, deviations = (tuple(map(change, own)) for own in (self.centres, self.deviations))
        return replace(self, centres=centres, deviations=deviations)

    def part(self, rows: slice | Tensor) -> FunctionMixture:
        """Return the mixture at some inputs."""
        centres = tuple(centre[rows] for centre in self.centres)
        return replace(self, centres=centres, deviations=tuple(d[:, rows] for d in self.deviations))

    def mean(self) -> Tensor:
        """Return the mean of f."""
        return self._averaged(self.centres)

    def variance_of_f(self) -> Tensor:
        """Return the variance of f."""
        return self._total(map(mean_square, self.deviations), self.centres)

    def covariance(self, flat: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the covariance of f over all that ``flat`` makes of (rows, B, ..., C)."""
        mean, found = self.mean(), []
        with without_autocast(mean.device):
            for centre, deviations in zip(self.centres, self.deviations):
                size = max(1, len(deviations)) ** 0.5
                rows = flat(torch.cat([deviations / size, (centre - mean)[None]]))
                found.append(rows.T @ rows)
        return self._averaged(found)

    def joint_deviations(self) -> Tensor:
        """Return samples minus the mean: those of the posterior, or those of all posteriors."""
        if self.owners[-1] == 0:
            return self.deviations[0]
        mean = self.mean()
        return torch.cat([m.deviations[0] + (m.mean() - mean) for m in self.posteriors])

    def samples(self) -> Tensor:
        """Return K functions of each posterior, of its components in proportion to their weights."""
        found = []
        for each in self.posteriors:
            samples = each.centres[0] + each.deviations[0]
            if len(each.centres) > 1:
                every = torch.cat([samples, *(centre[None] for centre in each.centres[1:])])
                count = torch.arange(len(samples), device="cpu")
                # multiples of the golden ratio have the shares among the first few, too
                places = ((count.double() + 0.5) * (5**0.5 - 1) / 2).frac()
                ends = each.weights.detach().double().cpu().cumsum(0)
                at = torch.searchsorted(ends / ends[-1], places).clamp(max=len(ends) - 1)
                samples = every[torch.where(at > 0, len(count) + at - 1, count).to(every.device)]
            found.append(samples)
        return torch.cat(found)

    def sample(self, count: int, generator: torch.Generator | None) -> Tensor:
        """Draw so many targets, (count, B, ...), each given one function."""
        device = self.f.device if generator is None else generator.device
        weights = self.weights.detach().to(device)
        chosen = torch.multinomial(weights, count, True, generator=generator).to(self.f.device)
        rows, draws = [], []
        for i, likelihood in enumerate(self.likelihoods):
            own = (chosen == i).nonzero()[:, 0]
            if len(own):
                K = len(self.deviations[i])
                weights = torch.randn(len(own), K, generator=generator, device=device)
                weights = weights.to(self.f) / max(1, K) ** 0.5
                with without_autocast(self.f.device):
                    f = self.centres[i] + torch.tensordot(weights, self.deviations[i], 1)
                rows.append(own)
                draws.append(likelihood.sample(f, generator))
        return torch.cat(draws)[torch.cat(rows).argsort()]

    def functions(self, at_least: int = FUNCTIONS) -> tuple[Tensor, Tensor | None]:
        """Return S functions, (S, B, ..., C), those of the first component first, and their weights; None: equal."""
        each = [
            centre + functions_of(d, at_least) if len(d) else centre[None]
            for centre, d in zip(self.centres, self.deviations)
        ]
        if len(each) == 1:
            return each[0], None
        shares = [(weight / len(f)).expand(len(f)) for weight, f in zip(self.weights, each)]
        return torch.cat(each), torch.cat(shares)

    def over_rows(self, take: Take, dim: int = 0, at_least: int = FUNCTIONS) -> Tensor:
        """Apply ``take`` to all functions of a few examples at a time."""
        f = self.centres[0]
        count = sum(2 * len(d) + max(at_least, 2 * len(d)) for d in self.deviations)  # at most
        step = max(1, NUMBERS // max(1, count * f.shape[1:].numel()))
        with without_autocast(f.device):
            if len(f) <= step:  # states no number of rows, so that exported programs take any
                return take(*self.functions(at_least), slice(None))
            parts = map(slice, range(0, len(f), step), range(step, len(f) + step, step))
            return torch.cat([take(*self.part(p).functions(at_least), p) for p in parts], dim)

    def expected(self) -> Tensor:
        """Return E[y]."""
        likelihood = self.likelihoods[0]
        if likelihood.real_valued:
            return likelihood.mean(self.mean())
        return self.over_rows(lambda f, weights, _: average(likelihood.mean(f), weights))

    def uncertainties(self) -> tuple[Tensor, Tensor]:
        """Return the aleatoric and the epistemic uncertainty."""
        likelihood = self.likelihood
        if likelihood.observation_noise is not None:
            mean, pairs = likelihood.mean, zip(self.likelihoods, self.centres)  # mean is linear
            spread = self._total(
                (mean_square(mean(d)) for d in self.deviations), map(mean, self.centres)
            )
            return self._averaged(own.variance(centre) for own, centre in pairs), spread
        both = self.over_rows(lambda f, w, _: torch.stack(likelihood.uncertainties(f, w)), 1)
        return both[0], both[1]

    def variance(self) -> Tensor:
        """Return the variance of y."""
        aleatoric, epistemic = self.uncertainties()
        return aleatoric + epistemic

    def squared_error(self) -> Tensor:
        """Return the squared Monte Carlo error of E[y], which is that of the samples' covariance.

        An average over a sample and its mirror image is nearly quadratic in the sample. Its spread over
        the samples is therefore that of their covariance, which rotations do not reduce.
        """
        each = []
        for own in self.posteriors:
            mean, K = own.likelihood.mean, len(own.deviations[0])

            def squared(f: Tensor, *_: Any, mean: Any = mean, K: int = K) -> Tensor:
                values, half = mean(f), len(f) // 2
                pairs = 0.5 * (values[:K] + values[half : half + K])
                # NaN for a single sample, and 0 without
                apart: Tensor = (pairs - pairs.mean(0)).square().sum(0)
                return apart / (K * (K - 1) if K else 1)

            each.append(own.weights[0] ** 2 * own._of([0]).over_rows(squared))
        return torch.stack(each).mean(0) / len(each)

    def gaussians(self) -> GaussianTargets:
        """Return the distribution of continuous targets as a mixture of Gaussians."""
        likelihood, mean = self.likelihood, self.likelihood.mean
        if likelihood.observation_noise is not None:
            noises = [own.variance(c) for own, c in zip(self.likelihoods, self.centres)]
            variances = [mean_square(mean(d)) + v for d, v in zip(self.deviations, noises)]
            means = torch.stack(list(map(mean, self.centres)))
            return GaussianTargets(self.weights, means, torch.stack(variances).sqrt())
        with without_autocast(self.f.device):
            f, weights = self.functions()
        weights = f.new_full((len(f),), 1 / len(f)) if weights is None else weights
        return GaussianTargets(weights, mean(f), likelihood.variance(f).sqrt())

    def log_prob(self, y: Tensor, joint: bool = False) -> Tensor:
        """Return log p(y_n | x_n), (B,), or log p(y_1..y_B | x_1..x_B), ()."""
        found = []
        for i, own in enumerate(self.likelihoods):
            known = own.predictive_log_prob(self.centres[i], self.deviations[i], y, joint)
            found.append(self._of([i])._log_prob(y, joint) if known is None else known)
        return log_mean_exp(torch.stack(found), self.weights)

    def _log_prob(self, y: Tensor, joint: bool) -> Tensor:
        """Return it for a single component, as an average over functions."""
        own = self.likelihood.log_prob
        if joint:
            each = self.over_rows(lambda f, _, rows: own(f, y[rows]), 1, JOINT)
            return log_mean_exp(each.sum(1))
        return self.over_rows(lambda f, _, rows: log_mean_exp(own(f, y[rows])))

    def _of(self, some: list[int]) -> FunctionMixture:
        """Return the mixture of some of the components, as one posterior."""
        lists = self.likelihoods, self.centres, self.deviations
        weights = self.weights[some]
        parts: list[Any] = [tuple(values[i] for i in some) for values in lists]
        parts += [weights / weights.sum(), (0,) * len(some)]
        return FunctionMixture(*parts)

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
