"""What every solver is given and returns, how it fails, and how it starts again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.solvers.operator import Operator

logger = logging.getLogger("torch_lla_em")


class DivergenceError(ArithmeticError):
    """A solve grew instead of settling; nothing of it is kept."""


class FaultyProductError(ArithmeticError):
    """The product is not symmetric or not positive semi-definite: J and Jᵀ disagree."""


class Solution(NamedTuple):
    """x with (A + I) x = b up to its true residual r = b - (A + I) x, recomputed at the end."""

    x: Tensor
    """(K, P)."""

    certificate: Tensor
    """‖r_k‖, shape (K,): a bound on ‖x - x*‖ in the norm of A + I, since A ≥ 0."""

    energy: Tensor
    """⟨x_k, A x_k⟩, shape (K,)."""

    relative_residual: float
    """‖r‖ / ‖b‖ over the whole block."""

    passes: int
    """Products with A that it took."""

    converged: bool
    """Whether the error met the tolerance."""

    image: Tensor
    """A x, as the true residual tells it, shape (K, P)."""

    @property
    def error(self) -> float:
        """√(mean ‖r‖² / max(1, mean ⟨x, A x⟩)): bounds the relative error of J x on the data."""
        return relative_error(self.certificate, self.energy)


class Task(NamedTuple):
    """(A + I) X = B, and where X starts (0 if None)."""

    product: Operator
    b: Tensor
    start: Tensor | None = None

    image: Tensor | None = None
    """A times the start, where it is known."""

    original: Callable[[Tensor], Tensor] | None = None
    """Where x is preconditioned: the map back, since energies are those of what it stands for."""

    def residual(self, x: Tensor) -> Tensor:
        """Return B - (A + I) X, from a product."""
        return (self.b - self.product(x)).sub_(x)

    def energies(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return ⟨x, A x⟩ in the original coordinates, shape (K,), without another product."""
        dots = self.product.space.dots
        before = x if self.original is None else self.original(x)
        return (dots(x, self.b) - dots(x, residual) - dots(before, before)).clamp_min(0)

    def judge(self, x: Tensor, residual: Tensor, passes: int, tolerance: float) -> Solution:
        """Return the record of x, with its true residual."""
        dots = self.product.space.dots
        certificate, energy = dots(residual, residual).sqrt(), self.energies(x, residual)
        relative = (certificate.norm() / dots(self.b, self.b).sum().sqrt()).nan_to_num().item()
        converged = relative_error(certificate, energy) <= tolerance
        image = (self.b - x).sub_(residual)
        return Solution(x, certificate, energy, relative, passes, converged, image)


Descend = Callable[[Task, Solution, Tensor], tuple[Tensor, int]]
"""(task, solution so far, its residual) -> a better x and the products it took."""


def solve_with_restarts(
    name: str, task: Task, limits: tuple[float, int], descend: Descend
) -> Solution:
    """Improve x until its true residual meets the tolerance, stops falling, or passes run out."""
    b, start, image = task.b, task.start, task.image
    tolerance, max_passes = limits
    x, residual, passes, last = torch.zeros_like(b), b, 0, float("inf")
    if start is not None and image is not None:
        x, residual = start, (b - start).sub_(image)
    elif start is not None:
        x, residual, passes = start, task.residual(start), 1
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
        residual, passes = task.residual(x), passes + used + 1


def relative_error(certificate: Tensor, energy: Tensor) -> float:
    """Return √(mean certificate² / max(1, mean energy)).

    Below an energy of 1 the certificate itself counts: then it already bounds the error at
    any input by ``tolerance`` posterior standard deviations.
    """
    return (certificate.square().mean() / energy.mean().clamp_min(1.0)).sqrt().item()


def check_positive(owner: str, **options: float) -> None:
    """Raise where a solver's option is not above 0."""
    for name, value in options.items():
        if not value > 0:
            raise ValueError(f"{owner}: {name} must be above 0, not {value}.")
