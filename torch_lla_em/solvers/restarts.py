"""The loop around an iteration: its true residual decides, and it starts again from it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.solvers.solution import DivergenceError, Solution

logger = logging.getLogger("torch_lla_em")

Product = Callable[[Tensor], Tensor]


class Task(NamedTuple):
    """(A + I) X = B, and where X starts (0 if None)."""

    product: Product
    b: Tensor
    start: Tensor | None


Descend = Callable[[Task, Solution, Tensor], tuple[Tensor, int]]
"""(task, solution so far, its residual) -> a better x and the products it took."""


def solve_with_restarts(name: str, task: Task, limits: tuple[float, int], descend: Descend) -> Solution:
    """Improve x until its true residual meets the tolerance, stops falling, or passes run out."""
    product, b, start = task
    tolerance, max_passes = limits
    x, residual, passes, last = torch.zeros_like(b), b, 0, float("inf")
    if start is not None:
        x, residual, passes = start, b - start - product(start), 1
    while True:
        solution = Solution.of(x, b, residual, passes, tolerance)
        error = solution.error
        if not error < float("inf") or error > 1e3 * max(1.0, last):
            raise DivergenceError(
                f"{name} diverged after {passes} passes: the error grew from {last:.1e} to "
                f"{error:.1e}. Check that the model's outputs and weights are finite, and that "
                "they are the same at every call."
            )
        if solution.converged or passes >= max_passes:
            return solution
        if error > 0.5 * last:
            logger.warning(
                "%s stagnates at an error of %.1e: %s arithmetic allows no better, or the model "
                "changes from call to call. Loosen `tolerance`, or convert the model and its "
                "data to float64.",
                name,
                error,
                x.dtype,
            )
            return solution
        last = error
        x, used = descend(task, solution, residual)
        residual, passes = b - x - product(x), passes + used + 1
