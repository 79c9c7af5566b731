"""What is asked of a fit over one span of directions for every λ."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_lla_em.solvers.block_cg import BlockCG
from torch_lla_em.solvers.operator import Operator
from torch_lla_em.solvers.solution import Solution, check_positive


@dataclass(frozen=True)
class BlockKrylov:
    """One span of directions for the whole EM, which every pass widens by residuals."""

    tolerance: float = 1e-2
    """Bound on √(mean ‖r‖² / max(1, mean ⟨x, A x⟩)), the relative error of J x, of ``solve``."""

    max_passes: int = 100
    """Products with G after which ``solve`` stops, with a warning."""

    memory: float | None = None
    """Bytes that the span may take; None: half of what is free where the weights are. A fit whose
    span does not fit goes on by block CG."""

    storage: torch.dtype | None = None
    """No longer used: the span has the precision of the weights."""

    def __post_init__(self) -> None:
        check_positive("BlockKrylov", tolerance=self.tolerance, max_passes=self.max_passes)
        if self.memory is not None:
            check_positive("BlockKrylov", memory=self.memory)
        if self.storage is not None:
            warnings.warn(
                "BlockKrylov(storage=...) has no effect any more and will be removed: leave it out. "
                "To save memory, pass BlockKrylov(memory=bytes) or fewer samples.",
                DeprecationWarning,
                stacklevel=3,
            )

    def solve(self, product: Operator, b: Tensor, start: Tensor | None = None) -> Solution:
        """Solve (A + I) X = B at one λ, where block CG finds the same in the same space."""
        return BlockCG(self.tolerance, self.max_passes).solve(product, b, start)
