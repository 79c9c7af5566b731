"""An inverse Hessian from the changes of a gradient (Broyden, Fletcher, Goldfarb and Shanno)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

_CURVED = 1e-12
"""Smallest relative curvature along a step from which something is learnt."""


class BFGS:
    """An approximate inverse Hessian: a first one, corrected by steps and what they changed of the gradient."""

    def __init__(self, solve: Callable[[Tensor], Tensor]):
        self._solve = solve
        self._pairs: list[tuple[Tensor, Tensor, Tensor]] = []

    def learn(self, step: Tensor, change: Tensor) -> None:
        """Correct the inverse, such that it maps the change of the gradient, (m,), to the step."""
        curvature = step @ change
        if curvature > _CURVED * step.norm() * change.norm():
            self._pairs.append((step, change, 1 / curvature))

    def times(self, gradient: Tensor) -> Tensor:
        """Return the product with a gradient, (m,), by two loops over the steps."""
        shares, rest = [], gradient
        for step, change, scale in reversed(self._pairs):
            shares.append(scale * (step @ rest))
            rest = rest - shares[-1] * change
        product = self._solve(rest)
        for (step, change, scale), share in zip(self._pairs, reversed(shares)):
            product = product + (share - scale * (change @ product)) * step
        return product
