"""The loop around an iteration: its true residual decides, and it starts again from it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.solvers.solution import DivergenceError, Solution, energies
from torch_lla_em.solvers.space import dots

logger = logging.getLogger("torch_lla_em")

Product = Callable[[Tensor], Tensor]


class Task(NamedTuple):
    """(A + I) X = B, and where X starts (0 if None)."""

    product: Product
    b: Tensor
    start: Tensor | None

    image: Tensor | None = None
    """A times the start, where it is known."""

    original: Callable[[Tensor], Tensor] | None = None
    """Where x is preconditioned: the map back, since energies are those of what it stands for."""

    def energies(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return ⟨x, A x⟩ in the original coordinates, shape (K,)."""
        energy = energies(x, self.b, residual)
        if self.original is None:
            return energy
        before = self.original(x)
        return (energy + dots(x, x) - dots(before, before)).clamp_min(0)

    def judge(self, x: Tensor, residual: Tensor, passes: int, tolerance: float) -> Solution:
        """Return the record of x, with its true residual."""
        solution = Solution.of(x, self.b, residual, passes, tolerance)
        if self.original is None:
            return solution
        solution = solution._replace(energy=self.energies(x, residual))
        return solution._replace(converged=solution.error <= tolerance)


Descend = Callable[[Task, Solution, Tensor], tuple[Tensor, int]]
"""(task, solution so far, its residual) -> a better x and the products it took."""


def solve_with_restarts(
    name: str, task: Task, limits: tuple[float, int], descend: Descend
) -> Solution:
    """Improve x until its true residual meets the tolerance, stops falling, or passes run out."""
    product, b, start, image = task[:4]
    tolerance, max_passes = limits
    x, residual, passes, last = torch.zeros_like(b), b, 0, float("inf")
    if start is not None and image is not None:
        x, residual = start, (b - start).sub_(image)
    elif start is not None:
        x, residual, passes = start, _residual(task, start), 1
    while True:
        solution = task.judge(x, residual, passes, tolerance)
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
        residual, passes = _residual(task, x), passes + used + 1


def _residual(task: Task, x: Tensor) -> Tensor:
    return (task.b - task.product(x)).sub_(x)
