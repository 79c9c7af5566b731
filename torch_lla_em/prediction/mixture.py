"""Predictions as mixtures: functions made from K samples, averages over these functions, and the
mixture of Gaussians for continuous targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from math import log, pi, prod
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood, average, mean_square
from torch_lla_em.runtime import NUMBERS, without_autocast

Take = Callable[[Tensor, "Tensor | None", slice], Tensor]
"""A function that maps functions (S, b, ..., C), their weights (S,) or None, and the slice of these
examples to values."""

FUNCTIONS = 64
"""Smallest number of functions in an average over one example. With mirror images alone, the error
of averages is 1 to 20 % larger than with any number of rotations; with one rotation, it is 1 to 9 %
larger."""

JOINT = 1024
"""Smallest number of functions for joint log-probabilities, where few functions dominate a product
of many terms."""

WEIGHT, MODE, NETWORK, SCALE = range(4)
"""The columns of a table of components: a prediction's mixture, as fitted or as calibrated.

Each row is a component: its weight, how much of J w_lin and of f its mean contains, and the scale τ
of the posterior's variance. The first row has the samples' deviations, the others have none.
"""

# largest number of outputs of an example, and of samples, for which rotations are drawn: a rotation
# takes K³ operations
_OUTPUTS, _SAMPLES = 1024, 256


class Component(NamedTuple):
    """A component of a prediction's mixture: a posterior, or a function such as the network."""

    likelihood: Likelihood
    """The likelihood, with its observation noise."""

    centre: Tensor
    """The mean of f, (B, ..., C), classes last."""

    deviations: Tensor
    """The samples minus their mean, √τ J w_k, (K, B, ..., C), joint over inputs; K is 0 for a
    function."""

    weight: float | Tensor = 1.0
    """The weight in the mixture; the weights of all components have the sum 1."""

    owner: int = 0
    """The number of the posterior that it belongs to; the first component of a posterior has the
    samples."""


