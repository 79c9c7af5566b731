"""How long a fit takes: a range, from timed products and from the course of other fits.

The numbers of passes were measured on fits of perceptrons, CNNs and transformers with 4 to 64 samples
(``benchmarks/forecast.py``, which compares forecasts with fits). They depend on the spectrum of the
GGN, which is not known before the fit, so a forecast is a range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch_lla_em.data import Batch
from torch_lla_em.inference.learn import Progress
from torch_lla_em.inference.options import MOST_OUTPUTS, FitOptions, has_one_noise
from torch_lla_em.inference.over_span import DRAWS, DRAWS_IN_ALL, FEWEST_DRAWS
from torch_lla_em.jacobian import LinearModel, ParameterLayout, called_last, select_parameters
from torch_lla_em.problem import KEPT_OUTPUTS, Duration, Problem, Trial, tried
from torch_lla_em.runtime import suppressed

_START = 3.0
"""Error of the samples after the first pass, in posterior standard deviations."""

_PASSES = {True: ((1.0, 1.0), (3.0, 2.8)), False: ((1.0, 2.0), (4.0, 5.0))}
"""Fewest and most passes until the samples are accurate, if H moves and if it is fixed: a constant,
and a factor of log(error / tolerance)."""

_SETTLED = (1.0, 0.6), (1.0, 2.5)
"""The same once the prior precision has converged."""

_BY_SOLVES = 15.0, 250.0
"""Products of a fit that solves linear systems for each prior precision."""

_MEASURED, _IMPORTS = (0.9, 1.8), 1.0
"""Relative error of times that are computed from a trial, and seconds of imports in a first fit."""

_ROUNDS, _TO_REST = 2, (5, 80)
"""Rounds of H after an extension of the span, and once it spans all parameters."""

_EIGENVECTORS, _PUSHES, _AVERAGES = 25.0, 8.0, 8.0
"""Multiplications of an eigendecomposition relative to m³, products with J V of a round, and averages
over functions of a round."""

_FEW_SAMPLES = 8
"""Number of samples of the cheaper fit that is recommended."""


class Course(NamedTuple):
    """What the number of passes of a fit depends on."""

    by_span: bool
    """Whether it works in a span of directions; otherwise it solves linear systems."""

    moves: bool
    """Whether H is an expectation under the posterior."""

    rounds: tuple[int, int]
    """Fewest and most evaluations of H at a linear mode, each of which takes EM anew."""

    options: FitOptions

    @classmethod
    def of(cls, problem: Problem, options: FitOptions, classes: int) -> Course:
        """Return the course of a fit."""
        quadratic = problem.likelihood.is_quadratic
        moves = classes <= MOST_OUTPUTS and not quadratic and options.allows_variational
        span = options.has_default_solver and not options.layerwise and has_one_noise(problem)
        rounds = (2, 5) if options.curvature == "linear" and not quadratic else (1, 1)
        return cls(span, moves, rounds, options)

    def passes(self, error: float, settled: bool = False) -> list[float]:
        """Return the fewest and the most passes until the samples are accurate."""
        x = max(0.0, math.log(max(error, 1e-30) / self.options.tolerance))
        rates = _SETTLED if settled else _PASSES[self.moves]
        return [constant + slope * x for constant, slope in rates]


def forecast(trial: Trial, course: Course, num_rows: float, kept: float) -> Duration:
    """Return how long a fit takes; ``kept`` are the bytes that Jacobian factors may use."""
    first = num_rows * (trial.read + trial.squares + 0.5 * trial.product)
    is_kept = trial.kept_bytes * num_rows <= kept
    each = num_rows * (trial.product + (0.0 if is_kept else 2 * trial.read))
    K, whole, ends = trial.num_samples, trial.weights / (trial.num_samples + 1), []
    for i, count in enumerate(course.passes(_START)):
        if not course.by_span:
            ends.append(_BY_SOLVES[i] * each)
            continue
        steps = math.ceil(min(count, whole + 1))
        sizes = [min(n * (K + 1), trial.weights) for n in range(1, steps + 1)]
        seconds = steps * each
        seconds += sum(_over_span(trial, course.moves, num_rows, n, _ROUNDS) for n in sizes)
        if count > whole and course.moves:
            seconds += _over_span(trial, True, num_rows, trial.weights, _TO_REST[i])
        ends.append(course.rounds[i] * seconds)
    low, high = (part * (first + end) for part, end in zip(_MEASURED, ends))
    return Duration(low, high + _IMPORTS)


def _over_span(trial: Trial, moves: bool, num_rows: float, size: int, rounds: int) -> float:
    """Return the seconds of the linear algebra after an extension of the span to this size."""
    values, K = num_rows * trial.outputs, trial.num_samples + 1
    share = 1.0
    if trial.outputs > trial.classes:  # of the sites, at which J V and H are known
        share = min(1.0, KEPT_OUTPUTS / max(values, 1.0))
    values, eigenvectors = share * values, _EIGENVECTORS * float(size) ** 3
    flops = _PUSHES * values * size * K + eigenvectors
    if not moves:
        return flops * trial.flop
    flops += rounds * (values * size * (size + trial.classes) + eigenvectors)
    draws = min(
        DRAWS, max(FEWEST_DRAWS, DRAWS_IN_ALL / max(num_rows, 1))
    )  # and their mirror images
    functions = share * num_rows * trial.functions / 3
    return flops * trial.flop + rounds * _AVERAGES * 2 * draws * functions


def remaining(course: Course, seconds: Sequence[float], progress: Progress) -> Duration:
    """Return how long a fit still takes, given the seconds of its EM steps so far."""
    state, last, count = progress.state, seconds[-1], len(seconds)
    low, high = 1 / _MEASURED[1], _MEASURED[1]
    taken = 0 if state is None else state.number
    if not progress.by_span:
        return Duration(low * min(seconds), high * max(1, course.options.em_steps - taken) * last)
    settled = state is not None and state.converged
    error = _START if state is None or state.statistics is None else state.statistics.error
    whole = progress.scale.numel() / (course.options.num_samples + 1) - count + 1
    course = course._replace(moves=progress.moves)
    fewest, most = (min(n, max(1.0, whole)) for n in course.passes(error, settled))
    growth = max(0.0, last - seconds[0]) / max(1, count - 1)
    return Duration(low * fewest * last, high * most * (last + 0.5 * growth * most))


def cheaper(problem: Problem, first: Batch, course: Course, num_rows: float) -> dict[str, Duration]:
    """Return how long fits take that are cheaper than one with these options, by what to change."""
    found, options = {}, course.options
    network = problem.linear_model.network
    with suppressed():
        names = select_parameters(
            network.module, "last_layer", called_last(network, next(first.split(1)).inputs)
        )
        if set(names) < set(problem.layout.names):
            layout = ParameterLayout.of(network.module, names)
            last = Problem(LinearModel(network, layout), problem.likelihood, problem.data)
            last.sweep.probe(first)
            trial = tried(last, first, options.num_samples)
            if trial is not None:
                found['parameters="last_layer"'] = forecast(trial, course, num_rows, math.inf)
    if options.num_samples > _FEW_SAMPLES:
        few = replace(options, num_samples=_FEW_SAMPLES)
        trial = tried(problem, first, _FEW_SAMPLES)
        if trial is not None:
            kept = problem.sweep.kept.room
            words = f"num_samples={_FEW_SAMPLES}"
            found[words] = forecast(trial, course._replace(options=few), num_rows, kept)
    return found
