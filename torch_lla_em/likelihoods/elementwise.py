"""Likelihoods of one independent target per output, whose H is diagonal."""

from __future__ import annotations

import copy
from math import log, pi

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from torch_lla_em.likelihoods.base import Gaussian, Labels, Likelihood, average, sum_rows
from torch_lla_em.runtime import check_options

_MOST_COUNTS = 100_000


class ElementwiseLikelihood(Likelihood):
    """One independent target per output: y has the shape of f, and H is diagonal."""

    elementwise = True

    def curvature(self, f: Tensor) -> Tensor:
        """Return the diagonal of H(f), the shape of f."""
        raise NotImplementedError

    def hessian_product(self, f: Tensor, u: Tensor) -> Tensor:
        return self.curvature(f) * u

    def hessian_sqrt_product(self, f: Tensor, noise: Tensor) -> Tensor:
        return self.curvature(f).sqrt() * noise

    def check(self, f: Tensor, y: Tensor) -> None:
        if y.is_complex():
            raise TypeError(f"Targets must be real numbers, not {y.dtype}.")
        if y.shape != f.shape:
            raise ValueError(
                f"Targets have shape {tuple(y.shape)}, but the outputs {tuple(f.shape)}. They "
                "must be equal, as broadcasting would pair every target with every output: "
                "reshape the targets, for example with y[:, None]."
            )
        if not torch.isfinite(y).all():
            raise ValueError("Targets hold NaN or infinite values: remove those rows.")


class Regression(Gaussian, ElementwiseLikelihood):
    """Gaussian noise of standard deviation ``sigma_noise``, () or one per output (C,)."""

    normalised = True
    """Whether log_prob has its constant, beside which small residuals may be lost to rounding."""

    def __init__(self, sigma_noise: float | Tensor | None = None):
        check_options(sigma_noise=sigma_noise)
        self.from_data = sigma_noise is None
        """Whether a fit starts σ from the network's own residuals; until then it is 1."""

        sigma_noise = 1.0 if sigma_noise is None else sigma_noise
        sigma_noise = torch.as_tensor(sigma_noise, dtype=torch.float64, device="cpu")
        if sigma_noise.dim() > 1:
            raise ValueError(
                f"sigma_noise must be a positive number or one per output, not {sigma_noise}."
            )
        self.sigma_noise = sigma_noise.detach().clone()

    def at_noise(self, sigma_noise: Tensor) -> Regression:
        """Return the same likelihood at another noise."""
        other = copy.copy(self)
        other.sigma_noise, other.from_data = sigma_noise, False
        return other

    def without_constant(self) -> Regression:
        """Return the same likelihood with -log p = ½ Σ (y - f)² / σ² alone."""
        other = copy.copy(self)
        other.normalised = False
        return other

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        sigma = self._sigma(f)
        terms = -0.5 * ((y - self.mean(f)) / sigma) ** 2
        if self.normalised:
            terms = terms - sigma.log() - 0.5 * log(2 * pi)
        return sum_rows(terms, y)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return (self.mean(f) - y) / self._sigma(f) ** 2

    def curvature(self, f: Tensor) -> Tensor:
        return (self._sigma(f) ** -2).expand_as(f)

    def mean(self, f: Tensor) -> Tensor:
        return f

    def variance(self, f: Tensor) -> Tensor:
        return (self._sigma(f) ** 2).expand_as(self.mean(f))

    def check(self, f: Tensor, y: Tensor) -> None:
        super().check(f, y)
        if self.sigma_noise.dim() and len(self.sigma_noise) != f.shape[-1]:
            raise ValueError(
                f"sigma_noise has {len(self.sigma_noise)} values, but the network "
                f"{f.shape[-1]} outputs: pass one number, or one per output."
            )

    @property
    def is_quadratic(self) -> bool:
        return True

    def _sigma(self, f: Tensor) -> Tensor:
        sigma = self.sigma_noise
        if sigma.dim() or sigma.device == f.device:
            return sigma.to(f, non_blocking=f.is_cuda)  # a batch waits for nothing
        return f.new_full((), sigma.item())  # a copy could not be part of a CUDA graph


class Bernoulli(Labels, ElementwiseLikelihood):
    """Independent 0/1 targets of logits f: one output, or several labels."""

    monotone = True

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return sum_rows(y * f - softplus(f), y)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return f.sigmoid() - y

    def log_mean(self, f: Tensor) -> Tensor:
        return logsigmoid(f)

    def entropy_of(self, p: Tensor) -> Tensor:
        """Return that of every output."""
        return torch.special.entr(p) + torch.special.entr(1 - p)

    def curvature(self, f: Tensor) -> Tensor:
        return f.sigmoid() * (-f).sigmoid()

    def mean(self, f: Tensor) -> Tensor:
        return f.sigmoid()

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.bernoulli(f.sigmoid(), generator=generator)

    def check(self, f: Tensor, y: Tensor) -> None:
        super().check(f, y)
        if ((y != 0) & (y != 1)).any():
            raise ValueError("Bernoulli targets must be 0 or 1, of the shape of the outputs.")


class Poisson(ElementwiseLikelihood):
    """Counts y with log rate f."""

    monotone = True

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return sum_rows(y * f - f.exp() - torch.lgamma(y.to(f) + 1), y)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return f.exp() - y

    def curvature(self, f: Tensor) -> Tensor:
        return f.exp()

    def mean(self, f: Tensor) -> Tensor:
        return f.exp()

    def variance(self, f: Tensor) -> Tensor:
        return f.exp()

    def entropy(self, f: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return -Σ p(y) log p(y) of the mixture, over every count that may occur."""
        rates = f.exp()
        largest = rates.max().item()
        last = largest + 12 * largest**0.5 + 30
        if not last < _MOST_COUNTS:
            raise ValueError(
                f"A rate of {largest:.3g} asks for a sum over too many counts: use .aleatoric and "
                ".epistemic, the two parts of Var[y]."
            )
        total = torch.zeros_like(f[0])
        for y in torch.arange(int(last) + 1, dtype=f.dtype, device=f.device):
            p = average((y * f - rates - torch.lgamma(y + 1)).exp(), weights)
            total += torch.special.entr(p)
        return total

    def smoothed_mean(self, f: Tensor, variance: Tensor) -> Tensor:
        return (f + 0.5 * variance).exp()

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.poisson(f.exp(), generator=generator)

    def check(self, f: Tensor, y: Tensor) -> None:
        super().check(f, y)
        if ((y < 0) | (y != y.round())).any():
            raise ValueError("Poisson targets must be counts: 0, 1, 2, ...")
