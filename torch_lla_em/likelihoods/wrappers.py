"""Likelihoods with a temperature, or with a weight for each example, during a fit."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.likelihoods.base import Likelihood


class Tempered(Likelihood):
    """p(y | f)^(1/T) in the fit: every example counts 1/T times. Predictions use p(y | f).

    The posterior covariance is (G / T + Λ)⁻¹ = T (G + T Λ)⁻¹, as with laplace-torch's
    ``temperature``. ``LinearisedLaplace(..., temperature=T)`` uses this class.

    Args:
        likelihood (Likelihood): p(y | f).
        temperature (float): T. Below 1 the posterior is colder, that is, more certain.

    Example:
        >>> likelihood = Tempered(Classification(), 0.5)
    """

    def __init__(self, likelihood: Likelihood, temperature: float = 1.0):
        self.inner, self.temperature = likelihood, temperature
        self.elementwise, self.convex = likelihood.elementwise, likelihood.convex
        self.is_quadratic = likelihood.is_quadratic

    def at_noise(self, sigma_noise: Tensor) -> Tempered:
        """Return the same likelihood with another σ of a regression.

        Args:
            sigma_noise (float or Tensor (C,)): σ, one number or one per output.

        Returns:
            A new likelihood of the same class.
        """
        other = copy.copy(self)
        gaussian: Any = self.inner
        other.inner = gaussian.at_noise(sigma_noise)
        return other

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return self.inner.log_prob(f, y) / self.temperature

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return self.inner.gradient(f, y) / self.temperature

    def hessian_product(self, f: Tensor, u: Tensor) -> Tensor:
        return self.inner.hessian_product(f, u) / self.temperature

    def expected_hessian(self, f: Tensor) -> Tensor:
        return self.inner.expected_hessian(f) / self.temperature

    def hessian_sqrt_product(self, f: Tensor, noise: Tensor) -> Tensor:
        product: Tensor = self.inner.hessian_sqrt_product(f, noise) / self.temperature**0.5
        return product

    def mean(self, f: Tensor) -> Tensor:
        return self.inner.mean(f)

    def mask(self, y: Tensor) -> Tensor | None:
        return self.inner.mask(y)

    def check(self, f: Tensor, y: Tensor) -> None:
        self.inner.check(f, y)

    @property
    def plain(self) -> Likelihood:
        return self.inner.plain


class Weighted(Tempered):
    """p(y | f)^(w/T) in the fit, for targets stacked with their weights w, shape (B, ..., 2).

    ``mask`` returns the weights, and sums over the data multiply gradient and curvature by them.

    Args:
        likelihood (Likelihood): p(y | f), or ``Tempered``.

    Raises:
        TypeError: If targets do not belong to single outputs, as with linear measurements.
        ValueError: If σ would have to be learnt from the data.

    Example:
        >>> packed = torch.stack([y.double(), torch.rand(len(y), dtype=torch.float64)], -1)
        >>> log_prob = Weighted(Classification()).log_prob(model(x), packed)
    """

    def __init__(self, likelihood: Likelihood):
        super().__init__(likelihood)
        plain = likelihood.plain
        if plain.real_valued and not plain.elementwise:
            raise TypeError(
                f"{type(plain).__name__} takes no weights: its targets do not belong to single outputs."
            )
        if getattr(plain, "from_data", False):
            raise ValueError(
                "A weighted regression does not learn σ: pass LinearisedLaplace(..., sigma_noise=...)."
            )

    def unpack(self, packed: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        """Return targets and weights from stacked ones.

        Args:
            packed (Tensor): Targets stacked with their weights, shape (B, ..., 2).
            f (Tensor): Outputs of the network.

        Returns:
            The targets, in the dtype of the likelihood, and the weights of sites, (B, *sites).
        """
        y, w = packed.unbind(-1)
        return (y.to(f.dtype), w[..., 0]) if self.elementwise else (y.long(), w)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        y, w = self.unpack(y, f)
        if w.dim() == 1:
            return self.inner.log_prob(f, y) * w.to(f.dtype)
        lead = f.shape[: f.dim() - w.dim() - 1]  # each site is an example of its own
        f, sites = f.flatten(len(lead), -2), y.flatten(0, w.dim() - 1)
        each = self.inner.log_prob(f, sites).view(*lead, *w.shape)
        return (each * w.to(f.dtype)).flatten(len(lead) + 1).sum(-1)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return self.inner.gradient(f, self.unpack(y, f)[0])

    def mask(self, y: Tensor) -> Tensor:
        targets, w = self.unpack(y, y)
        kept = self.inner.mask(targets)
        return w if kept is None else w * kept

    def align(self, y: Tensor, class_dim: int) -> Tensor:
        if self.elementwise and y.dim() < 3:
            raise ValueError(
                "Weights need an axis for the outputs: have the network return (B, 1), and pass "
                "targets of that shape."
            )
        aligned = (self.inner.align(part, class_dim) for part in y.unbind(-1))
        return torch.stack([part.double() for part in aligned], -1)

    def check(self, f: Tensor, y: Tensor) -> None:
        weights = y[..., 1]
        if self.elementwise and (weights != weights[..., :1]).any():
            raise ValueError(
                "The weights of an example differ between its outputs, but one weight multiplies "
                f"the whole log-likelihood of an example: pass {len(y)} weights for these examples, "
                f"shape ({len(y)},), not {tuple(weights.shape)}."
            )
        self.inner.check(f, self.unpack(y, f)[0])


def tempered(likelihood: Likelihood, temperature: float) -> Likelihood:
    """Return the likelihood at this temperature; the likelihood itself at 1."""
    return likelihood if temperature == 1 else Tempered(likelihood, temperature)
