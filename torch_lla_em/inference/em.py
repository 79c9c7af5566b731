"""The algorithm of the paper: EM on a linear model, either of the whole problem or restricted to a
span of directions.

The four stages are the stochastic prior (``sto_samples``), the mode (``map``), the samples
(``samples``), and MacKay's updates (``mackay``). The probes ξ and η of the first stage do not
depend on λ, so EM repeats only the other three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from torch import Tensor

from torch_lla_em.inference.linear_problem import LinearProblem
from torch_lla_em.inference.mackay import function_space_Mackay_update, mackay_noise
from torch_lla_em.inference.map import optimise_MAP
from torch_lla_em.inference.prior import StochasticPrior
from torch_lla_em.inference.samples import PosteriorSamples, optimise_samples
from torch_lla_em.inference.state import State
from torch_lla_em.problem import Problem
from torch_lla_em.solvers import Minimum, Search, Solver

Problems = TypeVar("Problems", bound=LinearProblem)

Step = tuple[State, State]
"""The posterior with which a fit ends if its time is over, and the state from which the fit
continues; often both are the same state."""


class Engine(Protocol[Problems]):
    """The object that EM runs on: it returns linear problems at any H and σ, with their solvers."""

    @property
    def problem(self) -> Problem:
        """The network, the likelihood and the data."""

    def at(self, q: State) -> tuple[Problems, StochasticPrior, Solver, Search]:
        """Return the problem at H and σ of a state, its random probes, and the solvers of samples
        and mode."""

    def expecting(
        self, problem: Problems, samples: PosteriorSamples, precision: Tensor
    ) -> Problems:
        """Return the problem, whose loss is an expectation over the posterior if H moves."""

    def found(self, q: State, samples: PosteriorSamples, mode: Minimum, problem: Problems) -> State:
        """Return the state with its posterior."""

    def outputs(self, q: State) -> Iterator[tuple[Tensor, Tensor, Iterable[Tensor]]]:
        """Yield y, E[y | J m] and, if there is a σ per output, every J w_k, for parts of this
        rank's examples."""


def em(
    engine: Engine[Problems], q: State, update: Callable[[Engine[Problems], State], State]
) -> Iterator[Step]:
    """Yield the posterior at λ and σ, and the state with the next λ and σ by ``update``, until that
    state contains the reason why EM ended."""
    while not q.fate.why:
        posterior = e_step(engine, q)
        q = update(engine, posterior)
        yield posterior, q


def e_step(engine: Engine[Problems], q: State) -> State:
    """Return the state with the posterior at its λ, σ and H: K samples, and the mode."""
    problem, probes, solver, search = engine.at(q)
    samples = optimise_samples(
        problem, probes, q.precision, solver, q.samples if len(q.samples) else None
    )
    problem = engine.expecting(problem, samples, q.precision)
    mode = optimise_MAP(problem, probes.prior, q.precision, search, q.mean if len(q.mean) else None)
    return engine.found(q, samples, mode, problem)


def m_step(engine: Engine[Problems], q: State) -> tuple[Tensor, Tensor | None]:
    """Return λ and σ by MacKay's updates from a posterior."""
    precision = function_space_Mackay_update(q.gamma.mean(0), q.norm, q.precision)
    if q.sigma is None:
        return precision, None
    return precision, mackay_noise(engine.problem, q.sigma, q.gamma, engine.outputs(q))[0]
