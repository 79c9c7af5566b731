"""A mixture of distributions over functions: moments, averages and log-probabilities. Classes are last.

A component is a posterior with K samples, or a single function. Those of an ensemble, or of an average of
q, mean and network, stand side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood, average, mean_square
from torch_lla_em.prediction.functions import (
    FUNCTIONS,
    JOINT,
    functions_of,
    log_mean_exp,
    number_of_functions,
    pair_error,
    redrawn,
    slots,
)
from torch_lla_em.prediction.scores import NUMBERS, GaussianTargets
from torch_lla_em.runtime import without_autocast


class Part(NamedTuple):
    """A distribution over functions at B inputs."""

    likelihood: Likelihood
    """With the observation noise of this component."""

    centre: Tensor
    """Its mean, (B, ..., C)."""

    deviations: Tensor
    """Its samples minus the mean, √τ J w_k, (K, B, ..., C), joint over inputs; K is 0 for a single function."""

    posterior: int = 0
    """The number of the posterior that it belongs to. The first component of each has the samples."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Part:
        """Return the component with every tensor of values changed, whose last axes are (B, ..., C)."""
        return self._replace(centre=change(self.centre), deviations=change(self.deviations))

    def part(self, rows: slice | Tensor) -> Part:
        """Return the component at some inputs."""
        return self._replace(centre=self.centre[rows], deviations=self.deviations[:, rows])


