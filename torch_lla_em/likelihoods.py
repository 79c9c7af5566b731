"""Likelihoods p(y | f): loss, its gradient, Hessian H and a root S of H, all O(C).

Outputs f are (..., B, *sites, C), with the classes last; leading sample axes broadcast.
A likelihood of your own needs ``log_prob``, ``hessian_sqrt_product`` and ``mean``; give
``gradient`` and ``hessian_product`` in closed form too if the defaults are too slow.
"""

from __future__ import annotations

from math import log, pi

import torch
from torch import Tensor
from torch.nn.functional import softplus


class Likelihood:
    """How targets y arise from outputs f; the base class of the four that ship."""

    elementwise = False
    """Whether y has the shape of f, with its classes on the same axis."""

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

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of -log p(y | f) in f."""
        return torch.func.grad(lambda f: -self.log_prob(f, y).sum())(f)

    def hessian_product(self, f: Tensor, u: Tensor) -> Tensor:
        """Return H(f) u; by default S(Sᵀ u), with Sᵀ from reverse mode."""
        f = f.expand_as(u)
        _, transpose = torch.func.vjp(lambda e: self.hessian_sqrt_product(f, e), u)
        return self.hessian_sqrt_product(f, transpose(u)[0])

    def variance(self, f: Tensor) -> Tensor:
        """Return Var[y | f], the shape of f."""
        raise NotImplementedError(
            f"{type(self).__name__} must define variance(f) for aleatoric uncertainty."
        )

    def uncertainties(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Return the aleatoric and the epistemic part of Var[y] over samples (K, ...)."""
        mean, variance = self.mean(f), self.variance(f)
        return variance.mean(0), mean.var(0, correction=0)

    def smoothed_mean(self, f: Tensor, variance: Tensor) -> Tensor:
        """Return E[y] over Gaussian outputs with these moments, in closed form."""
        raise NotImplementedError(
            f'{type(self).__name__} has no closed form for Gaussian outputs: use link_approx="mc".'
        )

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw y given f."""
        raise NotImplementedError(f"{type(self).__name__} must define sample(f, generator).")

    def mask(self, y: Tensor) -> Tensor | None:
        """Return which sites count, shape (B, *sites), or None if all do."""
        return None

    def check(self, f: Tensor, y: Tensor) -> None:
        """Raise where outputs or targets do not fit this likelihood."""

    @property
    def is_quadratic(self) -> bool:
        """Whether -log p is quadratic in f, so that the mode is one linear solve."""
        return False


class Classification(Likelihood):
    """Softmax over the last axis; y are class indices, (B, *sites)."""

    def __init__(self, ignore_index: int = -100):
        self.ignore_index = ignore_index

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        kept = self._kept(y)
        index = y.where(kept, 0).expand(f.shape[:-1]).unsqueeze(-1)
        chosen = f.log_softmax(-1).gather(-1, index).squeeze(-1)
        return _sum_rows(chosen.where(kept, 0), y)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        kept = self._kept(y)
        index = y.where(kept, 0).expand(f.shape[:-1]).unsqueeze(-1)
        p = f.softmax(-1)
        return p.scatter_add(-1, index, -torch.ones_like(p[..., :1])) * kept.unsqueeze(-1)

    def hessian_product(self, f: Tensor, u: Tensor) -> Tensor:
        p = f.softmax(-1)
        pu = p * u
        return pu - p * pu.sum(-1, keepdim=True)

    def hessian_sqrt_product(self, f: Tensor, noise: Tensor) -> Tensor:
        log_p = f.log_softmax(-1)
        root_noise = (0.5 * log_p).exp() * noise
        return root_noise - log_p.exp() * root_noise.sum(-1, keepdim=True)

    def mean(self, f: Tensor) -> Tensor:
        return f.softmax(-1)

    def uncertainties(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Return the expected entropy and the mutual information, shape (B, *sites)."""
        p = f.softmax(-1)
        expected = entropy(p).mean(0)
        return expected, (entropy(p.mean(0)) - expected).clamp_min(0)

    def smoothed_mean(self, f: Tensor, variance: Tensor) -> Tensor:
        return (f / (1 + pi / 8 * variance).sqrt()).softmax(-1)

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        p = f.softmax(-1)
        return torch.multinomial(p.flatten(0, -2), 1, generator=generator).view(p.shape[:-1])

    def mask(self, y: Tensor) -> Tensor | None:
        return self._kept(y)

    def check(self, f: Tensor, y: Tensor) -> None:
        if f.dim() < 2 or f.shape[-1] < 2:
            raise ValueError(
                f"Classification needs two classes or more, but the outputs have shape "
                f'{tuple(f.shape)}. For one logit with 0/1 targets use likelihood="bernoulli"; '
                "for classes on another axis pass class_dim."
            )
        if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            raise TypeError(
                f"Class labels must be integers, not {y.dtype}: convert them with .long(), or "
                'use likelihood="bernoulli" for 0/1 targets of several labels.'
            )
        if y.shape != f.shape[:-1]:
            raise ValueError(
                f"Class labels have shape {tuple(y.shape)}, but the outputs "
                f"{tuple(f.shape)} (classes last) ask for {tuple(f.shape[:-1])}."
            )
        kept = y[self._kept(y)]
        if kept.numel() and (kept.min() < 0 or kept.max() >= f.shape[-1]):
            raise ValueError(
                f"Class labels lie in [{kept.min()}, {kept.max()}], outside of 0 to "
                f"{f.shape[-1] - 1}; give the network as many outputs as there are classes."
            )

    def _kept(self, y: Tensor) -> Tensor:
        return y != self.ignore_index


