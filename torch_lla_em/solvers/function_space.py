"""The exact solve in function space, for data few enough to form their N C × N C kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_lla_em.solvers.operator import Rooted
from torch_lla_em.solvers.solution import Solution, Task, check_positive
from torch_lla_em.solvers.space import combine


@dataclass(frozen=True)
class FunctionSpace:
    """Solve (A + I) X = B as X = B - Rᵀ (R Rᵀ + I)⁻¹ R B, by Cholesky of N C × N C."""

    tolerance: float = 1e-2
    """What the certificate of the result is compared with."""

    def __post_init__(self) -> None:
        check_positive("FunctionSpace", tolerance=self.tolerance)

    def solve(self, product: Rooted, b: Tensor, start: Tensor | None = None) -> Solution:
        """Return X; a start is not needed and not used."""
        rows, gram = product.rows(), product.space.gram
        identity = torch.eye(len(rows), dtype=torch.float64, device=rows.device)
        factor = torch.linalg.cholesky(gram(rows, rows) + identity)

        def apply(v: Tensor) -> Tensor:
            duals = torch.cholesky_solve(gram(rows, v), factor)
            return v - combine(duals.T, rows)

        x = apply(b)
        x += apply(b - x - product(x))  # one refinement removes the rounding of the first
        return Task(product, b).judge(x, b - x - product(x), 3, self.tolerance)  # type: ignore[arg-type]
