"""The distribution of functions at B inputs: K posterior samples, and further ones with weights."""

from __future__ import annotations

from collections.abc import Callable

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


class FunctionMixture:
    """The distribution of f at B inputs, joint over them, without observation noise.

    Classes are last in the fields, wherever the model has them.
    """

    centre: Tensor
    deviations: Tensor
    class_dim: int
    beside: Tensor | None
    weights: Tensor | None

    @property
    def mean(self) -> Tensor:
        """The mean of f."""
        return self._out(self._mean())

    @property
    def function_variance(self) -> Tensor:
        """The variance of f, without observation noise, shape (B, ..., C)."""
        return self._out(self._variance_of_f())

    @property
    def variance(self) -> Tensor:
        """The variance of f, without observation noise: the same as ``function_variance``."""
        return self.function_variance

    @property
    def covariance(self) -> Tensor:
        """The covariance of f over all inputs and outputs, of ``mean.flatten()``, shape (B C, B C)."""
        flat = self._out(self.deviations, leading=1).flatten(1)
        with own_precision(flat):
            covariance = flat.T @ flat / len(flat)
        if self.beside is None:
            return covariance
        apart = self._out(self._centres() - self._mean(), leading=1).flatten(1)
        weights = self.weights.to(apart)
        with own_precision(flat):
            return weights[0] * covariance + apart.T @ (weights[:, None] * apart)

    @property
    def samples(self) -> Tensor:
        """K samples of f, shape (K, B, ..., C): f + √τ J w_k, and further functions by their weight."""
        return self._out(self._samples(), leading=1)

    @property
    def functions(self) -> Tensor:
        """The samples and more with the same covariance, shape (S, B, ..., C), S at least 2 K.

        Averages such as ``probs`` are taken over these. Each has its mirror image, so that the mean
        is exact, and random rotations of the samples leave little but the error of their covariance.
        Further functions of the mixture are repeated in proportion to their weight.
        """
        return self._out(self._alike(), leading=1)

    def _centres(self) -> Tensor:
        """Return what every part is around, (1 + M, B, ..., C)."""
        centre = self.centre[None]
        return centre if self.beside is None else torch.cat([centre, self.beside])

    def _mean(self) -> Tensor:
        """Return the mean of f, (B, ..., C)."""
        return average(self._centres(), self.weights)

    def _variance_of_f(self) -> Tensor:
        """Return the variance of f, (B, ..., C)."""
        variance = self.deviations.square().mean(0)
        if self.beside is None:
            return variance
        spread = average((self._centres() - self._mean()).square(), self.weights)
        return self.weights[0].to(variance) * variance + spread

    def _samples(self) -> Tensor:
        """Return K functions, (K, B, ..., C), of every part in its share of them."""
        samples = self.centre + self.deviations
        if self.beside is None:
            return samples
        part, own = slots(self.weights, len(samples)), torch.arange(len(samples), device="cpu")
        chosen = torch.where(part > 0, len(samples) + part - 1, own)
        return torch.cat([samples, self.beside])[chosen.to(samples.device)]

    def _functions(self, rows: slice = slice(None), at_least: int = FUNCTIONS) -> Tensor:
        """Return S functions, (S, b, ..., C), the posterior's first."""
        functions = self.centre[rows] + functions_of(self.deviations[:, rows], at_least)
        return functions if self.beside is None else torch.cat([functions, self.beside[:, rows]])

    def _alike(self) -> Tensor:
        """Return functions of equal weights, (S, B, ..., C): of every part in its share of them."""
        functions = self._functions()
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

    def _each(self, at_least: int = FUNCTIONS) -> Tensor | None:
        """Return the weight of each function, (S,), or None where they are equal."""
        if self.weights is None:
            return None
        count, weights = number_of_functions(self.deviations, at_least), self.weights
        weights = weights.to(self.centre)
        return torch.cat([(weights[:1] / count).expand(count), weights[1:]])

    def _over_rows(
        self, take: Callable[[Tensor, slice], Tensor], dim: int = 0, at_least: int = FUNCTIONS
    ) -> Tensor:
        """Return what ``take`` makes of all functions (S, b, ..., C), a few rows at a time."""
        count = len(self.centre)
        row = number_of_functions(self.deviations, at_least) * self.centre[:1].numel()
        step = max(1, _NUMBERS // max(row, 1))
        chunks = [slice(start, start + step) for start in range(0, count, step)]
        if len(chunks) < 2:  # without a number of rows, so that exported programs take any
            chunks = [slice(None)]
        with own_precision(self.centre):
            parts = [take(self._functions(rows, at_least), rows) for rows in chunks]
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0]

    def _out(self, values: Tensor, leading: int = 0) -> Tensor:
        """Move the classes back to where the model has them."""
        return values.movedim(-1, self.class_dim + leading * (self.class_dim >= 0))
