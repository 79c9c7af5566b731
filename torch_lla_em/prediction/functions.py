"""A mixture of functions, and what follows from it: moments, averages and log-probabilities.

The functions are computed from K posterior samples. The classes are last, wherever the model has them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import log
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood, average, mean_square
from torch_lla_em.runtime import without_autocast

FUNCTIONS = 64
"""The least number of functions in an average over one example.

With mirror images alone, averages have 1 to 20 % more error than with any number of rotations; with
one rotation, 1 to 9 % more. The error that comes from the number of samples remains.
"""

JOINT = 1024
"""The same for joint log-probabilities, where few functions dominate a product of many terms."""

WEIGHT, MODE, NETWORK, SCALE = range(4)
"""The columns of a table of components: a prediction's mixture, as fitted or as calibrated.

Each row is a component: its weight, how much of J w_lin and of f its mean contains, and the scale τ
of the posterior's variance. The first row has the samples' deviations, the others have none.
"""

# number of outputs per example above which only the samples and their mirror images are used
_MANY_OUTPUTS = 2**10
# largest number of samples for which a rotation is drawn, which takes K³ operations
_ROTATED = 256
# numbers that averages over functions hold at a time
_NUMBERS = 2**23


@dataclass(frozen=True, repr=False)
class Functions:
    """A distribution over functions at B inputs: that of a posterior, or a mixture of several."""

    likelihood: Likelihood

    centre: Tensor
    """The mean over functions, (B, ..., C); in a mixture with weights that of the first member."""

    deviations: Tensor
    """Samples minus this mean, √τ J w_k, (K, B, ..., C), joint over inputs; K is 0 without uncertainty."""

    class_dim: int = -1
    """The axis of the classes in the network's outputs."""

    members: tuple[Any, ...] = ()
    """The distributions whose mixture this is; otherwise empty."""

    weights: Tensor | None = None
    """The weights of a posterior and of functions without uncertainty, whose sum is 1; None: equal."""

    drift: Tensor | None = None
    """The standard error of this mean relative to the posterior's deviations, (B or 1, 1, ...); None: 0."""

    @property
    def _parts(self) -> tuple[Functions, ...]:
        """The components, which are no mixtures themselves."""
        return self._flat if self.members else (self,)

    @cached_property
    def _flat(self) -> tuple[Functions, ...]:
        """The components of a mixture; one without members would hold itself in memory."""
        return tuple(part for member in self.members for part in member._parts)

    @cached_property
    def _shares(self) -> Tensor:
        """The weight of each component, (parts,)."""
        if not self.members:
            return self.centre.new_ones(1)
        equal = self.centre.new_full((len(self.members),), 1 / len(self.members))
        weights = equal if self.weights is None else self.weights.to(equal.device)
        return torch.cat([w * member._shares for w, member in zip(weights, self.members)])

    def _averaged(self, of: Callable[[Functions], Tensor]) -> Tensor:
        """Return the mean of a quantity over the components."""
        if not self.members:
            return of(self)
        return average(torch.stack([of(part) for part in self._parts]), self._shares)

    def _total_variance(
        self, within: Callable[[Functions], Tensor], of: Callable[[Functions], Tensor]
    ) -> Tensor:
        """Return the mean of a variance over the components, plus the variance of a mean."""
        mean = self._averaged(of)
        return self._averaged(lambda part: within(part) + (of(part) - mean).square())

    def _mean(self) -> Tensor:
        return self._averaged(lambda part: part.centre)

    def _variance_of_f(self) -> Tensor:
        return self._total_variance(
            lambda part: mean_square(part.deviations), lambda part: part.centre
        )

    def _samples(self) -> Tensor:
        """Return K functions, (K, B, ..., C), of every component in proportion to its weight."""
        if not self.members:
            return self.centre + self.deviations
        samples = torch.cat([member._samples() for member in self.members])
        if self.weights is None:
            return samples
        count, certain = len(samples), [member.centre for member in self.members[1:]]
        part, own = slots(self.weights, count), torch.arange(count, device="cpu")
        chosen = torch.where(part > 0, count + part - 1, own)
        return torch.cat([samples, torch.stack(certain)])[chosen.to(samples.device)]

    def _functions(self, rows: slice = slice(None), at_least: int = FUNCTIONS) -> Tensor:
        """Return S functions, (S, b, ..., C), those of the first component first."""
        each = [
            part.centre[rows] + functions_of(part.deviations[:, rows], at_least)
            for part in self._parts
        ]
        return torch.cat(each) if len(each) > 1 else each[0]

    @cached_property
    def _weights(self) -> Tensor | None:
        """The weight of each of these functions, (S,), or None if they are equal."""
        if not self.members:
            return None
        counts = [number_of_functions(part.deviations) for part in self._parts]
        return torch.cat([(share / n).expand(n) for share, n in zip(self._shares, counts)])

    def _weighting(self) -> tuple[Tensor, ...]:
        """Return the weights as further arguments: none if they are equal."""
        return () if self._weights is None else (self._weights,)

    def _over_rows(
        self, take: Callable[[Tensor, slice], Tensor], dim: int = 0, at_least: int = FUNCTIONS
    ) -> Tensor:
        """Apply ``take`` to all functions (S, b, ..., C) of a few examples at a time."""
        count = len(self.centre)
        functions = sum(number_of_functions(part.deviations, at_least) for part in self._parts)
        step = max(1, _NUMBERS // max(1, functions * self.centre[:1].numel()))
        chunks = [slice(start, start + step) for start in range(0, count, step)]
        if len(chunks) < 2:  # without a number of rows, so that exported programs take any
            chunks = [slice(None)]
        with without_autocast(self.centre.device):
            parts = [take(self._functions(rows, at_least), rows) for rows in chunks]
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0]

    def _expected(self) -> Tensor:
        """Return E[y]."""
        if self.likelihood.real_valued:
            return self.likelihood.mean(self._mean())
        weights = self._weights
        return self._over_rows(lambda f, _: average(self.likelihood.mean(f), weights))

    def _uncertainties(self) -> tuple[Tensor, Tensor]:
        """Return the aleatoric and the epistemic uncertainty."""
        if self.likelihood.observation_noise is not None:
            mean = self.likelihood.mean  # it is linear
            aleatoric = self._averaged(lambda part: part.likelihood.variance(part.centre))
            return aleatoric, self._total_variance(
                lambda part: mean_square(mean(part.deviations)), lambda part: mean(part.centre)
            )
        weights = self._weighting()
        both = self._over_rows(
            lambda f, _: torch.stack(self.likelihood.uncertainties(f, *weights)), dim=1
        )
        return both[0], both[1]

    def _variance(self) -> Tensor:
        """Return the variance of y."""
        aleatoric, epistemic = self._uncertainties()
        return aleatoric + epistemic

    def _squared_error(self) -> Tensor:
        """Return the squared Monte Carlo error of E[y]: that of the covariance, and that of the mean."""
        if self.members and self.weights is None:
            each = torch.stack([member._squared_error() for member in self.members])
            return each.mean(0) / len(each)
        (first, *rest), weights = self._parts, self._shares
        count, mean = len(first.deviations), self.likelihood.mean

        def of(f: Tensor, rows: slice) -> Tensor:
            above, below = _ends(mean(f), count)
            moved = weights[0] * first._drift(rows) * 0.5 * (above - below)
            for part, weight in zip(rest, weights[1:]):  # which move with the same mean
                apart, centre = part._drift(rows) * first.deviations[:, rows], part.centre[rows]
                moved = moved + weight * 0.5 * (mean(centre + apart) - mean(centre - apart))
            return (weights[0] * pair_error(above, below)).square() + mean_square(moved)

        return first._over_rows(of)

    def _drift(self, rows: slice) -> Tensor | float:
        """Return ``drift`` of some inputs."""
        if self.drift is None:
            return 0.0
        return self.drift if len(self.drift) == 1 else self.drift[rows]

    def _log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y_n | x_n), (B,)."""

        def of(part: Functions) -> Tensor:
            known = part.likelihood.predictive_log_prob(part.centre, part.deviations, y)
            if known is not None:
                return known
            log_prob = part.likelihood.log_prob
            return part._over_rows(lambda f, rows: log_mean_exp(log_prob(f, y[rows])))

        return log_mean_exp(torch.stack([of(part) for part in self._parts]), self._shares)

    def _joint_log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y_1..y_B | x_1..x_B), ()."""

        def of(part: Functions) -> Tensor:
            likelihood = part.likelihood
            known = likelihood.predictive_log_prob(part.centre, part.deviations, y, joint=True)
            if known is not None:
                return known
            each = part._over_rows(lambda f, rows: likelihood.log_prob(f, y[rows]), 1, JOINT)
            return log_mean_exp(each.sum(1))

        return log_mean_exp(torch.stack([of(part) for part in self._parts]), self._shares)

    def _site_values(self, values: Tensor) -> Tensor:
        return self._out(values) if values.dim() == self.centre.dim() else values

    def _out(self, values: Tensor, leading: int = 0) -> Tensor:
        """Move the classes back to their axis in the model's outputs."""
        return values.movedim(-1, self.class_dim + leading * (self.class_dim >= 0))


