"""Predictions: f and its posterior deviations √τ J w_k, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log, pi
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood, Regression


class Interval(NamedTuple):
    """The ends of a credible interval."""

    lower: Tensor
    upper: Tensor


@dataclass(frozen=True)
class Prediction:
    """A predictive distribution at B inputs; classes stay on the axis the model has them."""

    likelihood: Likelihood
    centre: Tensor
    """f, or J w_lin, shape (B, ..., C)."""

    deviations: Tensor
    """√τ J w_k, shape (K, B, ..., C): zero-mean, joint over inputs."""

    class_dim: int = -1

    @property
    def mean(self) -> Tensor:
        """The mean of f."""
        return self._out(self.centre)

    @property
    def variance(self) -> Tensor:
        """The variance of f, without the noise of y."""
        return self._out(self._variance())

    @property
    def covariance(self) -> Tensor:
        """The covariance of f over all inputs and outputs, shape (B C, B C)."""
        flat = self.deviations.flatten(1)
        return flat.T @ flat / len(flat)

    @property
    def samples(self) -> Tensor:
        """f + √τ J w_k, with the sample axis first."""
        return self._out(self._samples(), leading=1)

    @property
    def probs(self) -> Tensor:
        """E[y], by Monte Carlo: probabilities for classes and labels, rates for counts."""
        return self._out(self._probs())

    @property
    def log_probs(self) -> Tensor:
        """log E[y]."""
        return self.probs.log()

    @property
    def entropy(self) -> Tensor:
        """The entropy of the class probabilities; of each output for Bernoulli."""
        aleatoric, epistemic = self._uncertainties()
        if isinstance(self.likelihood, Regression):
            return self._out(0.5 * (2 * pi * (aleatoric + epistemic)).log() + 0.5)
        return self._site_values(aleatoric + epistemic)

    @property
    def aleatoric(self) -> Tensor:
        """What more data would not take away: expected entropy, or Var[y | f]."""
        return self._site_values(self._uncertainties()[0])

    @property
    def epistemic(self) -> Tensor:
        """What more data would take away: mutual information, or the variance of E[y | f]."""
        return self._site_values(self._uncertainties()[1])

    def credible_interval(self, level: float = 0.95) -> Interval:
        """Return bounds that hold y (regression, noise included) or E[y] with this probability."""
        if not 0 < level < 1:
            raise ValueError(f"level must lie between 0 and 1, not {level}.")
        if isinstance(self.likelihood, Regression):
            normal = torch.distributions.Normal(0.0, 1.0)
            z = normal.icdf(torch.tensor(0.5 + level / 2)).to(self.centre)
            half = z * (self._variance() + self.likelihood.variance(self.centre)).sqrt()
            return Interval(self._out(self.centre - half), self._out(self.centre + half))
        ends = torch.tensor([0.5 - level / 2, 0.5 + level / 2]).to(self.centre)
        lower, upper = self.likelihood.mean(self._samples()).quantile(ends, dim=0)
        return Interval(self._out(lower), self._out(upper))

    def smoothed(self) -> Tensor:
        """Return E[y] in closed form from mean and variance of f (the probit link)."""
        return self._out(self.likelihood.smoothed_mean(self.centre, self._variance()))

    def log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y_n | x_n) of each row on its own, shape (B,)."""
        if isinstance(self.likelihood, Regression):
            sigma = (self._variance() + self.likelihood.variance(self.centre)).sqrt()
            terms = -0.5 * ((y - self.centre) / sigma) ** 2 - sigma.log() - 0.5 * log(2 * pi)
            return terms.flatten(1).sum(1)
        per_sample = self.likelihood.log_prob(self._samples(), y)
        return per_sample.logsumexp(0) - log(len(per_sample))

    def joint_log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y_1..y_B | x_1..x_B), shape (): the samples are joint over inputs.

        For a Gaussian likelihood in closed form from the samples' covariance, whose Monte
        Carlo error is far below that of averaging densities.
        """
        if isinstance(self.likelihood, Regression):
            return self._joint_gaussian(y)
        per_sample = self.likelihood.log_prob(self._samples(), y).sum(1)
        return per_sample.logsumexp(0) - log(len(per_sample))

    def _joint_gaussian(self, y: Tensor) -> Tensor:
        sigma = self.likelihood.variance(self.centre).sqrt().flatten().double()
        error = (y - self.centre).flatten().double() / sigma
        root = self.deviations.flatten(1).double() / sigma / len(self.deviations) ** 0.5
        # K × K instead of B C × B C: I + D Dᵀ has the determinant of I + Dᵀ D
        gram = root @ root.T + torch.eye(len(root), dtype=root.dtype, device=root.device)
        factor, projected = torch.linalg.cholesky(gram), root @ error
        explained = torch.cholesky_solve(projected[:, None], factor)[:, 0] @ projected
        log_det = 2 * factor.diagonal().log().sum() + 2 * sigma.log().sum()
        return -0.5 * (error @ error - explained + log_det + len(error) * log(2 * pi))

    def _samples(self) -> Tensor:
        return self.centre + self.deviations

    def _variance(self) -> Tensor:
        return self.deviations.square().mean(0)

    def _probs(self) -> Tensor:
        return self.likelihood.mean(self._samples()).mean(0)

    def _uncertainties(self) -> tuple[Tensor, Tensor]:
        if isinstance(self.likelihood, Regression):
            return self.likelihood.variance(self.centre), self._variance()
        return self.likelihood.uncertainties(self._samples())

    def _site_values(self, values: Tensor) -> Tensor:
        return self._out(values) if values.dim() == self.centre.dim() else values

    def _out(self, values: Tensor, leading: int = 0) -> Tensor:
        """Move the classes back to where the model has them."""
        if self.class_dim < 0:
            return values.movedim(-1, self.class_dim)
        return values.movedim(-1, self.class_dim + leading)


def mixed(deviations: Tensor, generator: torch.Generator) -> Tensor:
    """Draw K fresh Gaussian functions with the samples' own covariance."""
    size = (len(deviations), len(deviations))
    weights = torch.randn(size, generator=generator, device=generator.device)
    weights = weights.to(deviations) / len(deviations) ** 0.5
    return torch.einsum("jk,k...->j...", weights, deviations)


def score(prediction: Prediction, y: Tensor) -> Callable[[float], float]:
    """Return the map τ -> Σ_n log p(y_n | x_n) with deviations √τ times the prediction's."""

    def log_prob(scale: float) -> float:
        scaled = Prediction(
            prediction.likelihood, prediction.centre, scale**0.5 * prediction.deviations
        )
        return scaled.log_prob(y).sum(dtype=torch.float64).item()

    return log_prob
