"""Deflation: what one Krylov basis knows of G preconditions block CG under any prior."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from torch_lla_em.solvers.block_cg import BlockCG
from torch_lla_em.solvers.block_lanczos import BlockLanczos
from torch_lla_em.solvers.operator import Operator
from torch_lla_em.solvers.solution import Solution, Task, check_positive
from torch_lla_em.solvers.space import Space, add_combined, combine

# Ritz values below this part of the largest are rounding
_SMALLEST = 1e-6


def nystrom_features(lanczos: BlockLanczos) -> Tensor:
    """Return F, shape (r, P), with FᵀF ≤ G: Nyström's approximation, equal on the Ritz vectors.

    Of Ritz pairs (θ, u), F holds G u / √θ, which block Lanczos knows without a product.
    """
    theta = lanczos.eigenvalues
    live = theta > _SMALLEST * theta[-1]
    roots = theta[live].sqrt()
    vectors = torch.eye(len(theta), dtype=torch.float64, device=theta.device)[live]
    features = lanczos.to_weights(roots[:, None] * vectors)
    residual = lanczos.residual_coordinates()[:, live] / roots
    add_combined(features, residual.T, lanczos.basis[-1])
    return features


class Preconditioner(Protocol):
    """Powers of M = I + Vᵀ B V ≤ I + A, with V orthonormal after a turn of some given rows."""

    def power(self, rows: Tensor, exponent: float) -> Tensor:
        """Return M to a power times rows, (k, P)."""
        ...


class FeaturePreconditioner:
    """M = I + D FᵀF D, in coordinates whitened by D."""

    def __init__(self, features: Tensor, deviation: Tensor, space: Space = Space()):
        self._features, self._deviation, self._gram = features, deviation, space.gram
        squares = space.gram(features, features, deviation.square())
        values, self._vectors = torch.linalg.eigh(squares)
        self._values = values.clamp_min(0)

    def power(self, rows: Tensor, exponent: float) -> Tensor:
        """Return M to a power times rows, (k, P)."""
        # D Fᵀ V has columns of squared length ``values``: one division for each unit vector
        values = self._values
        change = torch.expm1(exponent * torch.log1p(values))
        small = 1e-12 * values[-1].clamp_min(1.0)
        change = torch.where(values > small, change / values.clamp_min(small), exponent)
        within = self._gram(rows, self._features, self._deviation) @ self._vectors
        moved = combine(within * change @ self._vectors.T, self._features)
        return moved.mul_(self._deviation).add_(rows)


@dataclass(frozen=True)
class DeflatedCG:
    """Block CG on M^{-1/2} (A + I) M^{-1/2}, with a given M.

    Since I ≤ M ≤ A + I, the residual in the norm of M⁻¹ bounds the error as the plain one
    does, and is nearer to it: the certificate is that one.
    """

    preconditioner: Preconditioner
    """Powers of M."""

    tolerance: float = 1e-2
    """Bound on √(mean ‖r‖² / max(1, mean ⟨x, A x⟩)), with r in the norm of M⁻¹."""

    max_passes: int = 200
    """Products with A after which it stops, with a warning."""

    def __post_init__(self) -> None:
        check_positive("DeflatedCG", tolerance=self.tolerance, max_passes=self.max_passes)

    def solve(
        self,
        product: Operator,
        b: Tensor,
        start: Tensor | None = None,
        image: Tensor | None = None,
    ) -> Solution:
        """Return X, found from ``start`` or 0; ``image``, A start where known, saves a product."""
        power = self.preconditioner.power

        def turned(x: Tensor) -> Tensor:
            return power(x, -0.5)

        def preconditioned(y: Tensor) -> Tensor:
            x = turned(y)
            return turned(x + product(x)).sub_(y)

        operator = Operator(preconditioned, product.space, product.rounding)
        y = None if start is None else power(start, 0.5)
        image_of_y = None if image is None else turned(start + image) - y
        task = Task(operator, turned(b), y, image_of_y, turned)
        solved = BlockCG(self.tolerance, self.max_passes).run(task)
        x = turned(solved.x)
        return solved._replace(x=x, image=power(solved.x + solved.image, 0.5).sub_(x))
