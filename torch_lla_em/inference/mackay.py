"""M-step: the prior precision λ and the observation noise σ from the effective dimension γ.

This file contains everything about the steps of λ and σ, and about their convergence.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.inference.prior import Prior
from torch_lla_em.problem import Problem
from torch_lla_em.runtime import PRECISION_BOUNDS, report

# smallest N - γ in the update of σ, relative to the number N of targets
_LEAST_FREEDOM = 0.05
# a residual below this multiple of the rounding error gives a warning
_NEAR_ROUNDING = 10


class Hyperparameters(NamedTuple):
    """The quantities that EM learns."""

    precision: Tensor
    """λ, () or (blocks,), in float64."""

    sigma: Tensor | None = None
    """σ of a Gaussian likelihood, () or (C,), in float64."""


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


class Expectation(NamedTuple):
    """The result of an E-step at one λ and σ, for the M-step."""

    hyper: Hyperparameters
    """λ and σ of the posterior."""

    effective_dims: Tensor
    """γ of every sample, (K,) or (K, blocks)."""

    squared_norm: Tensor
    """‖w_lin / scale‖², () or (blocks,)."""

    loss: float
    """Σ_n -log p(y_n | J_n w_lin)."""

    log_evidences: Tensor
    """Log evidence with the log det of every sample, (K,); NaN if it would need more passes."""

    mode_error: float
    sample_error: float

    residual: Tensor | None = None
    """Σ_n (y_n - J_n w_lin)², the shape of σ; None if the likelihood is not Gaussian."""

    targets: Tensor | None = None
    """Σ_n y_n², the shape of σ."""

    noise_dims: Tensor | None = None
    """γ by output, the shape of σ."""

    @property
    def effective_dim(self) -> Estimate:
        """γ, () or (blocks,), with its standard error over samples."""
        return Estimate.of(self.effective_dims)

    @property
    def log_evidence(self) -> Estimate:
        """Log evidence, with its standard error over samples."""
        return Estimate.of(self.log_evidences)

    @property
    def error(self) -> float:
        """The larger of the errors of the samples and of the mode."""
        return max(self.sample_error, self.mode_error)


def function_space_Mackay_update(
    effective_dim: Tensor, squared_norm: Tensor, precision: Tensor, stride: float | None = None
) -> Tensor:
    """Return MacKay's update of the prior precision, λ ← γ / ‖w_lin‖², within 1e-20 and 1e20.

    Args:
        effective_dim (Tensor): γ, shape () or (blocks,): the mean of ``effective_dims`` of
            ``optimise_samples`` over samples.
        squared_norm (Tensor): ‖w_lin‖² in scaled coordinates, shape () or (blocks,):
            ``prior.squared_norm(mode.w)`` of the mode that ``optimise_MAP`` returns.
        precision (Tensor): The current λ. Blocks that the data do not determine (γ = 0) keep it.
        stride (float, optional): Exponent of the step, λ ← λ (γ / (λ ‖w_lin‖²))^stride, limited to
            a change of log λ by 1. Default None: the plain update.

    Returns:
        The new λ, shape () or (blocks,).

    Example:
        >>> gamma, squared_norm = torch.tensor(8.0), torch.tensor(4.0)
        >>> float(function_space_Mackay_update(gamma, squared_norm, torch.tensor(1.0)))
        2.0
    """
    proposed = effective_dim / squared_norm
    if stride is not None:
        step = (stride * (proposed / precision).log()).nan_to_num(0.0).clamp(-1.0, 1.0)
        proposed = precision * step.exp()
    return _bounded(proposed, precision)


def em_update(
    effective_dim: Tensor, squared_norm: Tensor, precision: Tensor, num_weights: Tensor
) -> Tensor:
    """Return the EM update λ ← P / (‖w_lin‖² + Tr Σ), which never lowers the evidence.

    It needs more steps than MacKay's update.
    """
    trace = (num_weights - effective_dim) / precision
    return _bounded(num_weights / (squared_norm + trace), precision)


def mackay_noise(residual: Tensor, effective_dim: Tensor, count: Tensor) -> Tensor:
    """Return σ ← √(Σ(y - J w_lin)² / (N - γ)), for residual sums and counts of equal shape."""
    return (residual / torch.maximum(count - effective_dim, _LEAST_FREEDOM * count)).sqrt()


def em_noise(residual: Tensor, effective_dim: Tensor, count: Tensor, sigma: Tensor) -> Tensor:
    """Return σ ← √((Σ(y - J w_lin)² + Tr Σ JᵀJ) / N), where Tr Σ JᵀJ = γ σ²."""
    return ((residual + effective_dim * sigma**2) / count).sqrt()


def _bounded(proposed: Tensor, current: Tensor) -> Tensor:
    return torch.where(proposed > 0, proposed, current).clamp(*PRECISION_BOUNDS)


class Step(NamedTuple):
    """One step of λ and σ."""

    number: int
    """Steps so far, this one included."""

    start: Hyperparameters
    """λ and σ of the expectations."""

    plain: Tensor
    """log λ by the update, before acceleration."""

    hyper: Hyperparameters
    """λ and σ of the next expectations."""

    change: float
    """The largest |Δ log| of λ and σ², relative to the Monte Carlo error of log λ."""

    settled: bool
    """Whether the remaining distance of a geometric convergence is below the Monte Carlo error."""


@dataclass(frozen=True)
class MStep:
    """New λ and σ from expectations at the old ones."""

    problem: Problem
    prior: Prior
    update: str = "mackay"
    """"mackay": the fast fixed point; "em": never lowers the evidence, and is slow."""

    def __call__(self, found: Expectation, before: Step | None = None) -> Step:
        """Return the step that follows from these expectations, given the previous step."""
        start, gamma, square = found.hyper, found.effective_dims.mean(0), found.squared_norm
        sigma = None if start.sigma is None else self._noise(start.sigma, found)
        if self.update == "em":
            precision = em_update(gamma, square, start.precision, self.prior.num_weights())
        else:
            precision = function_space_Mackay_update(gamma, square, start.precision)
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
        gamma, K = effective_dims.mean(0), len(effective_dims)
        change = _change(start, new, self.allowed(gamma, K), self.allowed(gamma, K, rises=True))
        number = 1 if before is None else before.number + 1
        return Step(number, start, new.precision.log(), new, change, False)

    def _noise(self, sigma: Tensor, found: Expectation) -> Tensor:
        """Return the new σ."""
        residual, rounding, dims, count = self._sums(found)
        residual = torch.maximum(residual, rounding)
        if self.update == "em":
            return em_noise(residual, dims, count, sigma)
        return mackay_noise(residual, dims, count)

    def _sums(self, found: Expectation) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return Σ(y - J w_lin)², its rounding error, γ and the number of targets, the shape of σ."""
        sigma: Any = found.hyper.sigma
        residual, targets, dims = (
            sums.to(sigma) for sums in (found.residual, found.targets, found.noise_dims)
        )
        if not (targets > 0).all():
            raise ValueError(
                "All targets are 0 (or all targets of an output with its own noise), so there is no "
                "observation noise to learn. Check the targets, or remove this output."
            )
        count = torch.full_like(sigma, self.problem.data.num_targets / sigma.numel())
        return residual, torch.finfo(self.problem.dtype).eps * targets, dims, count

    def allowed(self, gamma: Tensor, num_samples: int, rises: bool = False) -> Tensor:
        """Return the change of log λ that counts as converged, () or (blocks,).

        It is max(0.01, 1 / √(K γ)), the Monte Carlo error of log λ. A γ below 1 counts as 1, unless λ
        ``rises``: where the data determine nothing, λ grows without bound, and its value does not
        matter. With update="em" it is 0.1 %, because small steps do not mean that the fixed point is
        close.
        """
        if self.update == "em":
            return torch.full_like(gamma, 1e-3)
        return (num_samples * gamma.clamp_min(1e-12 if rises else 1)).rsqrt().clamp_min(0.01)

    def accelerated(
        self, before: Step | None, start: Hyperparameters, proposed: Hyperparameters
    ) -> Hyperparameters:
        """Accelerate the fixed-point iteration by a secant step in log λ."""
        here, plain = start.precision.log(), proposed.precision.log()
        if self.update == "em" or here.dim() or start.sigma is not None or before is None:
            return proposed
        slope = (plain - before.plain) / (here - before.start.precision.log())
        if not -1 < slope < 0.9:  # negative: it overshoots from both sides
            return proposed
        return proposed._replace(precision=(here + (plain - here) / (1 - slope)).exp())

    def warn(self, found: Expectation, last: Step) -> None:
        """Warn if λ has not converged or is at a bound, or if the data do not determine σ."""
        (low, high), precision = PRECISION_BOUNDS, last.hyper.precision
        if not last.settled:
            moved = (precision / last.start.precision).log().abs().max().item()
            report(
                "log",
                f"The prior precision has not converged after {last.number} EM steps: the last one "
                f"changed it by a factor of {exp(moved):.2g}. Increase em_steps, or pass a "
                "prior_precision closer to the result.",
            )
        if not ((low < precision) & (precision < high)).all():
            report(
                "warn",
                f"The prior precision reached a bound of [{low:g}, {high:g}]: the evidence prefers a "
                "model without these parameters, or without a prior. Check that the network is "
                "trained, and on these targets.",
            )
        if found.hyper.sigma is None:
            return
        residual, rounding, dims, count = self._sums(found)
        if (residual < _NEAR_ROUNDING * rounding).any():
            least = sqrt(torch.finfo(self.problem.dtype).eps)
            report(
                "warn",
                "The linear model reproduces the targets so closely that their observation noise may "
                f"be lost to rounding: sigma_noise is held above {least:.0e} of their root mean "
                "square. Check that the targets are not constant or without noise. If their noise "
                "really is that small, subtract their mean, or convert the model and its data to "
                "float64.",
            )
        if self.update == "mackay" and (count - dims < _LEAST_FREEDOM * count).any():
            report(
                "warn",
                "The effective dimension reaches the number of targets, so the data cannot separate "
                "noise from signal. sigma_noise is limited as if the effective dimension were 95 % of "
                "the number of targets. Use more data, or fewer `parameters` in the posterior.",
            )


def _left(before: float, change: float) -> float:
    """Return a bound on the remaining distance of a geometric convergence, from two changes."""
    ratio = change / max(before, 1e-300)
    return change if ratio >= 1 else change * max(1.0, ratio / (1 - ratio))


def _change(old: Hyperparameters, new: Hyperparameters, allowed: Tensor, rising: Tensor) -> float:
    """Return the largest |Δ log λ| and |Δ log σ²|, relative to the allowed change, or that of a rising λ."""
    moved = new.precision.log() - old.precision.log()
    change = (moved.abs() / torch.where(moved > 0, rising, allowed)).max().item()
    if old.sigma is not None:
        moved = 2 * (new.sigma.log() - old.sigma.log()).abs().max()
        change = max(change, moved.item() / allowed.min().item())
    return change
