"""Options of the default fit, which uses one span of directions for every λ."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from torch_lla_em.solvers.block_cg import BlockCG
from torch_lla_em.solvers.operator import Operator
from torch_lla_em.solvers.solution import Solution, check_positive


@dataclass(frozen=True)
class BlockKrylov:
    """The default solver with a limit on its memory: a span of directions, extended by each pass.

    Unlike other solvers, it does not change the defaults of ``curvature`` and ``g_prior``.

    Example:
        >>> la = LinearisedLaplace(model, "classification", solver=BlockKrylov(memory=2e9))
    """

    tolerance: float = 1e-2
    """Bound on √(mean ‖r‖² / max(1, mean ⟨x, A x⟩)), the relative error of J x, in ``solve``.
    Default 0.01."""

    max_passes: int = 100
    """Largest number of products in ``solve``; it stops with a warning. Default 100."""

    memory: float | None = None
    """Largest size of the span in bytes. Default None: half of the free memory of the device of the
    samples. A fit whose span does not fit continues with block CG."""

    def __post_init__(self) -> None:
        check_positive("BlockKrylov", tolerance=self.tolerance, max_passes=self.max_passes)
        if self.memory is not None:
            check_positive("BlockKrylov", memory=self.memory)

    def solve(self, product: Operator, b: Tensor, start: Tensor | None = None) -> Solution:
        """Solve (A + I) X = B for one λ, by block CG.

        Args:
            product (Operator): The product with A.
            b (Tensor): B, shape (K, P).
            start (Tensor, optional): Where to start, shape (K, P). Default None: at 0.

        Returns:
            X with its true residual.
        """
        return BlockCG(self.tolerance, self.max_passes).solve(product, b, start)
