"""Gaussian noise whose variance the network predicts too."""

from __future__ import annotations

from math import log, pi

import torch
from torch import Tensor

from torch_lla_em.likelihoods.base import Gaussian, sum_rows


class HeteroscedasticRegression(Gaussian):
    """y ~ N(μ, exp(s)): of 2 C outputs the first C are means μ, the others log variances s.

    -log p = ½ s + ½ (y - μ)² exp(-s) is not convex in (μ, s) together. H is its expectation
    over y, the Fisher information diag(exp(-s), ½), which is positive semi-definite, free of
    y, and equal to the generalised Gauss-Newton matrix. μ and s are random together: the
    posterior of s says how well the noise is known. The mode is sought with H in the place
    of the Hessian (Fisher scoring), slower than Newton's method: expect some 1e-3 of it.
    """

    convex = False

    elementwise = True

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        mu, s = f.chunk(2, -1)
        return sum_rows(-0.5 * (s + (y - mu) ** 2 * (-s).exp() + log(2 * pi)), y)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        mu, s = f.chunk(2, -1)
        error, precision = mu - y, (-s).exp()
        return torch.cat([error * precision, 0.5 - 0.5 * error**2 * precision], -1)

    def hessian_product(self, f: Tensor, u: Tensor) -> Tensor:
        return self._fisher(f) * u

    def hessian_sqrt_product(self, f: Tensor, noise: Tensor) -> Tensor:
        return self._fisher(f).sqrt() * noise

    def mean(self, f: Tensor) -> Tensor:
        """Return μ, half the outputs."""
        return f.chunk(2, -1)[0]

    def variance(self, f: Tensor) -> Tensor:
        """Return exp(s), half the outputs."""
        return f.chunk(2, -1)[1].exp()

    def check(self, f: Tensor, y: Tensor) -> None:
        if f.dim() < 2 or f.shape[-1] % 2 or y.shape != (*f.shape[:-1], f.shape[-1] // 2):
            raise ValueError(
                f"Targets have shape {tuple(y.shape)} and the outputs {tuple(f.shape)} (classes "
                "last), but there must be twice as many outputs as targets: all means first, "
                "then all log variances."
            )
        if y.is_complex() or not torch.isfinite(y).all():
            raise ValueError("Targets must be finite real numbers: remove other rows.")

    @staticmethod
    def _fisher(f: Tensor) -> Tensor:
        s = f.chunk(2, -1)[1]
        return torch.cat([(-s).exp(), torch.full_like(s, 0.5)], -1)
