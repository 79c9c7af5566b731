"""Likelihoods with Gaussian observation noise, constant or predicted, also of linear
measurements."""

from __future__ import annotations

import copy
from math import log, pi

import torch
from torch import Tensor
from torch.distributions import LowRankMultivariateNormal

from torch_lla_em.likelihoods.base import (
    ElementwiseLikelihood,
    Likelihood,
    mean_square,
    require_real,
    sum_rows,
)
from torch_lla_em.runtime import check_within


class Gaussian(Likelihood):
    """Base class for continuous targets that are normally distributed around their mean."""

    real_valued = True

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        mean = self.mean(f)
        noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
        return mean + self.variance(f).sqrt() * noise


class Regression(Gaussian, ElementwiseLikelihood):
    """Gaussian observation noise, y ~ N(f, σ²); targets have the shape of the outputs.

    Args:
        sigma_noise (float or Tensor (C,), optional): Standard deviation σ of the noise from which
            EM starts, one number for all outputs or one per output. Default None: the standard
            deviation of the network's residuals. Set it to learn one σ per output, or if the
            network has overfitted its training set, so that its residuals are too small.

    Raises:
        TypeError: In ``fit``, if targets are complex.
        ValueError: If sigma_noise is not a positive number or tensor; in ``fit``, if it does not
            fit the outputs.

    Example:
        >>> la = LinearisedLaplace(torch.nn.Linear(2, 1), Regression(0.1))
        >>> la = la.fit(torch.randn(20, 2), torch.randn(20, 1), progress_bar=False)
        >>> mean, variance = la(torch.randn(5, 2))  # the variance includes σ²
    """

    is_quadratic = True

    def __init__(self, sigma_noise: float | Tensor | None = None):
        check_within(5e-324, 1.7e308, sigma_noise=sigma_noise)
        self.from_data = sigma_noise is None
        """Whether a fit starts σ from the network's own residuals; until then it is 1."""

        sigma_noise = 1.0 if sigma_noise is None else sigma_noise
        sigma_noise = torch.as_tensor(sigma_noise, dtype=torch.float64, device="cpu")
        if sigma_noise.dim() > 1:
            raise ValueError(
                f"sigma_noise must be a positive number or one per output, not {sigma_noise}."
            )
        self.sigma_noise = sigma_noise.detach().clone()

    @property
    def observation_noise(self) -> Tensor:
        return self.sigma_noise

    def with_noise(self, sigma_noise: Tensor) -> Regression:
        other = copy.copy(self)
        other.sigma_noise, other.from_data = sigma_noise, False
        return other

    def offset(self, mean: Tensor, variance: Tensor) -> Tensor | None:
        return mean if type(self).mean is Regression.mean else None

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        sigma = self._sigma(f)
        squares = ((y - self.mean(f)) / sigma) ** 2
        return sum_rows(-0.5 * (squares + log(2 * pi)) - sigma.log(), y)

    def label_log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        mean, sigma = self.mean(f), self._sigma(f)
        terms = -0.5 * (((y - mean) / sigma) ** 2 + log(2 * pi)) - sigma.log()
        return terms.reshape(*mean.shape[: mean.dim() - y.dim() + 1], y.shape[1:].numel())

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return (self.mean(f) - y) / self._sigma(f) ** 2

    def curvature(self, f: Tensor) -> Tensor:
        return (self._sigma(f) ** -2).expand_as(f)

    def mean(self, f: Tensor) -> Tensor:
        return f

    def variance(self, f: Tensor) -> Tensor:
        return (self._sigma(f) ** 2).expand_as(self.mean(f))

    def predictive_log_prob(
        self, f: Tensor, deviations: Tensor, y: Tensor, joint: bool = False
    ) -> Tensor:
        error, variance, spread = y - self.mean(f), self.variance(f), self.mean(deviations)
        if joint:
            root = spread.flatten(1).T.double() / len(spread) ** 0.5
            zeros, diagonal = torch.zeros_like(root[:, 0]), variance.flatten().double()
            density = LowRankMultivariateNormal(zeros, root, diagonal, validate_args=False)
            of_error: Tensor = density.log_prob(error.flatten().double())
            return of_error
        variance = variance + mean_square(spread)
        return sum_rows(-0.5 * (error**2 / variance + (2 * pi * variance).log()), y)

    def check(self, f: Tensor, y: Tensor) -> None:
        super().check(f, y)
        if self.sigma_noise.dim() and len(self.sigma_noise) != f.shape[-1]:
            raise ValueError(
                f"sigma_noise has {len(self.sigma_noise)} values, but the network has "
                f"{f.shape[-1]} outputs: pass one number, or one per output."
            )

    def _sigma(self, f: Tensor) -> Tensor:
        sigma = self.sigma_noise
        if sigma.dim() or sigma.device == f.device:
            return sigma.to(f, non_blocking=f.is_cuda)  # avoids a GPU sync in every batch
        return f.new_full((), sigma.item())


