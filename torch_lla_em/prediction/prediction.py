"""Predictions: f and its posterior deviations √τ J w_k, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log, pi
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood, Regression, sum_rows
from torch_lla_em.prediction.functions import functions_of, number_of_functions

# numbers that averages over functions hold at a time
_NUMBERS = 2**23


class Interval(NamedTuple):
    """The ends of a credible interval."""

    lower: Tensor
    upper: Tensor


class Moments(NamedTuple):
    """Mean and variance of y."""

    mean: Tensor
    variance: Tensor


@dataclass(frozen=True)
class Prediction:
    """A predictive distribution at B inputs; classes stay on the axis the model has them."""

    likelihood: Likelihood
    centre: Tensor
    """f, or J w_lin, shape (B, ..., C), classes last."""

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
        """The covariance of ``mean.flatten()``, shape (B C, B C): all inputs and outputs."""
        flat = self._out(self.deviations, leading=1).flatten(1)
        return flat.T @ flat / len(flat)

    @property
    def samples(self) -> Tensor:
        """f + √τ J w_k, with the sample axis first."""
        return self._out(self._samples(), leading=1)

    @property
    def functions(self) -> Tensor:
        """The samples and more of their covariance, shape (S, B, ..., C), S at least 2 K.

        Averages, such as ``probs``, are taken over these: mirror images make their mean exact,
        and rotations leave little but the error of the samples' covariance.
        """
        return self._out(self._functions(slice(None)), leading=1)

    @property
    def predictive_samples(self) -> Tensor:
        """E[y | f + √τ J w_k], the samples after the link, with the sample axis first."""
        return self._out(self.likelihood.mean(self._samples()), leading=1)

    @property
    def expectation(self) -> Tensor:
        """E[y] over ``functions``: probabilities for classes and labels, rates for counts."""
        if self.likelihood.real_valued:
            return self._out(self.likelihood.mean(self.centre))
        return self._out(self._averaged(lambda f, _: self.likelihood.mean(f).mean(0)))

    @property
    def probs(self) -> Tensor:
        """The probability of every class or label, over ``functions``."""
        self._require_probabilities("probs")
        return self.expectation

    @property
    def log_probs(self) -> Tensor:
        """The logarithm of ``probs``, finite where they are too small to be told from 0."""
        self._require_probabilities("log_probs")
        return self._out(self._averaged(lambda f, _: _log_mean(self.likelihood.log_mean(f))))

    @property
    def entropy(self) -> Tensor:
        """The entropy of y: of every site for classes, else of every output.

        Of real y it is that of a Gaussian with the same mean and variance.
        """
        if self.likelihood.real_valued:
            return self._out(0.5 * (2 * pi * sum(self._uncertainties())).log() + 0.5)
        return self._site_values(self._averaged(lambda f, _: self.likelihood.entropy(f)))

    @property
    def aleatoric(self) -> Tensor:
        """What more data would not take away: expected entropy, or the mean of Var[y | f]."""
        return self._site_values(self._uncertainties()[0])

    @property
    def epistemic(self) -> Tensor:
        """What more data would take away: mutual information, or the variance of E[y | f]."""
        return self._site_values(self._uncertainties()[1])

    def moments(self) -> Moments:
        """Return mean and variance of real y, the noise included."""
        return Moments(self.expectation, self.aleatoric + self.epistemic)

    def credible_interval(self, level: float = 0.95) -> Interval:
        """Return bounds that hold y (if real, noise included) or E[y | f] with this probability.

        For classes between sorted samples, else from mean and variance of f.
        """
        if not 0 < level < 1:
            raise ValueError(f"level must lie between 0 and 1, not {level}.")
        tail = 0.5 - 0.5 * level
        z = -torch.special.ndtri(torch.tensor(tail, dtype=torch.float64)).item()
        if self.likelihood.real_valued:
            centre, half = self.likelihood.mean(self.centre), z * sum(self._uncertainties()).sqrt()
            ends = centre - half, centre + half
        elif self.likelihood.monotone:
            half = z * self._variance().sqrt()
            ends = tuple(map(self.likelihood.mean, (self.centre - half, self.centre + half)))
        else:

            def quantiles(f: Tensor, _: slice) -> Tensor:
                values = self.likelihood.mean(f).sort(0).values
                return torch.stack([_quantile(values, tail), _quantile(values, 1 - tail)])

            ends = self._averaged(quantiles, dim=1)
        return Interval(*map(self._out, ends))

    def smoothed(self, shared: bool = False) -> Tensor:
        """Return E[y] in closed form from mean and variance of f (the probit link).

        ``shared`` gives all classes of an input one variance, so that the most probable
        class stays the network's.
        """
        variance = self._shared_variance() if shared else self._variance()
        return self._out(self.likelihood.smoothed_mean(self.centre, variance))

    def log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y_n | x_n) of each row on its own, shape (B,)."""
        return self._log_prob(self._aligned(y))

    def joint_log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y_1..y_B | x_1..x_B), shape (): the samples are joint over inputs.

        For a Gaussian likelihood in closed form from the samples' covariance, whose Monte
        Carlo error is far below that of averaging densities.
        """
        y = self._aligned(y)
        if isinstance(self.likelihood, Regression):
            return self._joint_gaussian(y)
        every = self._averaged(lambda f, rows: self.likelihood.log_prob(f, y[rows]), dim=1)
        return _log_mean(every.sum(1))

    def _log_prob(self, y: Tensor) -> Tensor:
        if isinstance(self.likelihood, Regression):
            variance = sum(self._uncertainties())
            terms = -0.5 * (
                (y - self.likelihood.mean(self.centre)) ** 2 / variance + (2 * pi * variance).log()
            )
            return sum_rows(terms, y)
        return self._averaged(lambda f, rows: _log_mean(self.likelihood.log_prob(f, y[rows])))

    def _joint_gaussian(self, y: Tensor) -> Tensor:
        sigma = self.likelihood.variance(self.centre).sqrt().flatten().double()
        error = (y - self.likelihood.mean(self.centre)).flatten().double() / sigma
        root = (
            self.likelihood.mean(self.deviations).flatten(1).double()
            / sigma
            / len(self.deviations) ** 0.5
        )
        # K × K instead of B C × B C: I + D Dᵀ has the determinant of I + Dᵀ D
        gram = root @ root.T + torch.eye(len(root), dtype=root.dtype, device=root.device)
        factor, projected = torch.linalg.cholesky(gram), root @ error
        explained = torch.cholesky_solve(projected[:, None], factor)[:, 0] @ projected
        log_det = 2 * factor.diagonal().log().sum() + 2 * sigma.log().sum()
        return -0.5 * (error @ error - explained + log_det + len(error) * log(2 * pi))

    def _aligned(self, y: Tensor) -> Tensor:
        """Move the outputs' axis of targets last, and check that they fit."""
        y = y.to(self.centre.device)
        if self.likelihood.elementwise and y.dim() == self.centre.dim():
            y = y.movedim(self.class_dim, -1)
        self.likelihood.check(self.centre, y)
        return y

    def _require_probabilities(self, name: str) -> None:
        if not self.likelihood.gives_probabilities:
            raise TypeError(
                f"A prediction under {type(self.likelihood).__name__} has no .{name}: its E[y] is "
                "no probability. Use .expectation, or log_prob(y) for the density of a target."
            )

    def _samples(self) -> Tensor:
        return self.centre + self.deviations

    def _functions(self, rows: slice) -> Tensor:
        return self.centre[rows] + functions_of(self.deviations[:, rows])

    def _averaged(self, average: Callable[[Tensor, slice], Tensor], dim: int = 0) -> Tensor:
        """Return what ``average`` makes of all functions (S, b, ..., C), a few rows at a time."""
        count = len(self.centre)
        row = number_of_functions(self.deviations) * self.centre[:1].numel()
        step = max(1, _NUMBERS // max(row, 1))
        chunks = [slice(start, start + step) for start in range(0, max(count, 1), step)]
        parts = [average(self._functions(rows), rows) for rows in chunks]
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0]

    def _variance(self) -> Tensor:
        return self.deviations.square().mean(0)

    def _shared_variance(self) -> Tensor:
        """Half the mean variance of a difference of two outputs, which a shift leaves alone."""
        count = self.centre.shape[-1]
        if self.likelihood.monotone or count == 1:
            return self._variance()
        contrasts = self.deviations - self.deviations.mean(-1, keepdim=True)
        return contrasts.square().mean(0).sum(-1, keepdim=True) / (count - 1)

    def _uncertainties(self) -> tuple[Tensor, Tensor]:
        if isinstance(self.likelihood, Regression):  # E[y | f] is linear in f
            deviations = self.likelihood.mean(self.deviations)
            return self.likelihood.variance(self.centre), deviations.square().mean(0)
        both = self._averaged(lambda f, _: torch.stack(self.likelihood.uncertainties(f)), dim=1)
        return both[0], both[1]

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


def score(prediction: Prediction, y: Tensor) -> Callable[[float, float], Tensor]:
    """Return the map (τ, c) -> log p(y_n | x_n) of every row, with deviations √τ times the
    prediction's around c times its centre."""

    def log_prob(scale: float, factor: float = 1.0) -> Tensor:
        deviations = scale**0.5 * prediction.deviations
        scaled = Prediction(prediction.likelihood, factor * prediction.centre, deviations)
        return scaled._log_prob(y).double()

    return log_prob


def _log_mean(values: Tensor) -> Tensor:
    """Return log mean exp over the leading axis."""
    return values.logsumexp(0) - log(len(values))


def _quantile(values: Tensor, share: float) -> Tensor:
    """Return a quantile of sorted samples (K, ...), which torch.quantile limits in size."""
    position = share * (len(values) - 1)
    below = min(int(position), len(values) - 2) if len(values) > 1 else 0
    return values[below].lerp(values[min(below + 1, len(values) - 1)], position - below)
