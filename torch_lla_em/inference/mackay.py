"""M-step: the prior precision λ and the observation noise σ from the effective dimension γ.

Everything that decides how far λ and σ move, and when they have settled, is in this file.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from math import exp, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.inference.prior import Prior
from torch_lla_em.problem import Problem

PRECISION_BOUNDS = 1e-20, 1e20

_LEAST_FREEDOM = 0.05

# a residual below this multiple of what rounding allows raises a warning
_NEAR_ROUNDING = 10

logger = logging.getLogger("torch_lla_em")


class Hyperparameters(NamedTuple):
    """What EM learns."""

    precision: Tensor
    """λ, () or (blocks,), in float64."""

    sigma: Tensor | None = None
    """σ of a Gaussian likelihood, () or (C,), in float64."""


class Expectation(NamedTuple):
    """What an E-step finds at one λ and σ: all that the M-step needs."""

    hyper: Hyperparameters
    """λ and σ of the posterior."""

    effective_dims: Tensor
    """γ of every sample, (K,) or (K, blocks)."""

    squared_norm: Tensor
    """‖w_lin / scale‖², () or (blocks,)."""

    loss: float
    """Σ_n -log p(y_n | J_n w_lin)."""

    residual: Tensor | None
    """Σ_n (y_n - J_n w_lin)², the shape of σ; None if the likelihood is not Gaussian."""

    targets: Tensor | None
    """Σ_n y_n², the shape of σ."""

    noise_dims: Tensor | None
    """γ by output, the shape of σ."""

    log_evidences: Tensor
    """Log evidence with the log det of every sample, (K,); NaN where it would cost passes."""

    mode_error: float
    sample_error: float


class Estimate(NamedTuple):
    """A Monte Carlo mean and its standard error over samples."""

    value: Tensor
    standard_error: Tensor

    @classmethod
    def of(cls, samples: Tensor) -> Estimate:
        """Return the mean over the first axis; the error is NaN for one sample."""
        if len(samples) < 2:
            return cls(samples.mean(0), torch.full_like(samples[0], float("nan")))
        return cls(samples.mean(0), samples.std(0) / sqrt(len(samples)))


def function_space_Mackay_update(
    effective_dim: Tensor,
    squared_norm: Tensor,
    precision: Tensor,
    stride: float | None = None,
    warns: bool = True,
) -> Tensor:
    """Return λ ← γ / ‖w_lin‖², () or (blocks,), the norm in scaled coordinates.

    Blocks that no datum determines (γ = 0) keep their precision. With a ``stride``, log λ goes
    so many times as far, but at most by 1: λ ← λ (γ / λ ‖w_lin‖²)^stride. Such a step may still
    be refused, so it reaches the bounds of λ without a warning.
    """
    proposed = effective_dim / squared_norm
    if stride is not None:
        step = (stride * (proposed / precision).log()).nan_to_num(0.0).clamp(-1.0, 1.0)
        proposed = precision * step.exp()
    return _bounded(proposed, precision, warns and stride is None)


def em_update(
    effective_dim: Tensor,
    squared_norm: Tensor,
    precision: Tensor,
    num_weights: Tensor,
) -> Tensor:
    """Return λ ← P / (‖w_lin‖² + Tr Σ), which never lowers the evidence; slower than MacKay's."""
    trace = (num_weights - effective_dim) / precision
    return _bounded(num_weights / (squared_norm + trace), precision)


def resolved(residual: Tensor, targets: Tensor, eps: float, warns: bool = True) -> Tensor:
    """Return Σ(y - J w_lin)², but ε Σ y² with a warning where it is less: no solver goes further."""
    if not (targets > 0).all():
        raise ValueError(
            "All targets are 0 (of every output that has a noise of its own), so there is no "
            "observation noise to learn. Check the targets, or leave this output out."
        )
    least = eps * targets
    if warns and (residual < _NEAR_ROUNDING * least).any():
        warnings.warn(
            "The linear model reproduces the targets so closely that their observation noise may be "
            f"lost to rounding: sigma_noise is held above {sqrt(eps):.0e} of their root mean square. "
            "Check that the targets are not constant or free of noise; if their noise is that "
            "small, subtract their mean, or convert the model and its data to float64.",
            stacklevel=2,
        )
    return torch.maximum(residual, least)


def mackay_noise(
    residual: Tensor, effective_dim: Tensor, count: Tensor, warns: bool = True
) -> Tensor:
    """Return σ ← √(Σ(y - J w_lin)² / (N - γ)), for residual sums and counts of equal shape."""
    left, least = count - effective_dim, _LEAST_FREEDOM * count
    if warns and (left < least).any():
        warnings.warn(
            "The weights' effective dimension reaches the number of targets, so that the data "
            "cannot tell noise from signal: sigma_noise is held as if a twentieth of the "
            "targets were free. Use more data, or fewer random weights with `parameters`.",
            stacklevel=2,
        )
    return (residual / torch.maximum(left, least)).sqrt()


def em_noise(residual: Tensor, effective_dim: Tensor, count: Tensor, sigma: Tensor) -> Tensor:
    """Return σ ← √((Σ(y - J w_lin)² + Tr Σ JᵀJ) / N), where Tr Σ JᵀJ = γ σ²."""
    return ((residual + effective_dim * sigma**2) / count).sqrt()


