"""An exact solver for a matrix A with known eigenvectors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_lla_em.solvers.solution import Operator, Solution


@dataclass(frozen=True)
class Eigen:
    """Solves (A + I) X = B by the eigenvalues of A, (P,), and its eigenvectors, (P, P)."""

    values: Tensor
    vectors: Tensor

    tolerance: float = 0.0
    """Largest error of a solution; solutions are exact up to rounding."""

    def solve(self, product: Operator, b: Tensor, start: Tensor | None = None) -> Solution:
        """Return the solution for b, (K, P). The product and the start are not used."""
        y = b @ self.vectors / (self.values + 1)
        energy = (self.values * y.square()).sum(1)
        return Solution(y @ self.vectors.T, torch.zeros_like(b[:, 0]), energy)
