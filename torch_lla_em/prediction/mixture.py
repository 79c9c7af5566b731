"""Functions at B inputs: a posterior's, by K samples, and others beside it with weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.likelihoods import average
from torch_lla_em.prediction.functions import (
    FUNCTIONS,
    functions_of,
    number_of_functions,
    own_precision,
    slots,
)

# numbers that averages over functions hold at a time
_NUMBERS = 2**23
# functions of equal weights, at most, where others are beside the posterior's
_ALIKE = 1024


class Mixture(NamedTuple):
    """The distribution of f at B inputs, joint over them."""

    centre: Tensor
    """What the posterior's functions are around, (B, ..., C)."""

    deviations: Tensor
    """Theirs from it, (K, B, ..., C)."""

    beside: Tensor | None = None
    """Other functions, (M, B, ..., C)."""

    weights: Tensor | None = None
    """Of the posterior and of the others, (1 + M,)."""

    def centres(self) -> Tensor:
        """Return what every part is around, (1 + M, B, ..., C)."""
        centre = self.centre[None]
        return centre if self.beside is None else torch.cat([centre, self.beside])

    def mean(self) -> Tensor:
        """Return the mean of f, (B, ..., C)."""
        return average(self.centres(), self.weights)

    def variance(self) -> Tensor:
        """Return the variance of f, (B, ..., C)."""
        variance = self.deviations.square().mean(0)
        if self.beside is None:
            return variance
        spread = average((self.centres() - self.mean()).square(), self.weights)
        return self.weights[0].to(variance) * variance + spread

    def samples(self) -> Tensor:
        """Return K functions, (K, B, ..., C), of every part in its share of them."""
        samples = self.centre + self.deviations
        if self.beside is None:
            return samples
        part, own = slots(self.weights, len(samples)), torch.arange(len(samples), device="cpu")
        chosen = torch.where(part > 0, len(samples) + part - 1, own)
        return torch.cat([samples, self.beside])[chosen.to(samples.device)]

    def functions(self, rows: slice = slice(None), at_least: int = FUNCTIONS) -> Tensor:
        """Return S functions, (S, b, ..., C), the posterior's first."""
        functions = self.centre[rows] + functions_of(self.deviations[:, rows], at_least)
        return functions if self.beside is None else torch.cat([functions, self.beside[:, rows]])

    def alike(self) -> Tensor:
        """Return functions of equal weights, (S, B, ..., C): of every part in its share of them."""
        functions = self.functions()
        if self.beside is None:
            return functions
        weights, count = self.weights.tolist(), len(functions) - len(self.beside)
        total = min(count / max(weights[0], 1e-9), _ALIKE)
        half, pairs = round(0.5 * total * weights[0]), functions[:count].unflatten(0, (2, -1))
        copies = (
            function.expand(round(total * weight), *function.shape)
            for function, weight in zip(self.beside, weights[1:])
        )
        return torch.cat([pairs[:, :half].flatten(0, 1), *copies])

    def each(self, at_least: int = FUNCTIONS) -> Tensor | None:
        """Return the weight of each function, (S,), or None where they are equal."""
        if self.weights is None:
            return None
        count, weights = number_of_functions(self.deviations, at_least), self.weights
        weights = weights.to(self.centre)
        return torch.cat([(weights[:1] / count).expand(count), weights[1:]])

    def over_rows(
        self, take: Callable[[Tensor, slice], Tensor], dim: int = 0, at_least: int = FUNCTIONS
    ) -> Tensor:
        """Return what ``take`` makes of all functions (S, b, ..., C), a few rows at a time."""
        count = len(self.centre)
        row = number_of_functions(self.deviations, at_least) * self.centre[:1].numel()
        step = max(1, _NUMBERS // max(row, 1))
        chunks = [slice(start, start + step) for start in range(0, max(count, 1), step)]
        with own_precision(self.centre):
            parts = [take(self.functions(rows, at_least), rows) for rows in chunks]
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0]
