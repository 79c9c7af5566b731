"""The operator of a solver: a symmetric A ≥ 0 that is given by its products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from torch_lla_em.solvers.space import Space

Product = Callable[[Tensor], Tensor]


class Operator:
    """A product X -> A X of blocks of vectors (K, P), and the space of these vectors."""

    space = Space()
    rounding = 0.0
    """Relative rounding error of a product."""

    def __init__(self, product: Product, space: Space = Space(), rounding: float = 0.0):
        self._product, self.space, self.rounding = product, space, rounding

    def __call__(self, x: Tensor) -> Tensor:
        """Return A X, shape (K, P)."""
        return self._product(x)

    @property
    def allowed_asymmetry(self) -> float:
        """Largest difference of ⟨x, A y⟩ and ⟨y, A x⟩, relative to the largest of them."""
        return max(1e-3, 4 * self.rounding)


class Rooted(Protocol):
    """An operator that also gives R with A = RᵀR."""

    space: Space

    def __call__(self, x: Tensor) -> Tensor: ...

    def rows(self) -> Tensor: ...
