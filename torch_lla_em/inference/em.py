"""The EM iteration, which is the same for every kind of E-step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch_lla_em.inference.controller import Controller
from torch_lla_em.inference.records import FitResult, State
from torch_lla_em.inference.stochastic_prior import StochasticPrior
from torch_lla_em.problem import Problem


class EStep(Protocol):
    """One way to find the posterior at given λ and σ."""

    problem: Problem
    noise: StochasticPrior

    def start(self, known: State | None = None) -> State:
        """Return the state that EM begins with; ``known`` is that of ``saved``, in an earlier run."""
        ...

    def advance(self, state: State, controller: Controller) -> State:
        """Return the state after a step, whose λ and σ the controller chooses."""
        ...

    def is_exact(self, state: State) -> bool:
        """Return whether the posterior is exact enough once λ stays fixed."""
        ...

    def saved(self, state: State) -> tuple[State, Any]:
        """Return a state for a checkpoint, and what else belongs to it."""
        ...

    def posterior(self, state: State) -> FitResult:
        """Return the posterior at the final λ and σ."""
        ...

    def cut_short(self, state: State) -> FitResult:
        """Return the posterior of a state without further passes over the data."""
        ...


def is_done(e_step: EStep, controller: Controller, state: State) -> bool:
    """Return whether λ and σ have converged, or all steps are taken, and the E-step is exact."""
    return controller.is_fixed(state) and (state.ended or e_step.is_exact(state))


def em(e_step: EStep, controller: Controller, start: State) -> Iterator[State]:
    """Yield the state after each step, until λ and σ have converged and the E-step is exact.

    ``start`` may be the last state of an earlier run, whose steps count too.
    """
    state = start
    while not is_done(e_step, controller, state):
        after = e_step.advance(state, controller)
        found = after.statistics._replace(columns=controller.problem.cost.columns)
        state = after._replace(statistics=found, fresh=after.number > state.number)
        yield state
    controller.warn(state)