class _ElementwiseLikelihood(Likelihood):
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


class Regression(_ElementwiseLikelihood):
    """Gaussian noise of standard deviation ``sigma_noise``, () or one per output (C,)."""

    def __init__(self, sigma_noise: float | Tensor = 1.0):
        sigma_noise = torch.as_tensor(sigma_noise, dtype=torch.float64)
        if sigma_noise.dim() > 1 or not (sigma_noise > 0).all() or sigma_noise.isinf().any():
            raise ValueError(
                f"sigma_noise must be a positive number or one per output, not {sigma_noise}."
            )
        self.sigma_noise = sigma_noise

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        sigma = self._sigma(f)
        terms = -0.5 * ((y - f) / sigma) ** 2 - sigma.log() - 0.5 * log(2 * pi)
        return _sum_rows(terms, y)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return (f - y) / self._sigma(f) ** 2

    def curvature(self, f: Tensor) -> Tensor:
        return (self._sigma(f) ** -2).expand_as(f)

    def mean(self, f: Tensor) -> Tensor:
        return f

    def variance(self, f: Tensor) -> Tensor:
        return (self._sigma(f) ** 2).expand_as(f)

    def smoothed_mean(self, f: Tensor, variance: Tensor) -> Tensor:
        return f

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        noise = torch.randn(f.shape, generator=generator, dtype=f.dtype, device=f.device)
        return f + self._sigma(f) * noise

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
        return self.sigma_noise.to(f)


class Bernoulli(_ElementwiseLikelihood):
    """Independent 0/1 targets of logits f: one output, or several labels."""

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return _sum_rows(y * f - softplus(f), y)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return f.sigmoid() - y

    def curvature(self, f: Tensor) -> Tensor:
        return f.sigmoid() * (-f).sigmoid()

    def mean(self, f: Tensor) -> Tensor:
        return f.sigmoid()

    def uncertainties(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Return the expected entropy and the mutual information of every output."""
        p = f.sigmoid()
        expected = _binary_entropy(p).mean(0)
        return expected, (_binary_entropy(p.mean(0)) - expected).clamp_min(0)

    def smoothed_mean(self, f: Tensor, variance: Tensor) -> Tensor:
        return (f / (1 + pi / 8 * variance).sqrt()).sigmoid()

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.bernoulli(f.sigmoid(), generator=generator)

    def check(self, f: Tensor, y: Tensor) -> None:
        super().check(f, y)
        if ((y != 0) & (y != 1)).any():
            raise ValueError("Bernoulli targets must be 0 or 1, of the shape of the outputs.")


class Poisson(_ElementwiseLikelihood):
    """Counts y with log rate f."""

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return _sum_rows(y * f - f.exp() - torch.lgamma(y.to(f) + 1), y)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return f.exp() - y

    def curvature(self, f: Tensor) -> Tensor:
        return f.exp()

    def mean(self, f: Tensor) -> Tensor:
        return f.exp()

    def variance(self, f: Tensor) -> Tensor:
        return f.exp()

    def smoothed_mean(self, f: Tensor, variance: Tensor) -> Tensor:
        return (f + 0.5 * variance).exp()

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.poisson(f.exp(), generator=generator)

    def check(self, f: Tensor, y: Tensor) -> None:
        super().check(f, y)
        if ((y < 0) | (y != y.round())).any():
            raise ValueError("Poisson targets must be counts: 0, 1, 2, ...")


LIKELIHOODS = {
    "classification": Classification,
    "regression": Regression,
    "bernoulli": Bernoulli,
    "poisson": Poisson,
}


def entropy(p: Tensor) -> Tensor:
    """Return -Σ p log p over the last axis."""
    return torch.special.entr(p).sum(-1)


def _binary_entropy(p: Tensor) -> Tensor:
    return torch.special.entr(p) + torch.special.entr(1 - p)


def _sum_rows(terms: Tensor, y: Tensor) -> Tensor:
    """Sum (..., B, *sites, C) over all but the leading axes and the rows of y (B, ...)."""
    within = y.dim() - 1
    return terms.flatten(terms.dim() - within).sum(-1) if within else terms
