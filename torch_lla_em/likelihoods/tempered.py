"""A likelihood raised to the power 1/T."""

from __future__ import annotations

from torch import Tensor

from torch_lla_em.likelihoods.base import Likelihood


class Tempered(Likelihood):
    """p(y | f)^(1/T) in the fit: every datum counts 1/T times; predictions keep p(y | f).

    The posterior covariance is (G / T + Λ)⁻¹ = T (G + T Λ)⁻¹, as with laplace-torch's
    ``temperature``: T below 1 is colder, hence surer.
    """

    def __init__(self, likelihood: Likelihood, temperature: float):
        self.untempered = likelihood
        self.temperature = temperature
        self.elementwise = likelihood.elementwise
        self.convex = likelihood.convex

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return self.untempered.log_prob(f, y) / self.temperature

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return self.untempered.gradient(f, y) / self.temperature

    def hessian_product(self, f: Tensor, u: Tensor) -> Tensor:
        return self.untempered.hessian_product(f, u) / self.temperature

    def hessian_sqrt_product(self, f: Tensor, noise: Tensor) -> Tensor:
        return self.untempered.hessian_sqrt_product(f, noise) / self.temperature**0.5

    def mean(self, f: Tensor) -> Tensor:
        return self.untempered.mean(f)

    def mask(self, y: Tensor) -> Tensor | None:
        return self.untempered.mask(y)

    def check(self, f: Tensor, y: Tensor) -> None:
        self.untempered.check(f, y)

    @property
    def is_quadratic(self) -> bool:
        return self.untempered.is_quadratic


def tempered(likelihood: Likelihood, temperature: float) -> Likelihood:
    """Return the likelihood at this temperature, itself at 1."""
    return likelihood if temperature == 1 else Tempered(likelihood, temperature)
