"""Block conjugate gradients: all right-hand sides share one Krylov space."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_lla_em.solvers.operator import Operator
from torch_lla_em.solvers.solution import (
    DivergenceError,
    Solution,
    Task,
    check_positive,
    relative_error,
    symmetric,
)
from torch_lla_em.solvers.space import add_combined, combine

# products without a tenth off the residual: longer plateaus are rounding
_PATIENCE = 50
_STAGNATES = (
    "Block CG stagnates at an error of %.1e: %s arithmetic allows no better, or the model changes "
    "from call to call. Loosen `tolerance`, or convert the model and its data to float64."
)

logger = logging.getLogger("torch_lla_em")


@dataclass(frozen=True)
class BlockCG:
    """Solve (A + I) X = B for all rows of B at once, one product with A an iteration.

    The residual is kept as coefficients times an orthonormal basis (Dubrulle's QR form),
    whose directions leave when columns converge or become dependent. After convergence
    the true residual decides; where it disagrees, the iteration starts again from it.
    """

    tolerance: float = 1e-2
    """Bound on √(mean ‖r‖² / max(1, mean ⟨x, A x⟩)), the relative error of J x."""

    max_passes: int = 200
    """Products with A after which it stops, with a warning."""

    deflate: bool = True
    """Whether EM preconditions its solves by what one Krylov basis knows of G."""

    def __post_init__(self) -> None:
        check_positive("BlockCG", tolerance=self.tolerance, max_passes=self.max_passes)

    def solve(
        self,
        product: Operator,
        b: Tensor,
        start: Tensor | None = None,
        image: Tensor | None = None,
    ) -> Solution:
        """Return X, found from ``start`` or 0; ``image``, A start where known, saves a product."""
        return self.run(Task(product, b, start, image))

    def run(self, task: Task) -> Solution:
        """Improve x until its true residual meets the tolerance, stops falling, or passes end."""
        b, x, passes, last = task.b, task.start, 0, float("inf")
        if x is None:
            x, residual = torch.zeros_like(b), b
        elif task.image is not None:
            residual = (b - x).sub_(task.image)
        else:
            residual, passes = task.residual(x), 1
        while True:
            solution = task.judge(x, residual, passes, self.tolerance)
            error = solution.error
            if not error < float("inf") or error > 1e3 * max(1.0, last):
                raise DivergenceError(
                    f"Block CG diverged after {passes} passes: the error grew from {last:.1e} to "
                    f"{error:.1e}. Check that the model's outputs and weights are finite, and "
                    "that they are the same at every call."
                )
            if solution.converged or passes >= self.max_passes:
                return solution
            if error > 0.5 * last:
                logger.warning(_STAGNATES, error, x.dtype)
                return solution
            last = error
            x, used = self.descend(task, solution, residual)
            residual, passes = task.residual(x), passes + used + 1

    def descend(self, task: Task, solution: Solution, residual: Tensor) -> tuple[Tensor, int]:
        """Improve x until its residual, by recursion, meets the tolerance or ceases to fall."""
        product, space = task.product, task.product.space
        x, budget = solution.x.clone(), self.max_passes - solution.passes - 1
        basis, coefficients = space.orthonormalise(residual)
        directions, passes, best = basis, 0, (coefficients.norm(), 0)
        while len(basis) and passes < budget:
            image = directions + product(directions)
            passes += 1
            curvature = space.gram(directions, image)
            rounding = 1e3 * torch.finfo(x.dtype).eps * x.shape[1] ** 0.5
            allowed = max(rounding, product.allowed_asymmetry) * curvature.abs().max()
            curvature = symmetric(curvature, allowed, 0.0)
            step = torch.linalg.inv(curvature)
            add_combined(x, coefficients @ step, directions)
            floor = torch.finfo(x.dtype).eps * curvature.diagonal().max().item() ** 0.5
            residual = torch.addmm(basis, step.to(basis), image, alpha=-1)
            basis, turn = space.orthonormalise(residual, floor)
            coefficients = coefficients @ turn
            directions = torch.addmm(basis, turn.T.to(basis), directions)
            norms = coefficients.norm(dim=1)
            if norms.norm() < 0.9 * best[0]:
                best = norms.norm(), passes
            elif passes - best[1] > _PATIENCE:
                break
            energy = task.energies(x, combine(coefficients, basis))
            if relative_error(norms, energy) <= 0.9 * self.tolerance:
                break
        return x, passes
