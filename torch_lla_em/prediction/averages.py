"""What follows from a mixture of functions: moments, averages and log-probabilities, classes last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import pi
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood, Regression, average, sum_rows
from torch_lla_em.prediction.functions import (
    FUNCTIONS,
    JOINT,
    functions_of,
    joint_gaussian,
    log_mean_exp,
    mean_square,
    number_of_functions,
    slots,
)

# numbers that averages over functions hold at a time
_NUMBERS = 2**23


@dataclass(frozen=True, repr=False)
class Functions:
    """A distribution over functions at B inputs: that of a posterior, or a mixture of several.

    The classes are last in the fields, wherever the model has them.
    """

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

    @property
    def _parts(self) -> tuple[Functions, ...]:
        """The components, which are no mixtures themselves."""
        return tuple(part for member in self.members for part in member._parts) or (self,)

    @property
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

    def _weights(self) -> Tensor | None:
        """Return the weight of each of these functions, (S,), or None if they are equal."""
        if not self.members:
            return None
        counts = [number_of_functions(part.deviations) for part in self._parts]
        return torch.cat([(share / n).expand(n) for share, n in zip(self._shares, counts)])

    def _weighting(self) -> tuple[Tensor, ...]:
        """Return the weights as further arguments: none if they are equal."""
        weights = self._weights()
        return () if weights is None else (weights,)

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
        with torch.autocast(self.centre.device.type, enabled=False):
            parts = [take(self._functions(rows, at_least), rows) for rows in chunks]
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0]

    def _expected(self) -> Tensor:
        """Return E[y]."""
        if self.likelihood.real_valued:
            return self.likelihood.mean(self._mean())
        weights = self._weights()
        return self._over_rows(lambda f, _: average(self.likelihood.mean(f), weights))

    def _uncertainties(self) -> tuple[Tensor, Tensor]:
        """Return the aleatoric and the epistemic uncertainty."""
        if isinstance(self.likelihood, Regression):
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

    def _log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y_n | x_n), (B,)."""

        def of(part: Functions) -> Tensor:
            if isinstance(part.likelihood, Regression):
                variance, error = part._variance(), y - part._expected()
                return sum_rows(-0.5 * (error**2 / variance + (2 * pi * variance).log()), y)
            log_prob = part.likelihood.log_prob
            return part._over_rows(lambda f, rows: log_mean_exp(log_prob(f, y[rows])))

        return log_mean_exp(torch.stack([of(part) for part in self._parts]), self._shares)

    def _joint_log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y_1..y_B | x_1..x_B), ()."""

        def of(part: Functions) -> Tensor:
            likelihood = part.likelihood
            if isinstance(likelihood, Regression):
                sigma = likelihood.variance(part.centre).sqrt()
                return joint_gaussian(y - part._expected(), likelihood.mean(part.deviations), sigma)
            each = part._over_rows(lambda f, rows: likelihood.log_prob(f, y[rows]), 1, JOINT)
            return log_mean_exp(each.sum(1))

        return log_mean_exp(torch.stack([of(part) for part in self._parts]), self._shares)

    def _site_values(self, values: Tensor) -> Tensor:
        return self._out(values) if values.dim() == self.centre.dim() else values

    def _out(self, values: Tensor, leading: int = 0) -> Tensor:
        """Move the classes back to their axis in the model's outputs."""
        return values.movedim(-1, self.class_dim + leading * (self.class_dim >= 0))
