"""EM: the one iteration for every inference, whose E-steps it knows by one method."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torch_lla_em.inference.mackay import (
    Estimate,
    Expectation,
    Hyperparameters,
    MStep,
    Step,
    warn_unsettled,
)


class Info(NamedTuple):
    """One EM step: the hyperparameters of its expectations, and the expectations."""

    step: int
    hyper: Hyperparameters
    """λ and σ of the E-step."""

    effective_dim: Estimate
    """γ, () or (blocks,), with its standard error over samples."""

    squared_norm: Tensor
    """‖w_lin / scale‖², () or (blocks,)."""

    loss: float
    """Σ_n -log p(y_n | J_n w_lin)."""

    log_evidence: Estimate
    """Log evidence at the λ and σ of the E-step; NaN if it would cost passes."""

    mode_error: float
    sample_error: float
    columns: float
    """Columns pushed through the data since the start (K for a K-column pass)."""

    seconds: float


def record_of(info: Info, data_passes: int) -> dict[str, Any]:
    """Return what ``history`` keeps of a step: plain numbers, and lists where there are blocks."""
    sigma = info.hyper.sigma
    return {
        "step": info.step,
        "prior_precision": info.hyper.precision.tolist(),
        "sigma_noise": None if sigma is None else sigma.tolist(),
        "effective_dim": info.effective_dim.value.tolist(),
        "effective_dim_error": info.effective_dim.standard_error.tolist(),
        "squared_norm": info.squared_norm.tolist(),
        "loss": info.loss,
        "mode_residual": info.mode_error,
        "sample_residual": info.sample_error,
        "log_evidence": info.log_evidence.value.item(),
        "log_evidence_error": info.log_evidence.standard_error.item(),
        "data_passes": data_passes,
        "columns": info.columns,
        "seconds": info.seconds,
    }


def summary_of(record: dict[str, Any]) -> dict[str, str]:
    """Return what the progress bar shows of a record; of blocks, the sum of γ and the mean log λ."""
    precision, gamma, error = (
        torch.tensor(record[name], device="cpu")
        for name in ("prior_precision", "effective_dim", "effective_dim_error")
    )
    shown = {"λ": f"{precision.log().mean().exp().item():.3g}"}
    if record["sigma_noise"] is not None:
        shown["σ"] = f"{torch.tensor(record['sigma_noise'], device='cpu').mean().item():.3g}"
    shown["γ"] = f"{gamma.sum().item():.1f}±{error.square().sum().sqrt().item():.1f}"
    shown["error"] = f"{max(record['sample_residual'], record['mode_residual']):.0e}"
    return shown


class State(NamedTuple):
    """What EM goes on with."""

    hyper: Hyperparameters
    """λ and σ at which the next E-step is taken."""

    step: Step | None = None
    """The last step of λ and σ; None at the start."""

    info: Info | None = None
    """The record of the last step; None at the start."""

    own: Any = None
    """What the E-step goes on with, where H moves."""

    fresh: bool = False
    """Whether λ and σ took a step, rather than the posterior at a λ that is kept."""

    ended: bool = False
    """Whether the E-step can find no more."""

    def is_kept(self, max_steps: int) -> bool:
        """Whether λ and σ stay as they are: they have settled, or took all steps."""
        taken = 0 if self.step is None else self.step.number
        return self.ended or taken >= max_steps or (self.step is not None and self.step.settled)


class Found(NamedTuple):
    """What an E-step hands to EM."""

    expectation: Expectation
    step: Step
    """The one that follows from it, or the last one if λ is kept."""

    own: Any = None
    ended: bool = False


class EStep(Protocol):
    """An inference, with H fixed or moving, as EM sees it."""

    def advance(self, state: State, m_step: MStep, kept: bool) -> Found:
        """Return the expectations, and the step of λ and σ unless they are kept."""
        ...

    def is_exact(self, state: State) -> bool:
        """Whether no more steps are to be taken once λ is kept."""
        ...


def em(e_step: EStep, m_step: MStep, start: State, max_steps: int = 20) -> Iterator[State]:
    """Yield the state after each step, until λ and σ have settled and the E-step is exact.

    ``start`` may be the last state of an earlier run, whose steps count too.
    """
    began = time.monotonic() - (0.0 if start.info is None else start.info.seconds)
    state = start
    while not (state.is_kept(max_steps) and (state.ended or e_step.is_exact(state))):
        found, step, own, ended = e_step.advance(state, m_step, state.is_kept(max_steps))
        info = Info(
            step.number,
            found.hyper,
            Estimate.of(found.effective_dims),
            found.squared_norm,
            found.loss,
            Estimate.of(found.log_evidences),
            found.mode_error,
            found.sample_error,
            m_step.problem.cost.columns,
            time.monotonic() - began,
        )
        fresh = step.number > (0 if state.step is None else state.step.number)
        state = State(step.hyper, step, info, own, fresh, ended)
        yield state
    if max_steps and state.step is not None and not state.step.settled:
        warn_unsettled(state.step)
