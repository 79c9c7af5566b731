"""Runs a fit: chooses the kind of E-step, iterates EM, and computes the final posterior."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

from torch import Tensor

from torch_lla_em.inference.controller import Controller
from torch_lla_em.inference.em import EStep, em, is_done
from torch_lla_em.inference.iterative_e_step import IterativeEStep
from torch_lla_em.inference.options import FitOptions, allows_span, choose_curvature
from torch_lla_em.inference.records import FitResult, State, Statistics
from torch_lla_em.inference.span_e_step import NoSpan, SpanEStep
from torch_lla_em.inference.stochastic_prior import StochasticPrior, get_sto_samples, with_noise
from torch_lla_em.inference.trend import ErrorTrend
from torch_lla_em.problem import VECTORS, Problem, size_of
from torch_lla_em.runtime import DoesNotFit, TensorList, release, report, shortage_of

# H at the linear mode changes λ, and λ the mode, but only little after the first round
_LINEAR_ROUNDS = 5
_LINEAR_CHANGE = 0.05

_MOVING, _FIXED, _SOLVES = "span_expected_h", "span_fixed_h", "solves"
"""The kinds of E-step."""

_NOT_VARIATIONAL = (
    'curvature="variational" needs a span of directions, which cannot be stored: there is not '
    "enough memory, or the examples come in a different order in every pass. The fit continues "
    'with curvature="%s", whose predictions are usually worse. Use a loader with a fixed order, '
    "fewer `parameters`, or more memory; otherwise call `calibrate`."
)

_NO_SPAN = (
    "The span of directions cannot be stored: there is not enough memory, or the examples come in "
    "a different order in every pass. The fit continues with block CG."
)


class Progress(NamedTuple):
    """The state of a fit after an EM step, from which it can resume: tensors, numbers and tuples."""

    eta: TensorList
    """η of the random probes, shape (K, P), as its only part, since it rarely changes."""

    scale: Tensor
    """Prior standard deviation of every weight at λ = 1, shape (P,)."""

    sigma: Tensor | None
    """σ of a Gaussian likelihood at which the noise was drawn."""

    moments: Tensor | None = None
    """Mean and variance of continuous targets, (2, C) or (2,)."""

    network_noise: Tensor | None = None
    """σ of the network's residuals, the shape of σ."""

    kind: str | None = None
    """The kind of E-step; None if only the random probes have been drawn."""

    state: State | None = None
    """The state of EM; None before its first step."""

    directions: Any = None
    """The state of the E-step that is not part of the state of EM."""

    round: int = 0
    """How often H has been evaluated at the linear mode."""

    point: Tensor | None = None
    """The weights (P,) at which H is evaluated; None: at the network's outputs."""

    begun: Tensor | None = None
    """log λ at the beginning of this round."""

    @property
    def moves(self) -> bool:
        """Whether H is an expectation under the posterior, and changes with it."""
        return self.kind == _MOVING

    @property
    def by_span(self) -> bool:
        """Whether the E-step works in a span of directions."""
        return self.kind != _SOLVES


class Watch(NamedTuple):
    """What happens around a fit."""

    on_step: Callable[[Statistics | None, Progress, float], bool]
    """Called with the result of an EM step (None if λ did not change), the state of the fit, and the seconds
    that it still takes if the error goes on falling (infinity if they are not known).

    It returns whether the time of the fit is over.
    """

    is_late: Callable[[], bool] = lambda: False
    """Returns whether the time of the fit is over, within a step."""


def learn(
    problem: Problem, options: FitOptions, watch: Watch, start: Progress | None = None
) -> FitResult:
    """Run EM until it converges, then the last E-step; ``watch.on_step`` is called after every step.

    If it returns True, the posterior of the last step is returned. ``start`` is the last state that it
    got in an earlier run.
    """
    K, seed, layerwise = options.num_samples, options.seed, options.layerwise
    with _memory_explained(problem, K):
        if start is None:
            problem.cost.begin("random probes")
            noise = get_sto_samples(problem, K, seed, options.g_prior, layerwise)
            _require_labels(problem)
            sigma = problem.likelihood.observation_noise
            of_targets = sigma, problem.moments, problem.network_noise
            start = Progress(TensorList.of(noise.eta), noise.prior.scale, *of_targets)
            watch.on_step(None, start, inf)
        else:
            problem.take(start.sigma, start.moments, start.network_noise)
            noise = with_noise(problem, start.eta.parts[0], start.scale, seed, layerwise)
        _check_start(options.prior_precision, options, len(noise.prior.layout.names))
        curvature = options.curvature or choose_curvature(problem, options)
        kinds = _kinds(problem, options, curvature)
        start = start._replace(kind=start.kind or kinds[0])
        while True:
            at = problem if start.point is None else problem.with_curvature_at(start.point)
            found = None
            with suppress(NoSpan):
                found = _fitted(at, noise, options, watch, start)
            if found is None:
                instead = "network" if options.curvature is None else "linear"
                report("log", _NOT_VARIATIONAL % instead if start.moves else _NO_SPAN)
                kind = kinds[kinds.index(start.kind) + 1]
                start = start._replace(kind=kind, state=None, directions=None)
                release()  # what the failed attempt held
                continue
            log_precision = found.prior_precision.log()
            if not found.complete or _is_last(problem, options, start, log_precision):
                return _completed(found, problem, is_learnt=options.em_steps > 0)
            noise = noise.drawn_again(problem.with_curvature_at(found.w_lin))
            options = replace(options, prior_precision=found.prior_precision)
            start = start._replace(
                eta=TensorList.of(noise.eta),
                state=None,
                directions=None,
                round=start.round + 1,
                point=found.w_lin,
                begun=log_precision,
            )