class HeteroscedasticRegression(Gaussian, ElementwiseLikelihood):
    """y ~ N(μ, exp(s)): the first C of the 2 C outputs are means μ, the others log variances s.

    -log p = ½ s + ½ (y - μ)² exp(-s) is not convex in (μ, s) together. H is its expectation
    over y, the Fisher information diag(exp(-s), ½), which is positive semi-definite, does not
    depend on y, and equals the generalised Gauss-Newton matrix. The posterior includes both μ and
    s, so the uncertainty of the noise is included too. The mode is found with H in place of the
    Hessian (Fisher scoring), which is slower than Newton's method: expect a relative error of about
    1e-3.

    Raises:
        ValueError: In ``fit``, if there are not twice as many outputs as targets.

    Example:
        >>> la = LinearisedLaplace(torch.nn.Linear(2, 2), "heteroscedastic")  # outputs (B, 2 C)
        >>> la = la.fit(torch.randn(40, 2), torch.randn(40, 1), progress_bar=False)  # y: (B, C)
    """

    convex = False

    def offset(self, mean: Tensor, variance: Tensor) -> Tensor | None:
        return torch.cat([mean, variance.log()])

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        mu, s = f.chunk(2, -1)
        return sum_rows(-0.5 * (s + (y - mu) ** 2 * (-s).exp() + log(2 * pi)), y)

    def label_log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        pairs = torch.stack(f.chunk(2, -1), -1)  # μ and s of one output, as an example
        terms = self.log_prob(pairs.flatten(f.dim() - y.dim(), -2), y.flatten()[:, None])
        of_labels: Tensor = terms.unflatten(-1, (len(y), y.shape[1:].numel()))
        return of_labels

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        mu, s = f.chunk(2, -1)
        error, precision = mu - y, (-s).exp()
        return torch.cat([error * precision, 0.5 - 0.5 * error**2 * precision], -1)

    def curvature(self, f: Tensor) -> Tensor:
        s = f.chunk(2, -1)[1]
        return torch.cat([(-s).exp(), torch.full_like(s, 0.5)], -1)

    def mean(self, f: Tensor) -> Tensor:
        return f.chunk(2, -1)[0]

    def variance(self, f: Tensor) -> Tensor:
        return f.chunk(2, -1)[1].exp()

    def mistaken(self, f: Tensor, y: Tensor) -> tuple[Tensor, str] | None:
        mu = f.chunk(2, -1)[0].double()
        variance = (y - mu).square().flatten(0, -2).mean(0)
        constant = torch.cat([mu, variance.log().expand(mu.shape)], -1)
        return HeteroscedasticRegression.log_prob(self, constant, y.double()), (
            "The log variances predict the targets worse than a constant variance: the network was "
            "probably trained by squared error. Train it with torch.nn.GaussianNLLLoss, or pass "
            'its means alone to "regression".'
        )

    def check(self, f: Tensor, y: Tensor) -> None:
        if f.dim() < 2 or f.shape[-1] % 2 or y.shape != (*f.shape[:-1], f.shape[-1] // 2):
            raise ValueError(
                f"Targets have shape {tuple(y.shape)} and the outputs {tuple(f.shape)} (classes "
                "last), but there must be twice as many outputs as targets: all means first, "
                "then all log variances."
            )
        require_real(y)