def _bounded(proposed: Tensor, current: Tensor, warns: bool = True) -> Tensor:
    proposed = torch.where(proposed > 0, proposed, current)
    kept = proposed.clamp(*PRECISION_BOUNDS)
    if warns and not torch.equal(kept, proposed):
        low, high = PRECISION_BOUNDS
        warnings.warn(
            f"The prior precision left its bounds [{low:g}, {high:g}] and was held there: the "
            "evidence prefers a model without these weights, or without a prior. Check that the "
            "network is trained and the targets are the ones it was trained on.",
            stacklevel=3,
        )
    return kept


def monte_carlo_error(effective_dim: Tensor, num_samples: int) -> Tensor:
    """Return max(0.01, 1 / √(K γ)), the Monte Carlo error of log λ, () or (blocks,)."""
    return (num_samples * effective_dim.clamp_min(1e-12)).rsqrt().clamp_min(0.01)


class Step(NamedTuple):
    """One step of λ and σ."""

    number: int
    """Steps so far, this one included."""

    start: Hyperparameters
    """λ and σ at which the expectations were taken."""

    plain: Tensor
    """log λ by the update, before acceleration."""

    hyper: Hyperparameters
    """λ and σ at which the next expectations are taken."""

    change: float
    """The largest |Δ log| of λ and σ², relative to the Monte Carlo error of log λ."""

    settled: bool
    """Whether what is left of a geometric approach is below the Monte Carlo error."""

    @property
    def moved(self) -> float:
        """The largest |Δ log λ|."""
        return (self.hyper.precision / self.start.precision).log().abs().max().item()


@dataclass(frozen=True)
class MStep:
    """New λ and σ from expectations at the old ones."""

    problem: Problem
    prior: Prior
    update: str = "mackay"
    """"mackay": the fast fixed point; "em": never lowers the evidence, and is slow."""

    warns: bool = True
    """Whether to warn of λ at its bounds, and of σ that cannot be told."""

    def __call__(self, found: Expectation, before: Step | None = None) -> Step:
        """Return the step from these expectations, given the one that led to them."""
        start, gamma, square = found.hyper, found.effective_dims.mean(0), found.squared_norm
        sigma = None if start.sigma is None else self._noise(start.sigma, found)
        if self.update == "em":
            precision = em_update(gamma, square, start.precision, self.prior.num_weights())
        else:
            precision = function_space_Mackay_update(
                gamma, square, start.precision, warns=self.warns
            )
        new = self.accelerated(before, start, Hyperparameters(precision, sigma))
        step = self.taken(before, start, new, found.effective_dims)
        settled = before is not None and step.number > 2 and _left(before.change, step.change) < 1.0
        return step._replace(plain=precision.log(), settled=settled)

    def taken(
        self,
        before: Step | None,
        start: Hyperparameters,
        new: Hyperparameters,
        effective_dims: Tensor,
    ) -> Step:
        """Return the record of a step that has been taken."""
        change = _change(start, new, self.allowed(effective_dims.mean(0), len(effective_dims)))
        number = 1 if before is None else before.number + 1
        return Step(number, start, new.precision.log(), new, change, False)

    def _noise(self, sigma: Tensor, found: Expectation) -> Tensor:
        """Return the new σ."""
        count = torch.full_like(sigma, self.problem.data.num_targets / sigma.numel())
        dims, targets = found.noise_dims.to(sigma), found.targets.to(sigma)
        eps = torch.finfo(self.problem.dtype).eps
        residual = resolved(found.residual.to(sigma), targets, eps, self.warns)
        if self.update == "em":
            return em_noise(residual, dims, count, sigma)
        return mackay_noise(residual, dims, count, self.warns)

    def allowed(self, gamma: Tensor, num_samples: int) -> Tensor:
        """Return the change of log λ that is as good as none, () or (blocks,).

        The slow steps of true EM are held to a tenth of a per cent: small steps there do
        not mean that the end is near.
        """
        if self.update == "em":
            return torch.full_like(gamma, 1e-3)
        return monte_carlo_error(gamma, num_samples)

    def accelerated(
        self, before: Step | None, start: Hyperparameters, proposed: Hyperparameters
    ) -> Hyperparameters:
        """Go on along the fixed point's own contraction or oscillation (a secant step in log λ)."""
        here, plain = start.precision.log(), proposed.precision.log()
        if self.update == "em" or here.dim() or start.sigma is not None or before is None:
            return proposed
        slope = (plain - before.plain) / (here - before.start.precision.log())
        if not -1 < slope < 0.9:  # below 0 the fixed point is overshot from either side
            return proposed
        return proposed._replace(precision=(here + (plain - here) / (1 - slope)).exp())


def warn_unsettled(last: Step) -> None:
    """Log that EM has ended before its fixed point."""
    logger.warning(
        "The prior precision had not settled after %d EM steps: the last one changed it by a "
        "factor of %.2g. Raise em_steps, or start nearer with prior_precision.",
        *(last.number, exp(last.moved)),
    )


def _left(before: float, change: float) -> float:
    """Return the most that a geometric approach with these two last changes has still to go."""
    ratio = change / max(before, 1e-300)
    return change if ratio >= 1 else change * max(1.0, ratio / (1 - ratio))


def _change(old: Hyperparameters, new: Hyperparameters, allowed: Tensor) -> float:
    """Return the largest |Δ log| of λ over what is allowed, and of σ² over the least of it."""
    change = ((new.precision.log() - old.precision.log()).abs() / allowed).max().item()
    if old.sigma is not None:
        moved = 2 * (new.sigma.log() - old.sigma.log()).abs().max()
        change = max(change, moved.item() / allowed.min().item())
    return change
