"""Block conjugate gradients: all right-hand sides share one Krylov space."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_lla_em.solvers.solution import (
    DivergenceError,
    FaultyProductError,
    Operator,
    Product,
    Solution,
    check_positive,
)
from torch_lla_em.solvers.space import add_combined, dots, gram, orthonormalise

# number of successive products that may fail to reduce the residual by a tenth; longer plateaus are
# rounding
_PATIENCE = 50
_OR_ROUNDING = (
    "the prior is lost to rounding. Correct the model or the loader; if they are correct, use a "
    "larger `prior_precision`, inputs scaled as in training, or a model and data in float64."
)


@dataclass(frozen=True)
class BlockCG:
    """Block conjugate gradients: solves (A + I) X = B for all rows of B, one product per iteration.

    The residual is stored as coefficients times an orthonormal basis (Dubrulle's QR form).
    Directions are removed from the basis when columns converge or become linearly dependent. When
    the recursion has converged, the true residual is computed; if it is larger, the iteration
    restarts. With a preconditioner M the basis is orthonormal in the inner product ⟨a, M b⟩; the
    definitions of error and certificate do not change.

    Example:
        >>> compute = Compute(solver=BlockCG(max_passes=1000))
        >>> la = LinearisedLaplace(model, "classification", compute=compute)
    """

    tolerance: float = 1e-2
    """Bound on √(mean ‖r‖² / max(1, mean ⟨x, A x⟩)), the relative error of J x. Default 0.01. A fit
    replaces it by its own tolerance, see ``Compute``."""

    max_passes: int = 200
    """Largest number of products with A; if these are too few, a fit warns. Default 200."""

    preconditioner: Product | None = None
    """A function from (K, P) to (K, P) that multiplies by an approximation of (A + I)⁻¹, symmetric
    and positive definite. Default None: the identity."""

    verified: bool = True
    """Whether one more product computes the true residual at the end. Default True. If False, the
    residual of the recursion is used, which has hardly any rounding error after few iterations."""

    def __post_init__(self) -> None:
        check_positive(type(self).__name__, tolerance=self.tolerance, max_passes=self.max_passes)

    def solve(self, product: Operator, b: Tensor, start: Tensor | None = None) -> Solution:
        """Solve (A + I) X = B.

        The solver stops when the true residual meets the tolerance or stops decreasing, or after
        the last pass.

        Args:
            product (Operator): The product X -> A X of (K, P), with its relative ``rounding``
                error.
            b (Tensor): B, shape (K, P).
            start (Tensor, optional): Initial X, shape (K, P). Default None: 0.

        Returns:
            X with its true residual.
        """
        last, least = float("inf"), 0.9 * self.tolerance
        if start is None:
            x, residual, passes = torch.zeros_like(b), b, 0
        else:
            x, residual, passes = start, (b - product(start)).sub_(start), 1
        while True:
            solution = Solution.of(b, x, residual)
            solution = solution._replace(passes=passes, tolerance=self.tolerance)
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
                return solution  # the precision of the dtype is exhausted
            last = error
            most = self.max_passes - passes - 1
            # until the residual of the recursion meets the tolerance, with a margin for rounding
            x, residual, used = self.descend(
                product, x, residual, lambda x, r: Solution.of(b, x, r).error <= least, most
            )
            passes += used
            if not self.verified:
                return Solution.of(b, x, residual)._replace(passes=passes, tolerance=self.tolerance)
            residual, passes = (b - product(x)).sub_(x), passes + 1

    def descend(
        self,
        product: Operator,
        start: Tensor,
        residual: Tensor,
        enough: Callable[[Tensor, Tensor], bool],
        max_passes: int,
    ) -> tuple[Tensor, Tensor, int]:
        """Iterate until ``enough`` returns True, or the residual stops decreasing.

        Args:
            product (Operator): The product X -> A X.
            start (Tensor): Initial X, (K, P).
            residual (Tensor): B - (A + I) start.
            enough (callable): A function of X and the residual of the recursion that returns
                whether to end.
            max_passes (int): Largest number of products.

        Returns:
            X, the residual of the recursion, and the number of products.
        """
        x, (basis, directions, coefficients) = start.clone(), self._basis(residual)
        passes, best = 0, (coefficients.norm(), 0)
        while len(basis) and passes < max_passes:
            image = directions + product(directions)
            passes += 1
            curvature = gram(directions, image)
            rounding = max(1e3 * torch.finfo(x.dtype).eps * x.shape[1] ** 0.5, 4 * product.rounding)
            curvature = _symmetric(curvature, max(rounding, 1e-3) * curvature.abs().max())
            step = torch.linalg.inv(curvature)
            add_combined(x, coefficients @ step, directions)
            floor = torch.finfo(x.dtype).eps * curvature.diagonal().max().item() ** 0.5
            rest = torch.addmm(basis, step.to(basis), image, alpha=-1)
            basis, images, turn = self._basis(rest, floor)
            coefficients = coefficients @ turn
            directions = torch.addmm(images, turn.T.to(images), directions)
            residual, size = coefficients.to(basis) @ basis, coefficients.norm()
            if size < 0.9 * best[0]:
                best = size, passes
            elif passes - best[1] > _PATIENCE:
                break
            if enough(x, residual):
                break
        return x, residual, passes

    def _basis(self, residual: Tensor, floor: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
        """Return an orthonormal basis of a residual, its product with the preconditioner, and
        coefficients."""
        if self.preconditioner is None:
            return orthonormalise(residual, floor=floor)
        images = self.preconditioner(residual)
        if (dots(residual, images) < 0).any():
            raise FaultyProductError(
                "The preconditioner is not positive definite: ⟨r, M r⟩ is negative for a residual "
                "r. Check that it approximates the inverse of A + I, and that it is symmetric."
            )
        return orthonormalise(residual, images, floor)


def _symmetric(product: Tensor, allowed: Tensor) -> Tensor:
    """Make Dᵀ (A + I) D symmetric. Raise an error if it is not positive definite, or if its
    asymmetry is larger than allowed."""
    if not torch.isfinite(product).all():
        raise DivergenceError("A product with G is not finite: check the model's outputs.")
    exact = 0.5 * (product + product.T)
    if (product - product.T).abs().max() > allowed:
        raise FaultyProductError(
            "The product with G is not symmetric: the model's J and Jᵀ disagree, or its outputs "
            f"change from call to call (dropout, random augmentation); or {_OR_ROUNDING}"
        )
    if torch.linalg.eigvalsh(exact)[0] <= 0:
        raise FaultyProductError(
            "The product with G has negative curvature: the likelihood's H is not positive "
            f"semi-definite, or the model changes from call to call; or {_OR_ROUNDING}"
        )
    return exact
