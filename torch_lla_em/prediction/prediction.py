"""Predictive distributions: of functions f + √τ J w_k, and of targets given them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log, pi
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import as_targets
from torch_lla_em.likelihoods import Likelihood, Regression, average, sum_rows
from torch_lla_em.prediction.conformal import Conformal, Interval, Judge
from torch_lla_em.prediction.functions import (
    JOINT,
    log_mean,
    number_of_functions,
    pair_error,
    quantile,
)
from torch_lla_em.prediction.tables import Lines, Shown, cell

# examples that are shown
_SHOWN = 6


class Moments(NamedTuple):
    """Mean and variance of y, with observation noise."""

    mean: Tensor
    variance: Tensor


@dataclass(frozen=True, repr=False)
class Prediction(Shown, Conformal):
    """The predictive distribution at B inputs: of the network's function f, and of the targets y.

    ``mean``, ``function_variance`` (also ``variance``), ``covariance`` and ``samples`` are of f, in
    the network's output space and without observation noise. ``expectation``,
    ``predictive_variance``, ``credible_interval`` (of continuous targets) and ``log_prob`` are of y,
    with observation noise; ``la(x)`` returns the first two for regression. Classes stay on the axis
    where the model has them.
    """

    likelihood: Likelihood
    centre: Tensor
    """The mean of the posterior over functions, f or J w_lin, shape (B, ..., C), classes last."""

    deviations: Tensor
    """Samples minus their mean, √τ J w_k, shape (K, B, ..., C), joint over inputs."""

    class_dim: int = -1

    beside: Tensor | None = None
    """Further functions in the mixture, without uncertainty, shape (M, B, ..., C)."""

    weights: Tensor | None = None
    """Weights of the posterior and of the further functions, shape (1 + M,); their sum is 1."""

    judge: Judge | None = None
    """What a validation set says of these inputs, after ``calibrate``."""

    @property
    def predictive_variance(self) -> Tensor:
        """The variance of y, with observation noise, shape (B, ..., C).

        For regression it is ``function_variance`` + σ², and the second of what ``la(x)`` returns.
        For classes and labels it is that of the indicator of each, p (1 - p).
        """
        if self.likelihood.gives_probabilities:
            return self.probs * (1 - self.probs)
        return self._site_values(self._variance())

    @property
    def predictive_samples(self) -> Tensor:
        """E[y | f_k], the samples after the link function, shape (K, B, ..., C)."""
        return self._out(self.likelihood.mean(self._samples()), leading=1)

    @property
    def expectation(self) -> Tensor:
        """E[y], averaged over ``functions``: probabilities of classes and labels, rates of counts."""
        return self._out(self._expected())

    @property
    def standard_error(self) -> Tensor:
        """Monte Carlo error of ``expectation`` over samples at this λ and H: a lower bound over seeds."""
        if self.likelihood.real_valued:
            return self._out(torch.zeros_like(self.likelihood.mean(self.centre)))
        count, samples = number_of_functions(self.deviations), len(self.deviations)

        def error(f: Tensor, _: slice) -> Tensor:
            return pair_error(self.likelihood.mean(f[:count]), samples)

        share = 1.0 if self.weights is None else self.weights[0].to(self.centre)
        return self._out(share * self._over_rows(error))

    @property
    def probs(self) -> Tensor:
        """The probability of every class or label, averaged over ``functions``."""
        self._require_probabilities("probs")
        return self.expectation

    @property
    def log_probs(self) -> Tensor:
        """The logarithm of ``probs``, finite also where they underflow."""
        self._require_probabilities("log_probs")
        weights = self._each()
        values = self._over_rows(lambda f, _: log_mean(self.likelihood.log_mean(f), weights))
        return self._out(values)

    @property
    def entropy(self) -> Tensor:
        """The entropy of y, of every site for classes, else of every output.

        For regression it is that of a Gaussian with the same mean and variance.
        """
        if self.likelihood.real_valued:
            return self._out(0.5 * (2 * pi * self._variance()).log() + 0.5)
        weights = self._weighting()
        return self._site_values(self._over_rows(lambda f, _: self.likelihood.entropy(f, *weights)))

    @property
    def aleatoric(self) -> Tensor:
        """The uncertainty that more data would not reduce: expected entropy, or E[Var[y | f]]."""
        return self._site_values(self._uncertainties()[0])

    @property
    def epistemic(self) -> Tensor:
        """The uncertainty that more data would reduce: mutual information, or Var[E[y | f]]."""
        return self._site_values(self._uncertainties()[1])

    def moments(self) -> Moments:
        """Return E[y] and the variance of y, with observation noise."""
        return Moments(self.expectation, self.predictive_variance)

    def credible_interval(self, level: float = 0.95) -> Interval:
        """Return an interval that contains y or E[y | f] with probability ``level``.

        For regression it is a prediction interval of y, with observation noise; otherwise a credible
        interval of the probability or rate E[y | f], from quantiles of the samples where f has no
        monotone link.
        """
        if not 0 < level < 1:
            raise ValueError(f"level must lie between 0 and 1, not {level}.")
        tail = 0.5 - 0.5 * level
        z = -torch.special.ndtri(torch.tensor(tail, dtype=torch.float64, device="cpu")).item()
        if self.likelihood.real_valued:
            centre = self._expected()
            half = z * self._variance().sqrt()
            lower, upper = centre - half, centre + half
        elif self.likelihood.monotone and self.beside is None:
            half = z * self._variance_of_f().sqrt()
            lower = self.likelihood.mean(self.centre - half)
            upper = self.likelihood.mean(self.centre + half)
        else:
            weights = self._each()

            def quantiles(f: Tensor, _: slice) -> Tensor:
                values = self.likelihood.mean(f)
                return torch.stack([quantile(values, q, weights) for q in (tail, 1 - tail)])

            lower, upper = self._over_rows(quantiles, dim=1)
        return Interval(self._out(lower), self._out(upper))

    def smoothed(self, shared: bool = False) -> Tensor:
        """Return E[y] in closed form from mean and variance of f (the probit link).

        ``shared`` gives all classes of an input one variance, so that the most probable
        class stays the network's.
        """
        variance = self._shared_variance() if shared else self.deviations.square().mean(0)
        smoothed = self.likelihood.smoothed_mean(self.centre, variance)[None]
        if self.beside is not None:
            certain = self.likelihood.smoothed_mean(self.beside, torch.zeros_like(variance))
            smoothed = torch.cat([smoothed, certain])
        return self._out(average(smoothed, self.weights))

    def log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y_n | x_n) of each example on its own, shape (B,)."""
        return self._log_prob(self._aligned(y))

    def joint_log_prob(self, y: Tensor) -> Tensor:
        """Return log p(y_1..y_B | x_1..x_B), shape (): the samples are joint over inputs.

        For a Gaussian likelihood in closed form from the samples' covariance, whose Monte
        Carlo error is far below that of averaging densities.
        """
        y = self._aligned(y)
        if self._is_gaussian:
            return self._joint_gaussian(y)
        every = self._over_rows(lambda f, rows: self.likelihood.log_prob(f, y[rows]), 1, JOINT)
        return log_mean(every.sum(1), self._each(JOINT))

    def _log_prob(self, y: Tensor) -> Tensor:
        if self._is_gaussian:
            variance = self._variance()
            terms = -0.5 * (
                (y - self.likelihood.mean(self.centre)) ** 2 / variance + (2 * pi * variance).log()
            )
            return sum_rows(terms, y)
        weights = self._each()
        return self._over_rows(
            lambda f, rows: log_mean(self.likelihood.log_prob(f, y[rows]), weights)
        )

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
        y = self.likelihood.align(as_targets(y).to(self.centre.device), -1)
        if self.likelihood.elementwise and y.dim() == self.centre.dim():
            y = y.movedim(self.class_dim, -1)
        self.likelihood.check(self.centre, y)
        return y

    def _require_probabilities(self, name: str) -> None:
        if not self.likelihood.gives_probabilities:
            raise TypeError(
                f"A prediction under {type(self.likelihood).__name__} has no .{name}: its E[y] is "
                "not a probability. Use .expectation, or log_prob(y) for the density of a target."
            )

    def _table(self) -> tuple[str, Lines]:
        """Return a title and a table of the first examples, its heading first."""
        title, count = f"Prediction under {type(self.likelihood).__name__}", len(self.centre)
        if self.centre.dim() != 2 or not count:
            shape = f" of shape {tuple(self.mean.shape)}, {len(self.deviations)} samples"
            return title, [("outputs", shape)]
        columns = self._first(_SHOWN)._columns()
        cells = [
            [cell(values[i]) for values in columns.values()] for i in range(min(count, _SHOWN))
        ]
        table: Lines = [("row", *columns), *((str(i), *row) for i, row in enumerate(cells))]
        more = [] if count <= _SHOWN else [(f"of {count}", *("…" for _ in columns))]
        return title, [*table, *more]

    def _first(self, count: int) -> Prediction:
        beside = None if self.beside is None else self.beside[:, :count].detach()
        centre, deviations = self.centre[:count].detach(), self.deviations[:, :count].detach()
        return replace(self, centre=centre, deviations=deviations, beside=beside)

    def _columns(self) -> dict[str, Tensor]:
        """Return what is shown of each example, by its heading."""
        if self.likelihood.real_valued:
            of_y, of_mean = self.predictive_variance.sqrt(), self.epistemic.sqrt()
            return {"mean": self.expectation, "sd of y": of_y, "sd of its mean": of_mean}
        if self.likelihood.gives_probabilities and not self.likelihood.elementwise:
            best = self.probs.max(-1)
            error = self.standard_error.gather(-1, best.indices[:, None])
            columns = {"class": best.indices, "probability": best.values}
            columns |= {"Monte Carlo error": error, "entropy": self.entropy}
            return columns | {"epistemic": self.epistemic}
        columns = {"E[y]": self.expectation, "Monte Carlo error": self.standard_error}
        return columns | (
            {"epistemic": self.epistemic} if self.likelihood.gives_probabilities else {}
        )

    @property
    def _is_gaussian(self) -> bool:
        return isinstance(self.likelihood, Regression) and self.beside is None

    def _weighting(self) -> tuple[Tensor, ...]:
        """Return the weights as an argument, none for likelihoods that take none."""
        weights = self._each()
        return () if weights is None else (weights,)

    def _shared_variance(self) -> Tensor:
        """Half the mean variance of a difference of two outputs, which a shift leaves alone."""
        count = self.centre.shape[-1]
        if self.likelihood.monotone or count == 1:
            return self.deviations.square().mean(0)
        contrasts = self.deviations - self.deviations.mean(-1, keepdim=True)
        return contrasts.square().mean(0).sum(-1, keepdim=True) / (count - 1)

    def _expected(self) -> Tensor:
        if self.likelihood.real_valued:
            return average(self.likelihood.mean(self._centres()), self.weights)
        weights = self._each()
        return self._over_rows(lambda f, _: average(self.likelihood.mean(f), weights))

    def _variance(self) -> Tensor:
        aleatoric, epistemic = self._uncertainties()
        return aleatoric + epistemic

    def _uncertainties(self) -> tuple[Tensor, Tensor]:
        if self._is_gaussian:  # E[y | f] is linear in f
            deviations = self.likelihood.mean(self.deviations)
            return self.likelihood.variance(self.centre), deviations.square().mean(0)
        weights = self._weighting()
        both = self._over_rows(
            lambda f, _: torch.stack(self.likelihood.uncertainties(f, *weights)), dim=1
        )
        return both[0], both[1]

    def _site_values(self, values: Tensor) -> Tensor:
        return self._out(values) if values.dim() == self.centre.dim() else values