@dataclass(frozen=True, repr=False, eq=False)
class FunctionMixture:
    """Components with their weights, of one posterior or of several."""

    components: tuple[Part, ...]

    weights: Tensor
    """The weight of each component, (components,), with sum 1."""

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood of the first component; they may differ in σ."""
        return self.components[0].likelihood

    @property
    def f(self) -> Tensor:
        """The mean of the first component, for its shape, dtype and device."""
        return self.components[0].centre

    @cached_property
    def posteriors(self) -> tuple[FunctionMixture, ...]:
        """The mixture of each posterior."""
        found = []
        for number in range(1 + self.components[-1].posterior):
            own = [i for i, c in enumerate(self.components) if c.posterior == number]
            weights = self.weights[own]
            parts = tuple(self.components[i]._replace(posterior=0) for i in own)
            found.append(FunctionMixture(parts, weights / weights.sum()))
        return tuple(found)

    def map(self, change: Callable[[Part], Part]) -> FunctionMixture:
        """Return the mixture with every component changed."""
        return replace(self, components=tuple(map(change, self.components)))

    def mean(self) -> Tensor:
        """Return the mean of f."""
        return self._averaged(lambda part: part.centre)

    def variance_of_f(self) -> Tensor:
        """Return the variance of f."""
        return self._total(lambda part: mean_square(part.deviations), lambda part: part.centre)

    def covariance(self, flat: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the covariance of f over all that ``flat`` makes of (rows, B, ..., C)."""
        mean = self.mean()

        def of(part: Part) -> Tensor:
            size = max(1, len(part.deviations)) ** 0.5
            rows = flat(torch.cat([part.deviations / size, (part.centre - mean)[None]]))
            with without_autocast(rows.device):
                return rows.T @ rows

        return self._averaged(of)

    def deviations(self) -> Tensor:
        """Return samples minus the mean: those of the posterior, or those of all posteriors."""
        if len(self.posteriors) == 1:
            return self.components[0].deviations
        mean = self.mean()
        each = [m.components[0].deviations + (m.mean() - mean) for m in self.posteriors]
        return torch.cat(each)

    def samples(self) -> Tensor:
        """Return K functions of each posterior, of its components in proportion to their weights."""
        found = []
        for posterior in self.posteriors:
            first, *certain = posterior.components
            samples = first.centre + first.deviations
            if certain:
                every, count = (
                    torch.cat([samples, *(c.centre[None] for c in certain)]),
                    len(samples),
                )
                part, own = slots(posterior.weights, count), torch.arange(count, device="cpu")
                samples = every[torch.where(part > 0, count + part - 1, own).to(every.device)]
            found.append(samples)
        return torch.cat(found)

    def drawn(self, count: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Draw so many functions, and return them with the number of the component of each."""
        device = self.f.device if generator is None else generator.device
        weights = self.weights.detach().to(device)
        chosen = torch.multinomial(weights, count, True, generator=generator).to(self.f.device)
        f = self.f.new_empty(count, *self.f.shape)
        for number, part in enumerate(self.components):
            own = (chosen == number).nonzero()[:, 0]
            if len(own):
                f[own] = part.centre + redrawn(part.deviations, generator, len(own))
        return f, chosen

    def functions(self, rows: slice = slice(None), at_least: int = FUNCTIONS) -> Tensor:
        """Return S functions, (S, b, ..., C), those of the first component first."""
        parts = self.components
        if rows != slice(None):
            parts = tuple(part.part(rows) for part in parts)
        each = [
            c.centre + functions_of(c.deviations, at_least) if len(c.deviations) else c.centre[None]
            for c in parts
        ]
        return torch.cat(each) if len(each) > 1 else each[0]

    @cached_property
    def function_weights(self) -> Tensor | None:
        """The weight of each of these functions, (S,), or None if they are equal."""
        if len(self.components) == 1:
            return None
        counts = [number_of_functions(part.deviations) for part in self.components]
        return torch.cat([(w / n).expand(n) for w, n in zip(self.weights, counts)])

    def alike(self) -> Tensor:
        """Return functions of equal weight, (S, B, ..., C), in proportion to the weights of components."""
        shares, found = self.weights.tolist(), []
        each = [(c, c.centre + functions_of(c.deviations)) for c in self.components]
        counts = [len(functions) if len(c.deviations) else 0 for c, functions in each]
        total = min(n / max(share, 1e-9) for n, share in zip(counts, shares) if n)
        total = min(total, max(JOINT, sum(counts)))
        for (part, functions), share in zip(each, shares):
            if len(part.deviations):
                pairs = functions.unflatten(0, (2, -1))
                found.append(pairs[:, : round(0.5 * total * share)].flatten(0, 1))
            else:
                found.append(functions.expand(round(total * share), *part.centre.shape))
        return torch.cat(found)

    def over_rows(
        self, take: Callable[[Tensor, slice], Tensor], dim: int = 0, at_least: int = FUNCTIONS
    ) -> Tensor:
        """Apply ``take`` to all functions (S, b, ..., C) of a few examples at a time."""
        rows = self.components[0].centre
        count, each = (
            len(rows),
            sum(number_of_functions(part.deviations, at_least) for part in self.components),
        )
        step = max(1, NUMBERS // max(1, each * rows[:1].numel()))
        # a single part states no number of rows, so that exported programs take any
        parts = [slice(start, start + step) for start in range(0, count, step)]
        with without_autocast(rows.device):
            found = [
                take(self.functions(part, at_least), part)
                for part in (parts if len(parts) > 1 else [slice(None)])
            ]
        return torch.cat(found, dim) if len(found) > 1 else found[0]

    def expected(self) -> Tensor:
        """Return E[y]."""
        likelihood, weights = self.components[0].likelihood, self.function_weights
        if likelihood.real_valued:
            return likelihood.mean(self.mean())
        return self.over_rows(lambda f, _: average(likelihood.mean(f), weights))

    def uncertainties(self) -> tuple[Tensor, Tensor]:
        """Return the aleatoric and the epistemic uncertainty."""
        likelihood, weights = self.likelihood, self.function_weights
        if likelihood.observation_noise is not None:
            mean = likelihood.mean  # it is linear
            aleatoric = self._averaged(lambda part: part.likelihood.variance(part.centre))
            return aleatoric, self._total(
                lambda part: mean_square(mean(part.deviations)), lambda part: mean(part.centre)
            )
        more = () if weights is None else (weights,)
        both = self.over_rows(lambda f, _: torch.stack(likelihood.uncertainties(f, *more)), 1)
        return both[0], both[1]

    def variance(self) -> Tensor:
        """Return the variance of y."""
        aleatoric, epistemic = self.uncertainties()
        return aleatoric + epistemic

    def squared_error(self) -> Tensor:
        """Return the squared Monte Carlo error of E[y], which is that of the samples' covariance."""
        mean = self.likelihood.mean

        def of(first: Part) -> Tensor:
            count = len(first.deviations)
            return _alone(first).over_rows(lambda f, _: pair_error(mean(f), count))

        each = [(m.weights[0] * of(m.components[0])).square() for m in self.posteriors]
        return torch.stack(each).mean(0) / len(each)

    def gaussians(self) -> GaussianTargets:
        """Return the distribution of continuous targets as a mixture of Gaussians."""
        likelihood = self.likelihood
        if likelihood.observation_noise is not None:
            mean, parts = likelihood.mean, self.components
            variances = [
                mean_square(mean(c.deviations)) + c.likelihood.variance(c.centre) for c in parts
            ]
            means = torch.stack([mean(c.centre) for c in parts])
            return GaussianTargets(self.weights, means, torch.stack(variances).sqrt())
        f, weights = self.functions(), self.function_weights
        weights = f.new_full((len(f),), 1 / len(f)) if weights is None else weights
        return GaussianTargets(weights, likelihood.mean(f), likelihood.variance(f).sqrt())

    def log_prob(self, y: Tensor, joint: bool = False) -> Tensor:
        """Return log p(y_n | x_n), (B,), or log p(y_1..y_B | x_1..x_B), ()."""

        def of(part: Part) -> Tensor:
            own = part.likelihood
            known = own.predictive_log_prob(part.centre, part.deviations, y, joint)
            if known is not None:
                return known
            if joint:
                each = _alone(part).over_rows(lambda f, rows: own.log_prob(f, y[rows]), 1, JOINT)
                return log_mean_exp(each.sum(1))
            return _alone(part).over_rows(lambda f, rows: log_mean_exp(own.log_prob(f, y[rows])))

        return log_mean_exp(torch.stack(list(map(of, self.components))), self.weights)

    def joint_log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y_1..y_B | x_1..x_B), ()."""
        return self.log_prob(y, joint=True)

    def smoothed(self) -> Tensor:
        """Return E[y] in closed form from mean and variance of f."""
        return self._averaged(
            lambda c: c.likelihood.smoothed_mean(c.centre, mean_square(c.deviations))
        )

    def _averaged(self, of: Callable[[Part], Tensor]) -> Tensor:
        """Return the mean of a quantity over the components."""
        if len(self.components) == 1:
            return of(self.components[0])
        return average(torch.stack(list(map(of, self.components))), self.weights)

    def _total(self, within: Callable[[Part], Tensor], of: Callable[[Part], Tensor]) -> Tensor:
        """Return the mean of a variance over the components, plus the variance of a mean."""
        if len(self.components) == 1:
            return within(self.components[0])
        mean = self._averaged(of)
        return self._averaged(lambda part: within(part) + (of(part) - mean).square())


def _alone(part: Part) -> FunctionMixture:
    """Return the mixture of one component."""
    return FunctionMixture((part,), part.centre.new_ones(1))
