"""Block conjugate gradients: all right-hand sides share one Krylov space."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_lla_em.solvers.operator import Operator
from torch_lla_em.solvers.solution import (
    DivergenceError,
    FaultyProductError,
    Solution,
    Task,
    check_positive,
    relative_error,
    solve_with_restarts,
)
from torch_lla_em.solvers.space import add_combined, combine

# products without a tenth off the residual: longer plateaus are rounding
_PATIENCE = 50


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
        limits = self.tolerance, self.max_passes
        task = Task(product, b, start, image)
        return solve_with_restarts("Block CG", task, limits, self.descend)

    def descend(self, task: Task, solution: Solution, residual: Tensor) -> tuple[Tensor, int]:
        """Improve x until its residual, by recursion, meets the tolerance or ceases to fall."""
        product, space = task.product, task.product.space
        x, budget = solution.x.clone(), self.max_passes - solution.passes - 1
        basis, coefficients = space.orthonormalise(residual)
        directions, passes, best = basis, 0, (coefficients.norm(), 0)
        while len(basis) and passes < budget:
            image = directions + product(directions)
            passes += 1
            curvature = _checked_curvature(space.gram(directions, image), directions, product)
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


_OR_ROUNDING = (
    "where the data are sound, use a larger `prior_precision`, inputs scaled as in training, or "
    "a model and data in float64."
)


def _checked_curvature(curvature: Tensor, directions: Tensor, product: Operator) -> Tensor:
    """Return Dᵀ(A + I)D, made symmetric; raise if it cannot be the product of a symmetric A ≥ 0."""
    scale = curvature.abs().max()
    if not scale < float("inf"):
        raise DivergenceError("A product with G is not finite: check the model's outputs.")
    tolerance = 1e3 * torch.finfo(directions.dtype).eps * directions.shape[1] ** 0.5
    if (curvature - curvature.T).abs().max() > max(tolerance, product.allowed_asymmetry) * scale:
        raise FaultyProductError(
            "The product with G is not symmetric: the model's J and Jᵀ disagree, or its "
            "outputs change from call to call (dropout, random augmentation); or rounding hides "
            f"the prior. Fix the model or the loader; {_OR_ROUNDING}"
        )
    symmetric = 0.5 * (curvature + curvature.T)
    if torch.linalg.eigvalsh(symmetric)[0] <= 0:
        raise FaultyProductError(
            "The product with G has negative curvature: the likelihood's H is not positive "
            "semi-definite, or the model changes from call to call; or rounding hides the "
            f"prior: {_OR_ROUNDING}"
        )
    return symmetric