class Mixture(NamedTuple):
    """The components of a prediction, one or more for each posterior."""

    components: tuple[Component, ...]
    """The first one has the samples of the first posterior."""

    @property
    def is_of_several(self) -> bool:
        """Whether the components belong to several posteriors."""
        return self.components[-1].owner > 0

    @property
    def weights(self) -> Tensor:
        """The weights of the components, (components,)."""
        weights, f = [part.weight for part in self.components], self.components[0].centre
        fitted = [weight for weight in weights if isinstance(weight, Tensor)]
        return torch.stack(fitted).to(f) if fitted else f.new_tensor(weights)

    def of_owner(self, number: int) -> Mixture:
        """Return the components of one posterior alone."""
        places = [i for i, part in enumerate(self.components) if part.owner == number]
        weights = self.weights[places]
        pairs = zip(places, weights / weights.sum(), strict=True)
        return Mixture(
            tuple(self.components[i]._replace(weight=weight, owner=0) for i, weight in pairs)
        )

    def mapped(self, change: Callable[[Tensor], Tensor], rows: slice | Tensor) -> Mixture:
        """Return the mixture for some inputs, with a function applied to tensors whose last axes
        are (B, ..., C)."""
        return Mixture(
            tuple(
                part._replace(
                    centre=change(part.centre[rows]), deviations=change(part.deviations[:, rows])
                )
                for part in self.components
            )
        )

    def mean(self, values: Iterable[Tensor]) -> Tensor:
        """Return the weighted mean of values, one for each component."""
        first, *others = values
        return average(torch.stack([first, *others]), self.weights) if others else first

    def variance(self, within: Iterable[Tensor], means: Sequence[Tensor]) -> Tensor:
        """Return the mean of the variances within components, plus the variance of their means."""
        first, *others = within
        if not others:
            return first
        mean, pairs = self.mean(means), zip([first, *others], means, strict=True)
        return self.mean(v + (m - mean).square() for v, m in pairs)

    def centre(self) -> Tensor:
        """Return the mean of f, (B, ..., C)."""
        return self.mean(part.centre for part in self.components)

    def deviations(self) -> Tensor:
        """Return the samples of all posteriors minus the mean, (K, B, ..., C)."""
        if not self.is_of_several:
            return self.components[0].deviations
        mean, each = self.centre(), map(self.of_owner, range(1 + self.components[-1].owner))
        return torch.cat([own.components[0].deviations + (own.centre() - mean) for own in each])

    def samples(self) -> Tensor:
        """Return the samples of one posterior, (K, B, ..., C), some of which are replaced by the
        functions in proportion to their weights."""
        samples = self.components[0].centre + self.components[0].deviations
        others = [part.centre for part in self.components[1:]]
        return in_shares(samples, others, self.weights) if others else samples

    def functions(
        self, rows: slice = slice(None), at_least: int = FUNCTIONS
    ) -> tuple[Tensor, Tensor | None]:
        """Return S functions, (S, B, ..., C), those of the first component first, and their
        weights; None: equal."""
        each = [
            part.centre[rows] + rotated(part.deviations[:, rows], at_least)
            if len(part.deviations)
            else part.centre[None, rows]
            for part in self.components
        ]
        if len(each) == 1:
            return each[0], None
        pairs = zip(self.weights, each, strict=True)
        shares = [(weight / len(f)).expand(len(f)) for weight, f in pairs]
        return torch.cat(each), torch.cat(shares)

    def over_rows(self, take: Take, dim: int = 0, at_least: int = FUNCTIONS) -> Tensor:
        """Apply ``take`` to all functions of a few examples at a time."""
        f, counts = self.components[0].centre, [len(part.deviations) for part in self.components]
        count = sum(2 * n + max(at_least, 2 * n) for n in counts)  # an upper bound
        step = max(1, NUMBERS // max(1, count * f.shape[1:].numel()))
        with without_autocast(f.device):
            if len(f) <= step:  # without a number of rows, so that exported programs accept any
                return take(*self.functions(at_least=at_least), slice(None))
            parts = map(slice, range(0, len(f), step), range(step, len(f) + step, step))
            return torch.cat([take(*self.functions(p, at_least), p) for p in parts], dim)

    def log_density(self, y: Tensor, joint: bool = False) -> Tensor:
        """Return log p(y) of each input, (B,), or of all inputs together if ``joint``, ()."""
        every = []
        for part in self.components:
            log_prob, alone = part.likelihood.log_prob, Mixture((part,))
            total = part.likelihood.predictive_log_prob(part.centre, part.deviations, y, joint)
            if total is None and joint:
                each = alone.over_rows(lambda f, _, rows: log_prob(f, y[rows]), 1, JOINT)
                total = log_mean_exp(each.sum(1))
            elif total is None:
                total = alone.over_rows(lambda f, _, rows: log_mean_exp(log_prob(f, y[rows])))
            every.append(total)
        return log_mean_exp(torch.stack(every), self.weights)

    def sample(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Draw n targets of each input, (n, B, ...), joint over inputs given f."""
        f = self.components[0].centre
        device = f.device if generator is None else generator.device
        weights = self.weights.detach().to(device)
        chosen = torch.multinomial(weights, n, True, generator=generator).to(f.device)
        rows, draws = [], []
        for i, (likelihood, centre, deviations, *_) in enumerate(self.components):
            places = (chosen == i).nonzero()[:, 0]
            if len(places):
                K = len(deviations)
                of_samples = torch.randn(len(places), K, generator=generator, device=device)
                of_samples = of_samples.to(deviations) / max(1, K) ** 0.5
                with without_autocast(f.device):
                    drawn = centre + torch.tensordot(of_samples, deviations, 1)
                rows.append(places)
                draws.append(likelihood.sample(drawn, generator))
        return torch.cat(draws)[torch.cat(rows).argsort()]

    def gaussians(self) -> TargetMixture:
        """Return the mixture of Gaussians that continuous targets follow."""
        likelihood, mean = self.components[0].likelihood, self.components[0].likelihood.mean
        if likelihood.observation_noise is not None:
            variances = [
                mean_square(mean(part.deviations)) + part.likelihood.variance(part.centre)
                for part in self.components
            ]
            means = torch.stack([mean(part.centre) for part in self.components])
            return TargetMixture(self.weights, means, torch.stack(variances).sqrt())
        with without_autocast(self.components[0].centre.device):
            f, weights = self.functions()
        weights = f.new_full((len(f),), 1 / len(f)) if weights is None else weights
        return TargetMixture(weights, mean(f), likelihood.variance(f).sqrt())


def rotated(deviations: Tensor, at_least: int = FUNCTIONS) -> Tensor:
    """Return S ≥ 2 K zero-mean functions, shape (S, B, ...), from deviations (K, B, ...); outside
    of autocast.

    They are the samples, random rotations of them that depend on K only, and mirror images. Each
    set has the covariance of the samples.
    """
    count, _, *outputs = deviations.shape
    sets = max(2 if count <= _SAMPLES else 1, -(-at_least // (2 * count)))
    if count == 1 or sets == 1 or prod(outputs) > _OUTPUTS:
        return torch.cat([deviations, -deviations])
    Q = torch.from_numpy(_rotations(count, sets - 1)).to(deviations)
    return (Q @ deviations.flatten(1)).view(len(Q), *deviations.shape[1:])


@lru_cache(maxsize=8)
def _rotations(count: int, sets: int) -> np.ndarray:
    """Return the identity, random orthogonal matrices, and the negatives of all of them, (S, K)."""
    # not tensors, since a tensor made in torch.inference_mode cannot be differentiated later
    generator = torch.Generator("cpu").manual_seed(0)
    normal = torch.randn(sets, count, count, generator=generator, dtype=torch.float64, device="cpu")
    Q = torch.cat(
        [torch.eye(count, device="cpu").to(normal), torch.linalg.qr(normal).Q.flatten(0, 1)]
    )
    rotations: np.ndarray = torch.cat([Q, -Q]).numpy()
    return rotations


def in_shares(samples: Tensor, others: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Return samples, (K, B, ..., C), some of which are replaced by other functions in proportion
    to the weights."""
    every = torch.cat([samples, *(f[None] for f in others)])
    count = torch.arange(len(samples), device="cpu")
    # multiples of the golden ratio have the right shares also among the first few samples
    places = ((count.double() + 0.5) * (5**0.5 - 1) / 2).frac()
    ends = weights.detach().double().cpu().cumsum(0)
    at = torch.searchsorted(ends / ends[-1], places).clamp(max=len(ends) - 1)
    return every[torch.where(at > 0, len(count) + at - 1, count).to(every.device)]


class TargetMixture(NamedTuple):
    """A mixture of P Gaussians for every output."""

    weights: Tensor
    """(P,)."""

    means: Tensor
    """(P, B, ..., C)."""

    deviations: Tensor
    """The standard deviations, (P, B, ..., C)."""

    def cdf(self, y: Tensor) -> Tensor:
        """Return P(Y <= y)."""
        return average(torch.special.ndtr((y - self.means) / self.deviations), self.weights)

    def quantile(self, q: float) -> Tensor:
        """Return the value that Y is below with probability q, by bisection."""
        weights, means, deviations = self
        each = means + NormalDist().inv_cdf(q) * deviations
        if len(each) == 1:
            return each[0]
        lower, upper = each.detach().amin(0), each.detach().amax(0)
        with torch.no_grad():
            for _ in range(64):  # then both ends are equal in double precision
                middle = 0.5 * (lower + upper)
                is_below = self.cdf(middle) < q
                lower, upper = middle.where(is_below, lower), upper.where(is_below, middle)
            value = 0.5 * (lower + upper)
        if not each.requires_grad:
            return value
        # F(value) = q holds for all parameters, so the derivative of the value is that of -F,
        # divided by the density
        below, z = self.cdf(value), (value - means.detach()) / deviations.detach()
        density = average((-0.5 * z.square()).exp() / deviations.detach(), weights.detach())
        density = (density / (2 * pi) ** 0.5).clamp_min(torch.finfo(density.dtype).tiny)
        turned: Tensor = value - (below - below.detach()) / density
        return turned

    def crps(self, y: Tensor) -> Tensor:
        """Return E|Y - y| - E|Y - Y'| / 2 in closed form (Grimit et al., 2006)."""
        weights, means, deviations = self
        score = average(_mean_size(y - means, deviations), weights)
        for weight, mean, deviation in zip(weights, means, deviations, strict=True):
            apart = _mean_size(mean - means, (deviation**2 + deviations**2).sqrt())
            score = score - 0.5 * weight * average(apart, weights)
        return score

    def log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y) of each single output."""
        normal = torch.distributions.Normal(self.means, self.deviations, validate_args=False)
        return log_mean_exp(normal.log_prob(y), self.weights)


def _mean_size(mean: Tensor, deviation: Tensor) -> Tensor:
    """Return E|z| of Gaussian numbers."""
    z = mean / deviation
    density = (-0.5 * z.square()).exp() / (2 * pi) ** 0.5
    found: Tensor = mean * (2 * torch.special.ndtr(z) - 1) + 2 * deviation * density
    return found


def log_mean_exp(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the logarithm of the mean of exp(values) over the first axis."""
    if weights is None:
        return values.logsumexp(0) - log(len(values))
    return (values.movedim(0, -1) + weights.log().to(values)).logsumexp(-1)
