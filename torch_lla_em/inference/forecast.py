"""The time and memory of a fit, before it and after each step, and what it reaches in its budget of time.

The numbers of passes were measured on fits of perceptrons, CNNs and transformers with 2 to 100 classes and 4 to
64 samples (``benchmarks/forecast.py``, which compares forecasts with fits): the more parameters the data
determine, the more passes, as with many classes or overfitted networks. They depend on the spectrum of the
GGN, which is not known before the fit, so a forecast is a range.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch_lla_em.data import Batch, tensors_in
from torch_lla_em.inference.controller import EACH
from torch_lla_em.inference.expectations import draws_for, entries_of
from torch_lla_em.inference.options import FitOptions, has_one_noise, has_too_large_blocks
from torch_lla_em.inference.records import State, Statistics
from torch_lla_em.inference.span_outputs import most_stored
from torch_lla_em.jacobian import LinearModel, ParameterLayout, called_last, select_parameters
from torch_lla_em.problem import KEPT_OUTPUTS, Duration, Memory, Plan, Problem, Trial, tried
from torch_lla_em.runtime import suppressed

_START = 3.0
"""Error of the samples after the first pass, in posterior standard deviations."""

_PASSES = {True: ((1.0, 1.2), (3.0, 3.8)), False: ((1.0, 2.0), (4.0, 5.0))}
"""Fewest and most passes until the samples are accurate, if H moves and if it is fixed: a constant,
and a factor of log(error / tolerance)."""

_SETTLED = (1.0, 0.6), (1.0, 2.5)
"""The same once the prior precision has converged."""

_BY_SOLVES = 15.0, 250.0
"""Products of a fit that solves linear systems for each prior precision."""

_MEASURED, _IMPORTS = (0.8, 1.8), 1.0
"""Relative error of times that are computed from a trial, and seconds of imports in a first fit."""

_ROUNDS = 2, EACH
"""Fewest and most steps of H after an extension of the span."""

_TO_REST = 5, 80
"""Fewest and most steps of H once the span has all parameters."""

_EIGENVECTORS, _PUSHES, _AVERAGES, _COMBINED = 25.0, 8.0, 8.0, 16.0
"""Multiplications of an eigendecomposition relative to m³, products with J V of a step of H, averages over
functions of one, and the time of products with V in an extension of the span, which wait for memory."""

_OF_PRODUCT, _OF_ROOT = 20.0, 100.0
"""Multiplications that the products of one function's H and its root with a number take as long as; they wait for
memory. Measured for 20,000 examples with 100 classes."""

_TYPICAL, _VECTORS, _GATHERED, _BASE = {True: 0.66, False: 0.85}, 0.5, 2.0, 1.5e7
"""For the memory that is expected: the passes as a share of the most, if H moves and if it is fixed, the share
of the vectors of the plan that are held at once, copies of a batch's Jacobian factors while they are computed,
and bytes for the rest. Of 13 fits whose peaks were 20 MB to 1.6 GB, forecasts are .89 to 1.63 of the peak."""

_LARGEST = 3.5
"""Passes for the upper bound on the memory, relative to those that are expected; of those fits none had more
than 1.6."""

_COPIES, _BLOCKS, _PASSED = 2, 3, 4
"""Copies of J V and of H at the peak, and activations of a batch without factors."""

_OF_SAMPLES = 6
"""Numbers for each sample and output that a fit of a last layer holds at once, beside J V."""

_FEW_SAMPLES = 8
"""Number of samples of the cheaper fit that is recommended."""

_STEPS = 4
"""Number of the last steps whose pace is expected of the next ones."""

_ROUGH = 0.5
"""Error relative to posterior standard deviations above which variances should not be used."""


class Course(NamedTuple):
    """What the number of passes of a fit depends on."""

    by_span: bool
    """Whether it works in a span of directions; otherwise it solves linear systems."""

    moves: bool
    """Whether H is an expectation under the posterior."""

    rounds: tuple[int, int]
    """Fewest and most evaluations of H at a linear mode, each of which takes EM anew."""

    options: FitOptions

    keeps_functions: bool = False
    """Whether H is stored as outputs of functions, and not in (C, C) blocks."""

    by_features: bool = False
    """Whether J V is computed from features of a last layer, once it is too large to be stored."""

    most_stored: float = math.inf
    """Largest number of entries of J V that are stored and not computed from features."""

    @classmethod
    def of(cls, problem: Problem, options: FitOptions, classes: int, free: float) -> Course:
        """Return the course of a fit, given the free memory."""
        quadratic = problem.likelihood.is_quadratic
        too_large = has_too_large_blocks(problem.likelihood, classes)
        moves = not too_large and not quadratic and options.allows_variational
        span = options.has_default_solver and not options.layerwise and has_one_noise(problem)
        rounds = (2, 5) if options.curvature == "linear" and not quadratic else (1, 1)
        keeps = problem.likelihood.keeps_functions(classes)
        most = most_stored(options.memory_of_span(free), problem.dtype.itemsize)
        return cls(span, moves, rounds, options, keeps, problem.linear_model.is_last_layer, most)

    def passes(self, error: float, settled: bool = False) -> list[float]:
        """Return the fewest and the most passes until the samples are accurate."""
        x = max(0.0, math.log(max(error, 1e-30) / self.options.tolerance))
        rates = _SETTLED if settled else _PASSES[self.moves]
        return [constant + slope * x for constant, slope in rates]


def time_of(trial: Trial, course: Course, num_rows: float, kept: float) -> Duration:
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
        seconds += sum(_over_span(trial, course, num_rows, n, _ROUNDS[i]) for n in sizes)
        if count > whole and course.moves:
            seconds += _over_span(trial, course, num_rows, trial.weights, _TO_REST[i])
        ends.append(course.rounds[i] * seconds)
    low, high = (part * (first + end) for part, end in zip(_MEASURED, ends))
    return Duration(low, high + _IMPORTS)


def _over_span(trial: Trial, course: Course, num_rows: float, size: int, rounds: int) -> float:
    """Return the seconds of the linear algebra after an extension of the span to this size."""
    values, K = num_rows * trial.outputs, trial.num_samples + 1
    share = _share_of_sites(trial, num_rows)
    values, eigenvectors = share * values, _EIGENVECTORS * float(size) ** 3
    flops = _PUSHES * values * size * K + eigenvectors + _COMBINED * size * K * trial.weights
    if not course.moves:
        return flops * trial.flop
    functions = 2 * draws_for(num_rows, course.keeps_functions)  # with their mirror images
    of_H, of_J = float(trial.classes), 0.0
    if course.keeps_functions:
        of_H = _OF_PRODUCT * functions
        flops += rounds * _OF_ROOT * functions * values * K
    if course.by_features and values * size > course.most_stored:
        of_J = trial.weights / trial.classes
    flops += rounds * (values * size * (size + of_H + of_J) + eigenvectors)
    likelihood = share * num_rows * trial.functions / 3
    return flops * trial.flop + rounds * _AVERAGES * functions * likelihood


def memory_of(problem: Problem, trial: Trial, course: Course, plan: Plan, rows: float) -> Memory:
    """Return the peak memory of a fit to so many examples, beyond what is held before it."""
    model = problem.linear_model
    itemsize, P, K = problem.dtype.itemsize, trial.weights, trial.num_samples
    first, limits = problem.data.first(), problem.sweep.limits
    joined = max(len(first.rows), problem.data.merge_rows)
    at_once = min(rows, joined, limits.batch_rows, limits.rows)
    batches = rows * sum(tensor.nbytes for tensor in tensors_in(first.tensors())) / len(first.rows)
    outputs = rows * trial.outputs * _share_of_sites(trial, rows)
    of_batch = _PASSED * at_once * plan.activations
    factors = 0.0
    if trial.kept_bytes < math.inf:
        of_batch = _GATHERED * at_once * trial.kept_bytes
        factors = min(plan.factors, rows * trial.kept_bytes)
    rest = min(plan.batches, batches) + factors + of_batch + _BASE
    if not course.by_span:
        return Memory(_VECTORS * plan.vectors + rest, plan.vectors + 2 * rest)

    def of_span(size: float) -> float:
        if not model.is_last_layer:
            return size * (P + _COPIES * outputs) * itemsize
        # weights, their products with features up to a limit, and numbers for each sample and output
        return (
            size * 3 * P + min(size * outputs, course.most_stored) + _OF_SAMPLES * K * outputs
        ) * itemsize

    entries = entries_of(problem.likelihood, trial.classes, outputs / trial.classes)
    blocks = _BLOCKS * outputs * entries * itemsize if course.moves else 0.0
    size = _TYPICAL[course.moves] * course.passes(_START)[1] * (K + 1)
    room = course.options.memory_of_span(plan.free)
    expected, largest = (min(room, of_span(min(P, n))) for n in (size, _LARGEST * size))
    expected += _VECTORS * plan.vectors + blocks + rest
    return Memory(expected, max(expected, largest + plan.vectors + 2 * (blocks + rest)))


def _share_of_sites(trial: Trial, num_rows: float) -> float:
    """Return the share of the sites of an example at which J V and H are known."""
    if trial.outputs <= trial.classes:
        return 1.0
    return min(1.0, KEPT_OUTPUTS / max(num_rows * trial.outputs, 1.0))


def time_left(course: Course, seconds: Sequence[float], state: State, weights: int) -> Duration:
    """Return how long a fit of so many weights still takes, given the seconds of its EM steps so far."""
    last, count, taken = seconds[-1], len(seconds), state.number
    low, high = 1 / _MEASURED[1], _MEASURED[1]
    if not course.by_span:
        return Duration(low * min(seconds), high * max(1, course.options.em_steps - taken) * last)
    error = _START if state.statistics is None else state.statistics.error
    whole = weights / (course.options.num_samples + 1) - count + 1
    fewest, most = (min(n, max(1.0, whole)) for n in course.passes(error, state.converged))
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
                by_features = course._replace(by_features=True)
                found['parameters="last_layer"'] = time_of(trial, by_features, num_rows, math.inf)
    if options.num_samples > _FEW_SAMPLES:
        few = replace(options, num_samples=_FEW_SAMPLES)
        trial = tried(problem, first, _FEW_SAMPLES)
        if trial is not None:
            kept = problem.sweep.factors.room
            words = f"num_samples={_FEW_SAMPLES}"
            found[words] = time_of(trial, course._replace(options=few), num_rows, kept)
    return found


class ErrorTrend:
    """Notes the error after every step; as a string it is the warning of a fit that ends early."""

    def __init__(self, tolerance: float):
        self._tolerance = tolerance
        self._times: list[float] = []
        self._errors: list[float] = []
        self._state: State | None = None

    def note(self, state: State) -> None:
        """Note the state after a step."""
        self._state = state
        self._times.append(time.monotonic())
        self._errors.append(max(_found(state).error, 1e-300))

    @property
    def is_exact(self) -> bool:
        """Whether samples and mean are within the tolerance."""
        return self._errors[-1] <= self._tolerance

    def seconds_left(self) -> float:
        """Return the seconds to the tolerance if the error decreases as in the last steps, else infinity."""
        if self.is_exact:
            return 0.0
        errors, times = self._errors[-_STEPS:], self._times[-_STEPS:]
        fall = math.log(errors[0] / errors[-1])
        if fall <= 0:
            return math.inf
        return (times[-1] - times[0]) * math.log(errors[-1] / self._tolerance) / fall

    def __str__(self) -> str:
        state, left = self._state, self.seconds_left()
        if state is None or state.before is None:
            return "The budget is spent."
        found, number = _found(state), len(self._errors)
        words = (
            f"The budget of the fit is spent after {number} step{'s' * (number > 1)}. The numerical error of the "
            f"samples is {found.sample_error:.2g} posterior standard deviations, and that of the mean "
            f"{found.mode_error:.2g} (tolerance {self._tolerance:.2g})."
        )
        if state.converged:
            words += " The prior precision has converged."
        else:
            changed = state.change(": it changed by a factor of %s in the last step")
            words += f" The prior precision has not converged{changed}."
        if found.sample_error > _ROUGH:
            words += " Do not use the variances yet."
        if left == math.inf:
            words += " The time that is still needed is not known."
        elif left:
            least = "about" if state.converged else "at least"
            words += f" To reach the tolerance, {least} {left:.2g} s more are needed."
        return words + " With a `checkpoint` folder, the same call of fit continues from here."


def _found(state: State) -> Statistics:
    """Return the result of the last E-step of a state after a step."""
    found: Any = state.statistics
    known: Statistics = found
    return known
