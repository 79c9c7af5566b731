"""The records of EM: what an E-step finds, the state between two steps, and the result of a fit."""

from __future__ import annotations

from math import exp, inf, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor


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


Hyper = tuple[Tensor, Tensor | None]
"""λ and σ."""

NoiseSums = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Σ_n (y_n - J_n w_lin)², Σ_n y_n² and γ times the temperature by output, the shape of σ; None without a σ."""


class Statistics(NamedTuple):
    """The result of an E-step at one λ and σ."""

    precision: Tensor
    """λ, () or (blocks,), in float64."""

    sigma: Tensor | None
    """σ of a Gaussian likelihood, () or (C,), in float64."""

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
    """γ times the temperature, by output, the shape of σ."""

    columns: float = 0.0
    """Number of columns multiplied by the GGN since the start; a pass with K columns counts K."""

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


class Way(NamedTuple):
    """λ after steps over a span in which H moves."""

    plain: float
    """log λ by MacKay's update."""

    ahead: float
    """λ where a secant through the last two updates expects them to change nothing."""

    worth: float
    """The nats that the bound would gain on the way there."""

    share: float
    """Share of the change of H that a step takes."""


class State(NamedTuple):
    """The state of EM between two steps."""

    precision: Tensor
    """λ of the next E-step."""

    sigma: Tensor | None = None
    """σ of the next E-step."""

    statistics: Statistics | None = None
    """The result of the last E-step; None at the start."""

    number: int = 0
    """Steps of λ and σ so far, without those over spans that are too small."""

    before: Tensor | None = None
    """λ before the last step; None at the start, as the next."""

    plain: Tensor | None = None
    """log λ by the update of the last step, before acceleration."""

    way: Way | None = None
    """Where λ stands after steps over a span, if H moves."""

    changes: Tensor | None = None
    """|Δ log| of every λ and of σ² in the last step of a solver, relative to the Monte Carlo error of log λ."""

    converged: bool = False
    """Whether λ and σ have converged and stay fixed."""

    fresh: bool = False
    """Whether the last step changed λ and σ; otherwise it only improved the posterior."""

    ended: bool = False
    """Whether the E-step cannot improve any more."""

    best: float = inf
    """The smallest error so far at the fixed λ."""

    stalled: int = 0
    """Steps since then."""

    size: int = 0
    """Directions of the span in the last step of λ."""

    peak: float = -inf
    """The highest bound after a step."""

    @property
    def moved(self) -> float:
        """The change of log λ in the last step, 0 before the first."""
        if self.before is None:
            return 0.0
        return (self.precision / self.before).log().abs().max().item()

    def change(self, words: str) -> str:
        """Return words with the factor by which the last step changed λ; none if it rounds to 1."""
        factor = f"{exp(self.moved):.3g}"
        return "" if factor == "1" else words % factor

    own: Any = None
    """What the E-step starts from next; None at the start."""


class Extent(NamedTuple):
    """How far a span of directions reaches."""

    grew: bool
    """Whether the last extension had new directions."""

    complete: bool
    """Whether it has all directions that there are."""

    full: bool
    """Whether there is no memory for more."""

    size: int
    """Its number of directions."""


class Ascent(NamedTuple):
    """The result of steps over a span."""

    q: Any
    """The posterior over the span."""

    old: Hyper
    """λ and σ before them."""

    gain: float
    """What the bound has gained."""

    climbed: bool = True
    """Whether there were such steps."""

    at_rest: bool = False
    """Whether they have reached a fixed point."""

    cut: bool = False
    """Whether they ended because the time of the fit is over."""


class FitResult(NamedTuple):
    """The result of a fit, which a ``Posterior`` contains."""

    prior_precision: Tensor
    """λ, () or (blocks,)."""

    sigma_noise: Tensor | None
    """σ of a regression."""

    w_lin: Tensor
    """The mode of the linear model, (P,)."""

    w_samples: Tensor
    """The posterior samples, with mean zero, (K, P)."""

    scale: Tensor
    """The prior standard deviation of every parameter at λ = 1, (P,)."""

    effective_dim: Estimate
    """γ, () or (blocks,), with its Monte Carlo error."""

    certificate: Tensor
    """The numerical error of each sample, in posterior standard deviations, (K,)."""

    log_evidence: Estimate
    """log p(y | λ, σ) with its standard error."""

    mixture: Tensor | None = None
    """The components of predictions as fitted or calibrated, (components, 4): weight, share of J w_lin,
    share of f, and scale of the posterior variance; None: the samples around J w_lin if σ was learnt from it,
    otherwise around f."""

    examples: Tensor | None = None
    """J w_k at some of the training examples, (n, K, ..., C), if they are known."""

    leverages: Tensor | None = None
    """(J w_k)ᵀ H J w_l / K at these examples, (n, K, K): how much each determines of its own outputs."""

    mean_error: Tensor | None = None
    """The variance of the Monte Carlo error of w_lin relative to the posterior's, (); None: not estimated."""

    constant: Tensor | None = None
    """What is added to J w_lin of continuous targets, (C,) or (); None: 0."""

    network_noise: Tensor | None = None
    """σ of the network's residuals relative to ``sigma_noise``, the shape of σ; None: σ is not that of J w_lin,
    since it was not learnt."""

    complete: bool = True
    """Whether the fit ended by itself, and not because its budget was spent."""


def record_of(found: Statistics, number: int, data_passes: int, seconds: float) -> dict[str, Any]:
    """Return the entry of an EM step in ``history``: plain numbers, and lists for several blocks."""
    gamma, evidence, sigma = found.effective_dim, found.log_evidence, found.sigma
    return {
        "step": number,
        "prior_precision": found.precision.tolist(),
        "sigma_noise": None if sigma is None else sigma.tolist(),
        "effective_dim": gamma.value.tolist(),
        "effective_dim_error": gamma.standard_error.tolist(),
        "squared_norm": found.squared_norm.tolist(),
        "loss": found.loss,
        "mode_residual": found.mode_error,
        "sample_residual": found.sample_error,
        "log_evidence": evidence.value.item(),
        "log_evidence_error": evidence.standard_error.item(),
        "data_passes": data_passes,
        "columns": found.columns,
        "seconds": seconds,
    }
