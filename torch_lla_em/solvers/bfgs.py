"""A minimum by an inverse Hessian that steps correct (Broyden, Fletcher, Goldfarb and Shanno)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_lla_em.solvers.solution import require_finite

_CURVED = 1e-12
"""Smallest relative curvature along a step from which something is learnt."""

_PATIENCE = 12
"""Number of steps in a row that may lower the objective by less than a rounding error."""

_SHORTEST, _LONGEST = 0.05, 0.5
"""Factors by which a step is shortened if it does not lower the objective."""

_ROUNDINGS = 100
"""A step that shortens the gradient may increase the objective by this multiple of its rounding error."""

Objective = Callable[[Tensor], tuple[float, Tensor]]
"""The value at a point, (m,), and the gradient there, (m,)."""


class BFGS:
    """An approximate inverse Hessian: a first one, corrected by steps and what they changed of the gradient."""

    def __init__(
        self, solve: Callable[[Tensor], Tensor], agreed: Callable[[Tensor], Tensor] = lambda x: x
    ):
        self._solve, self._agreed = solve, agreed
        self.pairs: list[tuple[Tensor, Tensor, Tensor]] = []
        """Steps, what they changed of the gradient, and the inverse of the product of both."""

    def learn(self, step: Tensor, change: Tensor) -> None:
        """Correct the inverse, such that it maps the change of the gradient, (m,), to the step."""
        curvature = step @ change
        if curvature > _CURVED * step.norm() * change.norm():
            self.pairs.append((step, change, 1 / curvature))

    def times(self, gradient: Tensor) -> Tensor:
        """Return the product with a gradient, (m,), by two loops over the steps."""
        shares, rest = [], gradient
        for step, change, scale in reversed(self.pairs):
            shares.append(scale * (step @ rest))
            rest = rest - shares[-1] * change
        product = self._solve(rest)
        for (step, change, scale), share in zip(self.pairs, reversed(shares)):
            product = product + (share - scale * (change @ product)) * step
        return self._agreed(product)

    def minimum(
        self,
        objective: Objective,
        point: Tensor,
        ends: Callable[[Tensor, Tensor, float], bool],
        most: int,
        precision: torch.dtype,
    ) -> Tensor:
        """Return the minimum of an objective, (m,), from a point: that tensor itself which the objective was given.

        The search is over once ``ends`` returns True for the point, the gradient there and its square in
        the metric of the inverse, after ``most`` evaluations, or when steps no longer lower the objective,
        whose values are rounded as those of type ``precision``.
        """
        value, slope = objective(point)
        length, idle = 1.0, 0
        for _ in range(most):
            require_finite(abs(value) + slope.norm().item())
            step = -self.times(slope)
            fall = -(slope @ step).item()
            if idle == _PATIENCE or ends(point, slope, fall):
                break
            step *= length
            new = point + step
            there, slope_there = objective(new)
            rounding = torch.finfo(precision).eps * abs(value)
            idle = 0 if there < value - rounding else idle + 1
            lower = there < value
            if not lower and there <= value + _ROUNDINGS * rounding:
                lower = bool(slope_there @ self.times(slope_there) < fall)
            if lower:
                self.learn(step, slope_there - slope)
                point, value, slope, length = new, there, slope_there, 1.0
            else:  # to where the gradient along the step vanishes, if it is linear
                down, rise = length * fall, max((slope_there @ step).item(), 2 * (there - value))
                share = down / max(down + rise, 1e-300)
                length *= min(_LONGEST, max(_SHORTEST, share if share == share else 0.0))
        return point


class Searches:
    """Searches for minima of a loss plus ½ λ ‖m‖², each of which learns from the last steps of those before it."""

    def __init__(self, kept: int | None = None, agreed: Callable[[Tensor], Tensor] = lambda x: x):
        """``kept`` is the number of these steps; None: all. Ranks take the product that is ``agreed``, which decides."""
        self._kept, self._agreed = kept, agreed
        self._changes: list[tuple[Tensor, Tensor]] = []

    def inverse(self, solve: Callable[[Tensor], Tensor], precision: float, size: int) -> BFGS:
        """Return the inverse Hessian at λ for points (size,), corrected by the steps between such points."""
        inverse = BFGS(solve, self._agreed)
        for step, change in self._changes:
            if len(step) == size:
                inverse.learn(step, change + precision * step)
        return inverse

    def keep(self, inverse: BFGS, precision: float) -> None:
        """Keep the steps of a search at λ, and what they changed of the gradient of the loss."""
        pairs = inverse.pairs if self._kept is None else inverse.pairs[-self._kept :]
        self._changes = [(step, change - precision * step) for step, change, _ in pairs]
