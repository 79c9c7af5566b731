"""Block conjugate gradients: all right-hand sides share one Krylov space."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_lla_em.solvers.blocks import combine, dots, gram, orthonormalise
from torch_lla_em.solvers.solution import (
    DivergenceError,
    FaultyProductError,
    Solution,
    check_positive,
    energies,
    relative_error,
)

logger = logging.getLogger("torch_lla_em")

Product = Callable[[Tensor], Tensor]


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

    def __post_init__(self) -> None:
        check_positive("BlockCG", tolerance=self.tolerance, max_passes=self.max_passes)

    def solve(self, product: Product, b: Tensor, start: Tensor | None = None) -> Solution:
        """Return X, found from ``start`` or 0."""
        x, residual, passes, last = torch.zeros_like(b), b, 0, float("inf")
        if start is not None:
            x, residual, passes = start.clone(), b - start - product(start), 1
        while True:
            error = relative_error(dots(residual, residual).sqrt(), energies(x, b, residual))
            if not error < float("inf") or error > 1e6 * max(1.0, last):
                raise DivergenceError(
                    f"Block CG diverged after {passes} passes: the error grew from {last:.1e} to "
                    f"{error:.1e}. Check that the model's outputs and weights are finite."
                )
            if error <= self.tolerance or passes >= self.max_passes:
                break
            if error > 0.5 * last:
                logger.warning(
                    "Block CG stagnates at an error of %.1e: %s arithmetic allows no better. "
                    "Loosen `tolerance`, or convert the model and its data to float64.",
                    error,
                    x.dtype,
                )
                break
            last, budget = error, self.max_passes - passes - 1
            passes += 1 + self._descend(product, x, b, (residual, budget))
            residual = b - x - product(x)
        return Solution.of(x, b, residual, passes, self.tolerance)

    def _descend(
        self, product: Product, x: Tensor, b: Tensor, task: tuple[Tensor, int]
    ) -> int:
        """Improve x in place until its residual, by recursion, meets the tolerance; return passes."""
        residual, budget = task
        basis, coefficients = orthonormalise(residual)
        directions, passes, first = basis, 0, coefficients.norm()
        while len(basis) and passes < budget:
            image = directions + product(directions)
            passes += 1
            curvature = _checked_curvature(gram(directions, image), directions)
            step = torch.linalg.inv(curvature)
            x += combine(coefficients @ step, directions)
            floor = torch.finfo(x.dtype).eps * curvature.diagonal().max().item() ** 0.5
            basis, turn = orthonormalise(basis - combine(step, image), floor)
            coefficients = coefficients @ turn
            directions = basis + combine(turn.T, directions)
            norms = coefficients.norm(dim=1)
            if not norms.norm() < 1e8 * first:
                break
            if relative_error(norms, energies(x, b, combine(coefficients, basis))) <= 0.9 * self.tolerance:
                break
        return passes


def _checked_curvature(curvature: Tensor, directions: Tensor) -> Tensor:
    """Return Dᵀ(A + I)D, made symmetric; raise if it cannot be the product of a symmetric A ≥ 0."""
    scale = curvature.abs().max()
    tolerance = 1e3 * torch.finfo(directions.dtype).eps * directions.shape[1] ** 0.5
    if (curvature - curvature.T).abs().max() > max(tolerance, 1e-3) * scale:
        raise FaultyProductError(
            "The product with G is not symmetric: the model's J and Jᵀ disagree, or its "
            "outputs change from call to call (dropout, random augmentation). Fix the model "
            "or the loader."
        )
    symmetric = 0.5 * (curvature + curvature.T)
    if torch.linalg.eigvalsh(symmetric)[0] <= 0:
        raise FaultyProductError(
            "The product with G has negative curvature: the likelihood's H is not positive "
            "semi-definite, or the model changes from call to call."
        )
    return symmetric
