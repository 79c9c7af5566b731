"""Likelihoods p(y | f): loss, its gradient, Hessian H and a root S of H, all O(C).

Outputs f are (..., B, *sites, C), with the classes last; leading sample axes broadcast.
A likelihood of your own needs ``log_prob``, ``hessian_sqrt_product`` and ``mean``; give
``gradient`` and ``hessian_product`` in closed form too if the defaults are too slow. Every fit
compares all of them with derivatives of ``log_prob`` on the first batch (``examined.py``).
"""

from __future__ import annotations

from math import pi

import torch
from torch import Tensor


class Likelihood:
    """How targets y arise from outputs f; the base class of those that ship."""

    convex = True
    """Whether -log p is convex in f, so that the linear model has one mode."""

    elementwise = False
    """Whether y has an axis of its own for the outputs, where f has its classes."""

    real_valued = False
    """Whether y are real numbers with noise: then a prediction is (mean, variance)."""

    gives_probabilities = False
    """Whether E[y] is a probability, so that its logarithm means something."""

    monotone = False
    """Whether each entry of E[y | f] grows with its own entry of f, and depends on no other."""

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Return log p(y | f) of each row, shape (..., B)."""
        raise NotImplementedError(f"{type(self).__name__} must define log_prob(f, y).")

    def hessian_sqrt_product(self, f: Tensor, noise: Tensor) -> Tensor:
        """Return S ε, where S Sᵀ = H(f); the shape of f and ε, broadcast."""
        raise NotImplementedError(
            f"{type(self).__name__} must define hessian_sqrt_product(f, noise): any linear "
            "map S of the noise with S Sᵀ equal to the Hessian of -log_prob in f."
        )

    def mean(self, f: Tensor) -> Tensor:
        """Return E[y | f] (probabilities for classes), the shape of f."""
        raise NotImplementedError(f"{type(self).__name__} must define mean(f).")

    def log_mean(self, f: Tensor) -> Tensor:
        """Return log E[y | f], the shape of f."""
        return self.mean(f).log()

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of -log p(y | f) in f."""
        return torch.func.grad(lambda f: -self.log_prob(f, y).sum())(f)

    def hessian_product(self, f: Tensor, u: Tensor) -> Tensor:
        """Return H(f) u; by default S(Sᵀ u), with Sᵀ from reverse mode."""
        f = f.expand_as(u)
        transpose = torch.func.vjp(lambda e: self.hessian_sqrt_product(f, e), u)[1]
        return self.hessian_sqrt_product(f, transpose(u)[0])

    def variance(self, f: Tensor) -> Tensor:
        """Return Var[y | f], the shape of f."""
        raise NotImplementedError(
            f"{type(self).__name__} must define variance(f) for aleatoric uncertainty."
        )

    def uncertainties(self, f: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the aleatoric and the epistemic part of Var[y] over functions (S, ...)."""
        mean, variance = self.mean(f), self.variance(f)
        spread = (mean - average(mean, weights)).square()
        return average(variance, weights), average(spread, weights)

    def entropy(self, f: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the entropy of y under the mixture over functions f, (S, B, ..., C)."""
        raise NotImplementedError(
            f"The entropy of {type(self).__name__} has no closed form: use .aleatoric and "
            ".epistemic, or define entropy(f)."
        )

    def smoothed_mean(self, f: Tensor, variance: Tensor) -> Tensor:
        """Return E[y] over Gaussian outputs with these moments, in closed form."""
        raise NotImplementedError(
            f'{type(self).__name__} has no closed form for Gaussian outputs: use link_approx="mc".'
        )

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw y given f."""
        raise NotImplementedError(f"{type(self).__name__} must define sample(f, generator).")

    def mask(self, y: Tensor) -> Tensor | None:
        """Return which sites count, or how often, shape (B, *sites), or None if all count once."""
        return None

    def labelled(self, y: Tensor) -> Tensor:
        """Return whether each example has a target that counts, (B,)."""
        mask = self.mask(y)
        if mask is None:
            return torch.ones(len(y), dtype=torch.bool, device=y.device)
        return mask.flatten(1).any(1) if mask.dim() > 1 else mask

    def align(self, y: Tensor, class_dim: int) -> Tensor:
        """Return targets with the axis of the outputs last, where there is one.

        Small integers become int64, and truth values numbers where every output has one.
        """
        small = (torch.uint8, torch.int8, torch.int16, torch.int32)
        if y.dtype in small or (y.dtype == torch.bool and self.elementwise):
            y = y.long()
        if self.elementwise and -y.dim() <= class_dim < y.dim():
            return y.movedim(class_dim, -1)
        return y

    def check(self, f: Tensor, y: Tensor) -> None:
        """Raise where outputs or targets do not fit this likelihood."""

    @property
    def is_quadratic(self) -> bool:
        """Whether -log p is quadratic in f, so that the mode is one linear solve."""
        return False


class Labels(Likelihood):
    """Whose E[y | f] are probabilities, with an entropy that is concave in them."""

    gives_probabilities = True

    def entropy_of(self, p: Tensor) -> Tensor:
        """Return the entropy of y of these probabilities."""
        raise NotImplementedError

    def entropy(self, f: Tensor, weights: Tensor | None = None) -> Tensor:
        return self.entropy_of(average(self.mean(f), weights))

    def uncertainties(self, f: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the expected entropy and the mutual information."""
        p = self.mean(f)
        expected = average(self.entropy_of(p), weights)
        return expected, (self.entropy_of(average(p, weights)) - expected).clamp_min(0)

    def smoothed_mean(self, f: Tensor, variance: Tensor) -> Tensor:
        return self.mean(f / (1 + pi / 8 * variance).sqrt())


class Gaussian(Likelihood):
    """Of real y that are normal around their mean."""

    real_valued = True

    def smoothed_mean(self, f: Tensor, variance: Tensor) -> Tensor:
        return self.mean(f)

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        mean = self.mean(f)
        noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
        return mean + self.variance(f).sqrt() * noise


def sum_rows(terms: Tensor, y: Tensor) -> Tensor:
    """Sum (..., B, *sites, C) over all but the leading axes and the rows of y (B, ...)."""
    within = y.dim() - 1
    return terms.flatten(terms.dim() - within).sum(-1) if within else terms


def average(values: Tensor, weights: Tensor | None) -> Tensor:
    """Return the mean of (S, ...) over functions of these weights (S,), of equal ones if None."""
    if weights is None:
        return values.mean(0)
    weights = weights.to(values).view(-1, *(1,) * (values.dim() - 1))
    return (weights * values).sum(0)
