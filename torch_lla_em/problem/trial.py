"""Times the work of a fit on a few examples, before the fit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import Batch
from torch_lla_em.jacobian import Rows
from torch_lla_em.problem.curvature import RowSquares
from torch_lla_em.problem.problem import Problem
from torch_lla_em.runtime import is_shortage, release

_FEW, _GROWTH, _SECONDS, _MOST = 8, 4, 0.02, 0.5
"""The first number of examples that are timed, the factor by which it grows, and the seconds after which it does
not: those of a number, and those of the first, since small batches of convolutions and attention take up to
four times as long for each example."""

_REPEATS, _ENOUGH = 3, 0.15
"""Number of times of which the shortest counts, because the first is slower and other programs may use the
machine, and the seconds after which none is added."""

_FUNCTIONS, _MATRIX = 16, (4096, 128, 32)
"""Functions for which the likelihood is timed, and sizes of the matrix product that is timed."""


class Duration(NamedTuple):
    """A range of seconds; ``str`` returns it in words.

    Example:
        >>> str(Duration(20.0, 70.0))
        '20 s to 1.2 min'
    """

    low: float
    high: float

    @property
    def middle(self) -> float:
        """The geometric mean of both ends, of which the first counts as a quarter of the last at least."""
        return (max(self.low, self.high / 4) * self.high) ** 0.5

    def after(self, seconds: float) -> Duration:
        """Return what is left after some seconds: a third of them at least, if it takes longer than forecast."""
        return Duration(max(0.0, self.low - seconds), max(seconds / 3, self.high - seconds))

    def within(self, limit: float) -> Duration:
        """Return the range if it ends after ``limit`` seconds at the latest."""
        return Duration(min(self.low, limit), min(self.high, limit))

    def __str__(self) -> str:
        low, high = self.low, self.high
        if low < 1:
            return "about 1 s" if high < 2 else f"up to {_in_words(high)}"
        size, unit = next((size, unit) for size, unit in _UNITS if high >= size)
        if low < size:
            return f"{_in_words(low)} to {_in_words(high)}"
        ends = [_two_digits(end / size) for end in (low, high)]
        return f"about {ends[0]} {unit}" if ends[0] == ends[1] else f"{' to '.join(ends)} {unit}"


_UNITS = (86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s")


def _in_words(seconds: float) -> str:
    """Return seconds with a unit, to two digits."""
    size, unit = next((size, unit) for size, unit in _UNITS if seconds >= size)
    return f"{_two_digits(seconds / size)} {unit}"


def _two_digits(value: float) -> str:
    return f"{round(value)}" if value >= 10 else f"{value:.2g}"


class Trial(NamedTuple):
    """What the parts of a fit take in seconds, as measured on a few examples."""

    read: float
    """Outputs and Jacobian factors of an example."""

    product: float
    """J w and Jᵀu of an example, for K + 1 columns each."""

    squares: float
    """The squared features of an example, which the first pass sums up."""

    functions: float
    """H, loss and gradient of the likelihood, for an example under one function."""

    flop: float
    """A multiplication in a product of matrices."""

    outputs: int
    """The number of outputs of an example."""

    classes: int
    """C, the size of their last axis."""

    weights: int
    """P."""

    num_samples: int
    """K."""

    kept_bytes: float
    """Bytes of the Jacobian factors of an example; infinity if they are computed in every pass."""


def tried(problem: Problem, first: Batch, num_samples: int, squares: bool = True) -> Trial | None:
    """Time products, the likelihood and a product of matrices on some of the first examples.

    Two numbers of examples show what a batch costs beside its examples. Returns None if that fails:
    the fit itself explains errors of networks and likelihoods.
    """
    try:
        with problem.linear_model.network.guarded():
            few = next(first.split(_FEW))
            short = found = _timed(problem, few, num_samples, squares)
            n = fewest = len(few.rows)
            enough = _MOST
            while _taken(found) < enough and n < len(first.rows):
                few = next(first.split(_GROWTH * n))
                if len(few.rows) == n:
                    break
                found, n, enough = (
                    _timed(problem, few, num_samples, squares),
                    len(few.rows),
                    _SECONDS,
                )
    except Exception as error:
        if is_shortage(error):
            release()
        return None
    sweep = problem.sweep
    whole = max(len(first.rows), problem.data.merge_rows)
    size = max(1.0, min(whole, sweep.limits.batch_rows, sweep.limits.rows))
    each = {}
    for name in ("read", "product", "squares", "functions"):
        many, own = getattr(found, name), getattr(short, name)
        slope = (many - own) / (n - fewest) if n > fewest else many / n
        slope = min(max(slope, 0.1 * many / n), many / n)
        each[name] = slope + (many - slope * n) / max(size, n)
    return found._replace(**each)


def _taken(found: Trial) -> float:
    return found.read + found.product + found.squares


def _timed(problem: Problem, few: Batch, K: int, squares: bool) -> Trial:
    """Return what these examples take together."""
    model = problem.linear_model
    device = model.network.device
    w = torch.ones(K + 1, model.layout.size, dtype=model.dtype, device=device)
    wait: Callable[..., Any] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    kept = torch.inf

    def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
        wait()
        began = perf_counter()
        result = work()
        wait()
        return perf_counter() - began, result

    def once() -> list[float]:
        nonlocal kept
        read, rows = seconds(partial(_read, problem, few, K))
        product, (Jw, total) = seconds(partial(_product, rows, w))
        of_squares = seconds(partial(_squares, problem, rows, Jw, total))[0] if squares else 0.0
        of_functions, _ = seconds(partial(_functions, problem, few, rows.f))
        a, b, c = _MATRIX
        left, right = w.new_ones(a, b), w.new_ones(b, c)
        matrices, _ = seconds(lambda: left @ right)
        kept = rows.nbytes / len(few.rows)
        return [read, product, of_squares, of_functions / _FUNCTIONS, matrices / (a * b * c)]

    f = _read(problem, few, K).f
    if device.type == "cuda":
        once()  # kernels are chosen and loaded
    runs = [once()]
    while len(runs) < _REPEATS and sum(map(sum, runs)) < _ENOUGH:
        runs.append(once())
    shortest = [min(times) for times in zip(*runs)]
    classes = f.shape[-1] if f.dim() > 1 else 1
    return Trial(*shortest, f[0].numel(), classes, model.layout.size, K, kept)  # type: ignore[call-arg]


def _read(problem: Problem, few: Batch, K: int) -> Rows:
    model = problem.linear_model
    rows = model.at(few.inputs, K + 1, model.factored is not None)
    rows.f  # noqa: B018
    return rows


def _product(rows: Rows, w: Tensor) -> tuple[Tensor, Tensor]:
    Jw, total = rows.push(w), torch.zeros_like(w)
    rows.pull(Jw, total)
    return Jw, total


def _squares(problem: Problem, rows: Rows, Jw: Tensor, total: Tensor) -> None:
    squares_of = RowSquares(problem.linear_model, len(Jw))
    noise = squares_of.columns(torch.arange(len(Jw), device="cpu"), rows.f)
    squares_of(rows, Jw if noise is None else noise.contiguous(), total)


def _functions(problem: Problem, few: Batch, f: Tensor) -> None:
    likelihood = problem.likelihood
    if likelihood.is_quadratic:
        return
    targets = likelihood.align(few.targets, problem.linear_model.network.class_dim)
    several = f.expand(_FUNCTIONS, *f.shape).contiguous()
    if not likelihood.keeps_functions(f.shape[-1]):
        likelihood.expected_hessian(several)
    likelihood.log_prob(several, targets)
    likelihood.gradient(several, targets)
