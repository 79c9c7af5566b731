"""What solvers solve with: a symmetric A ≥ 0 that is known by its products alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from torch import Tensor

from torch_lla_em.runtime import attempt
from torch_lla_em.solvers.space import Space

Product = Callable[[Tensor], Tensor]
T = TypeVar("T")


class Operator:
    """A product X -> A X of blocks of vectors (K, P), and the space that they lie in."""

    space = Space()
    rounding = 0.0
    """How far a product may be from exact, relative."""

    def __init__(self, product: Product, space: Space = Space(), rounding: float = 0.0):
        self._product, self.space, self.rounding = product, space, rounding

    def __call__(self, x: Tensor) -> Tensor:
        """Return A X, shape (K, P)."""
        return self._product(x)

    def attempt(self, run: Callable[[], T]) -> tuple[T | None, str | None]:
        """Return the result of ``run``, or the allocator's message if it ran out of memory."""
        return attempt(run)

    @property
    def allowed_asymmetry(self) -> float:
        """By how much ⟨x, A y⟩ and ⟨y, A x⟩ may differ, relative to the largest of them."""
        return max(1e-3, 4 * self.rounding)


class Rooted(Protocol):
    """An operator that also gives R with A = RᵀR."""

    space: Space

    def __call__(self, x: Tensor) -> Tensor: ...

    def rows(self) -> Tensor: ...


class Minibatched(Protocol):
    """A product or a loss that can be taken batch by batch."""

    space: Space

    def minibatches(self) -> Iterator[tuple[int, Product]]: ...

    def num_steps(self) -> int | None: ...