def functions_of(deviations: Tensor, at_least: int = FUNCTIONS) -> Tensor:
    """Return S ≥ 2 K zero-mean functions, shape (S, B, ...), from deviations (K, B, ...).

    They are the samples, random rotations of them, and the mirror image of each. Every set has the
    samples' covariance Σ_k d_k d_kᵀ / K, and the mean of all functions is 0, so that the error of an
    average is mostly that of the covariance. The rotations depend on K alone. Without samples there
    is one function, 0.
    """
    if not len(deviations):
        return deviations.new_zeros(1, *deviations.shape[1:])
    sets = _sets(deviations, at_least)
    if sets > 1:
        Q = torch.from_numpy(_rotations(len(deviations), sets - 1))
        # products in the dtype of the samples, also inside an autocast context
        with without_autocast(deviations.device):
            rotated = torch.tensordot(Q.to(deviations), deviations, dims=1)
        deviations = torch.cat([deviations, rotated])
    return torch.cat([deviations, -deviations])


def number_of_functions(deviations: Tensor, at_least: int = FUNCTIONS) -> int:
    """Return S, the number of functions that ``functions_of`` returns."""
    return 2 * len(deviations) * _sets(deviations, at_least) if len(deviations) else 1


def _sets(deviations: Tensor, at_least: int) -> int:
    count, outputs = len(deviations), deviations[0, :1].numel()
    if count == 1 or outputs > _MANY_OUTPUTS:
        return 1
    return max(2 if count <= _ROTATED else 1, -(-at_least // (2 * count)))


@lru_cache(maxsize=8)
def _rotations(count: int, sets: int) -> np.ndarray:
    """Return random orthogonal matrices, stacked to shape (sets × K, K).

    They are no tensors, since one that is made in ``torch.inference_mode`` cannot be differentiated later.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    normal = torch.randn(sets, count, count, generator=generator, dtype=torch.float64, device="cpu")
    rotations: np.ndarray = torch.linalg.qr(normal).Q.flatten(0, 1).numpy()
    return rotations


def redrawn(deviations: Tensor, generator: torch.Generator) -> Tensor:
    """Draw K new Gaussian functions that have the samples' covariance."""
    size = (len(deviations), len(deviations))
    weights = torch.randn(size, generator=generator, device=generator.device)
    weights = weights.to(deviations) / len(deviations) ** 0.5
    with without_autocast(deviations.device):
        drawn: Tensor = torch.tensordot(weights, deviations, dims=1)
    return drawn


def slots(weights: Tensor, count: int) -> Tensor:
    """Assign each of ``count`` functions to a part of a mixture, in proportion to its weights.

    The first few functions follow these proportions too, as nearly as their number allows.
    """
    places = (
        (torch.arange(count, dtype=torch.float64, device="cpu") + 0.5) * 0.6180339887498949
    ).frac()
    ends = weights.detach().double().cpu().cumsum(0)
    return torch.searchsorted(ends / ends[-1], places).clamp(max=len(weights) - 1)


def log_mean_exp(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the logarithm of the mean of exp(values) over the first axis."""
    if weights is None:
        return values.logsumexp(0) - log(len(values))
    return (values.movedim(0, -1) + weights.log().to(values)).logsumexp(-1)


def quantile(values: Tensor, share: float, weights: Tensor | None) -> Tensor:
    """Return a quantile over the first axis; torch.quantile limits the size of its input."""
    values, order = values.sort(0)
    if weights is None:
        position = share * (len(values) - 1)
        below = min(int(position), len(values) - 2) if len(values) > 1 else 0
        return values[below].lerp(values[min(below + 1, len(values) - 1)], position - below)
    each = weights.to(values)[order]
    places = each.cumsum(0) - 0.5 * each
    above = (places < share).sum(0, keepdim=True).clamp(1, len(values) - 1)
    ends, at = zip(*((values.gather(0, i), places.gather(0, i)) for i in (above - 1, above)))
    step = ((share - at[0]) / (at[1] - at[0]).clamp_min(1e-30)).clamp(0, 1)
    interpolated: Tensor = ends[0].lerp(ends[1], step)[0]
    return interpolated


def _ends(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the values at ``count`` samples and at their mirror images, of those at all functions."""
    half = len(values) // 2
    return values[:count], values[half : half + count]


def pair_error(above: Tensor, below: Tensor) -> Tensor:
    """Return the standard error of the mean over functions, by values at samples and at their mirror images.

    An average over a sample and its mirror image is nearly quadratic in the sample. Its spread over
    the samples is therefore that of their covariance, which rotations do not reduce.
    """
    pairs, count = 0.5 * (above + below), len(above)
    if not count:
        return pairs.new_zeros(pairs.shape[1:])
    return pairs.std(0) / count**0.5 if count > 1 else torch.full_like(pairs[0], float("nan"))