def is_cold(problem: Problem, options: FitOptions) -> bool:
    """Return whether σ is to be learnt with a temperature below 1."""
    return (
        problem.temperature < 1
        and options.em_steps > 0
        and problem.at_temperature(1.0).sigma is not None
    )


def learn_cold(
    problem: Problem, options: FitOptions, watch: Watch, start: Progress | None = None
) -> FitResult:
    """Run ``learn`` for a regression with a temperature below 1, with λ and σ that are learnt at 1.

    N / T counts of N targets would have interpolation win.
    """
    plain, complete = problem.at_temperature(1.0), True
    if start is None or not start.round:
        found = learn(plain, options, watch, start)
        precision, complete = found.prior_precision, found.complete
        problem.take(found.sigma_noise, plain.moments, plain.network_noise)
        noise = with_noise(
            problem, found.w_samples, found.scale, options.seed, options.layerwise
        ).drawn_again(problem)
        of_targets = found.sigma_noise, plain.moments, plain.network_noise
        start = Progress(TensorList.of(noise.eta), found.scale, *of_targets, round=1)
    else:
        precision = start.state.precision
    held = problem.at_temperature(problem.temperature, holds_noise=True)
    found = learn(held, replace(options, em_steps=0, prior_precision=precision), watch, start)
    own = held.network_noise.to(start.sigma) / start.sigma
    return found._replace(
        sigma_noise=start.sigma, network_noise=own, complete=complete and found.complete
    )


def _completed(found: FitResult, problem: Problem, is_learnt: bool) -> FitResult:
    """Return the posterior with σ of linear model and network, and the constant of the linear model."""
    sigma = found.sigma_noise
    if sigma is None:
        found = found._replace(sigma_noise=problem.likelihood.observation_noise)
    elif is_learnt:
        found = found._replace(network_noise=problem.network_noise.to(sigma) / sigma)
    constant = problem.constant
    return found._replace(
        constant=None if constant is None else constant.to(found.w_lin.device, copy=True)
    )


def _require_labels(problem: Problem) -> None:
    """Raise an error if the first pass has found no example that counts."""
    if not problem.data.facts.num_labelled:
        raise ValueError(
            f"None of the {problem.data.facts.num_rows} training examples has a label that counts: all are "
            "-100, or all weights are 0. Check the targets of the loader, `target_fn` and `weights`."
        )


def _kinds(problem: Problem, options: FitOptions, curvature: str) -> list[str]:
    """Return the kinds of E-step in the order in which they are tried, if a span cannot be stored."""
    moves = curvature == "variational" and not problem.likelihood.is_quadratic
    return [_MOVING] * moves + [_FIXED] * allows_span(problem, options) + [_SOLVES]


def _is_last(problem: Problem, options: FitOptions, start: Progress, log_precision: Tensor) -> bool:
    """Return whether H is not to be evaluated at the new linear mode."""
    likelihood = problem.likelihood
    if start.moves or options.curvature in (None, "network") or likelihood.is_quadratic:
        return True
    # a loss with several modes could alternate between them
    if start.round == (_LINEAR_ROUNDS if likelihood.convex else 1):
        return True
    moved = inf if start.begun is None else (log_precision - start.begun).abs().max().item()
    return moved < _LINEAR_CHANGE


def _fitted(
    problem: Problem, noise: StochasticPrior, options: FitOptions, watch: Watch, start: Progress
) -> FitResult:
    """Return the posterior of EM with one kind of E-step."""
    e_step: EStep
    if start.kind == _SOLVES:
        e_step = IterativeEStep(problem, noise, options)
    else:
        e_step = SpanEStep(problem, noise, options, start.moves, start.directions)
    controller = Controller(problem, noise.prior, options, start.moves, watch.is_late)
    state, told = e_step.start(start.state), start._replace(directions=None)
    problem.cost.begin("E-step")
    trend = ErrorTrend(options.tolerance)
    for reached in em(e_step, controller, state):
        state = reached
        saved, directions = e_step.saved(state)
        now = told._replace(state=saved, directions=directions)
        trend.note(state)
        left = trend.seconds_left() if state.number > 1 else inf
        if watch.on_step(state.statistics if state.fresh else None, now, left) and not (
            is_done(e_step, controller, state) and trend.is_exact
        ):
            report("log", str(trend))
            return e_step.cut_short(state)._replace(complete=False)
    return e_step.posterior(state)


@contextmanager
def _memory_explained(problem: Problem, num_samples: int) -> Iterator[None]:
    """Raise an out-of-memory error that names the sizes and a remedy."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        shortage = shortage_of(error)
    else:
        return
    block = num_samples * problem.size * problem.dtype.itemsize
    raise DoesNotFit(
        f"Out of memory on {problem.device}, outside of the passes over the data ({shortage}). "
        f"{num_samples} samples of {problem.size:,} parameters need {size_of(block)}; a fit needs "
        f"up to {VECTORS} times as much, and a span of directions. Use fewer samples (num_samples); "
        'fewer parameters in the posterior (parameters="last_layer", or name patterns); vectors on '
        'the CPU (compute=Compute(vectors="cpu")); a smaller span '
        "(solver=BlockKrylov(memory=bytes)); or BlockCG() instead of FunctionSpace()."
    )


def _check_start(start: Tensor | None, options: FitOptions, blocks: int) -> None:
    shapes = ((), (blocks,)) if options.layerwise else ((),)
    if start is not None and start.shape not in shapes:
        raise ValueError(
            f"prior_precision has shape {tuple(start.shape)}, but the prior has "
            f"{f'{blocks} tensors' if options.layerwise else 'one precision'}: pass one number"
            f"{', or one per tensor' if options.layerwise else ''}."
        )
