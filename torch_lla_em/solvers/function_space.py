"""The exact solution in function space, for data sets whose N C × N C kernel fits in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from torch_lla_em.solvers.solution import Solution, check_positive
from torch_lla_em.solvers.space import combine, gram


class Rooted(Protocol):
    """An operator that also gives R with A = RᵀR."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def rows(self) -> Tensor: ...


@dataclass(frozen=True)
class FunctionSpace:
    """Solves X = B - Rᵀ (R Rᵀ + I)⁻¹ R B, by a Cholesky factorisation of an N C × N C matrix.

    Use it for small data sets (N C ≤ 1024) with a layerwise prior.

    Example:
        >>> la = LinearisedLaplace(model, "classification", solver=FunctionSpace())
    """

    tolerance: float = 1e-2
    """Largest error that does not give a warning. Default 0.01."""

    def __post_init__(self) -> None:
        check_positive("FunctionSpace", tolerance=self.tolerance)

    def solve(self, product: Rooted, b: Tensor, start: Tensor | None = None) -> Solution:
        """Solve (A + I) X = B.

        Args:
            product (Rooted): The product with A, and its root R.
            b (Tensor): B, shape (K, P).
            start (Tensor, optional): Not used.

        Returns:
            X with its true residual.
        """
        rows = product.rows()
        identity = torch.eye(len(rows), dtype=torch.float64, device=rows.device)
        factor = torch.linalg.cholesky(gram(rows, rows) + identity)

        def apply(v: Tensor) -> Tensor:
            duals = torch.cholesky_solve(gram(rows, v), factor)
            return v - combine(duals.T, rows)

        x = apply(b)
        x += apply(b - x - product(x))  # one step of iterative refinement
        found = Solution.of(b, x, b - x - product(x))
        return found._replace(passes=3, tolerance=self.tolerance)
