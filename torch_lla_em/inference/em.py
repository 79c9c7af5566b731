"""The EM iteration, which is the same for every kind of E-step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from torch_lla_em.inference.mackay import (
    Estimate,
    Expectation,
    Hyperparameters,
    MStep,
    Step,
)
from torch_lla_em.inference.stochastic_prior import StochasticPrior
from torch_lla_em.problem import Problem


class Posterior(NamedTuple):
    """The result of a fit."""

    hyper: Hyperparameters
    w_lin: Tensor
    w_samples: Tensor
    scale: Tensor
    effective_dim: Estimate
    certificate: Tensor
    log_evidence: Estimate
    mixture: Tensor | None = None
    """The components of predictions as fitted, (components, 4): weight, share of J w_lin, share of f,
    and scale of the posterior variance; None: the samples around f."""

    examples: Tensor | None = None
    """J w_k at some of the training examples, (n, K, ..., C), if they are known."""

    complete: bool = True
    """Whether the fit ended by itself, and not because its budget was spent."""


class Info(NamedTuple):
    """The record of one EM step."""

    found: Expectation
    """The result of its E-step."""

    columns: float
    """Number of columns multiplied by the GGN since the start; a pass with K columns counts K."""


def record_of(info: Info, number: int, data_passes: int, seconds: float) -> dict[str, Any]:
    """Return the entry of an EM step in ``history``: plain numbers, and lists for several blocks."""
    found = info.found
    precision, sigma = found.hyper
    gamma, evidence = found.effective_dim, found.log_evidence
    return {
        "step": number,
        "prior_precision": precision.tolist(),
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
        "columns": info.columns,
        "seconds": seconds,
    }


class State(NamedTuple):
    """The state of EM between two steps."""

    hyper: Hyperparameters
    """λ and σ of the next E-step."""

    step: Step | None = None
    """The last step of λ and σ; None at the start."""

    info: Info | None = None
    """The record of the last step; None at the start."""

    own: Any = None
    """The state of the E-step."""

    fresh: bool = False
    """Whether the last step changed λ and σ; otherwise it only improved the posterior."""

    ended: bool = False
    """Whether the E-step cannot improve any more."""

    def is_kept(self, max_steps: int) -> bool:
        """Whether λ and σ stay fixed: they have converged, or all steps are taken."""
        taken = 0 if self.step is None else self.step.number
        return self.ended or taken >= max_steps or (self.step is not None and self.step.settled)


class Found(NamedTuple):
    """The result of an E-step."""

    expectation: Expectation
    step: Step
    """The next step of λ and σ, or the last one if λ stays fixed."""

    own: Any = None
    ended: bool = False


class EStep(Protocol):
    """One way to find the posterior at given λ and σ."""

    problem: Problem
    noise: StochasticPrior

    def start(self) -> State:
        """Return the state that EM begins with."""
        ...

    def advance(self, state: State, m_step: MStep, kept: bool) -> Found:
        """Return the expectations, and the step of λ and σ unless they stay fixed."""
        ...

    def is_exact(self, state: State) -> bool:
        """Return whether the posterior is exact enough once λ stays fixed."""
        ...

    def state(self) -> Any:
        """Return the state that is not part of the state of EM."""
        ...

    def posterior(self, state: State) -> Posterior:
        """Return the posterior at the final λ and σ."""
        ...

    def cut_short(self, state: State) -> Posterior:
        """Return the posterior of a state without further passes over the data."""
        ...


def is_done(e_step: EStep, state: State, max_steps: int) -> bool:
    """Return whether λ and σ have converged, or all steps are taken, and the E-step is exact."""
    return state.is_kept(max_steps) and (state.ended or e_step.is_exact(state))


def em(e_step: EStep, m_step: MStep, start: State, max_steps: int = 20) -> Iterator[State]:
    """Yield the state after each step, until λ and σ have converged and the E-step is exact.

    ``start`` may be the last state of an earlier run, whose steps count too.
    """
    state = start
    while not is_done(e_step, state, max_steps):
        found, step, own, ended = e_step.advance(state, m_step, state.is_kept(max_steps))
        info = Info(found, m_step.problem.cost.columns)
        fresh = step.number > (0 if state.step is None else state.step.number)
        state = State(step.hyper, step, info, own, fresh, ended)
        yield state
    if max_steps and state.info is not None:
        m_step.warn(state.info.found, state.step)
