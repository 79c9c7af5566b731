"""Newton's method with conjugate gradients inside, for the mode of the linear model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torch_lla_em.solvers.operator import Operator
from torch_lla_em.solvers.solution import DivergenceError, FaultyProductError, check_positive
from torch_lla_em.solvers.space import Space

Vectors = Callable[[Tensor], Tensor]

# shortest fraction of a step that the line search tries
_SHORTEST = 1e-6
# promised relative descent that rounding of a sum over many examples may hide
_SEEN = 1e-4


class Loss(Protocol):
    """A convex loss with its gradient, and its Hessian as a product."""

    space: Space
    rounding: float

    def value_and_gradient(self, x: Tensor) -> tuple[float, Tensor]: ...

    def hessian(self, x: Tensor) -> Operator: ...


class Minimum(NamedTuple):
    """x near the minimum of loss(x) + ½‖x‖²."""

    x: Tensor
    """(P,)."""

    loss: float
    """loss(x), without the quadratic."""

    gradient_norm: float
    """‖∇‖ of the whole: a bound on ‖x - x*‖, since the quadratic is 1-strongly convex."""

    norm: float
    """‖x‖."""

    passes: int
    """Products and gradients that it took."""

    converged: bool
    """Whether gradient_norm ≤ tolerance ‖x‖."""

    @property
    def error(self) -> float:
        """‖∇‖ / ‖x‖, a bound on the relative error of x."""
        return self.gradient_norm / max(self.norm, 1e-300)


@dataclass(frozen=True)
class Newton:
    """Minimise a convex loss(x) + ½‖x‖² by truncated Newton steps with a line search."""

    tolerance: float = 1e-2
    """Bound on ‖∇‖ / ‖x‖, the relative error of x."""

    max_passes: int = 300
    """Gradients and products after which it stops, with a warning."""

    forcing: float = 0.1
    """How far below ‖∇‖ each step's residual goes; 0 for a quadratic, which takes one step."""

    def __post_init__(self) -> None:
        check_positive("Newton", tolerance=self.tolerance, max_passes=self.max_passes)

    def minimise(self, loss: Loss, start: Tensor, precondition: Vectors | None = None) -> Minimum:
        """Return the minimum, found from ``start`` (P,)."""
        x, passes, dot, norm = start, 1, loss.space.dot, loss.space.norm
        noise = max(10 * torch.finfo(x.dtype).eps, loss.rounding)
        value, gradient = loss.value_and_gradient(x)
        total = value + 0.5 * norm(x) ** 2
        while True:
            slope = gradient + x
            size, goal = norm(slope), self.tolerance * norm(x)
            if not size < float("inf"):
                raise DivergenceError(
                    "The gradient of the linear model is not finite: check the model's outputs "
                    "and the targets for extreme values."
                )
            if size <= goal or passes >= self.max_passes:
                break

            def enough(step: Tensor, residual: float, x: Tensor = x, size: float = size) -> bool:
                return residual <= max(self.forcing * size, 0.3 * self.tolerance * norm(x + step))

            step, used = conjugate_gradients(loss.hessian(x), -slope, enough, precondition)
            passes += used
            descent, fraction = dot(slope, step), 1.0
            while True:
                trial = x + fraction * step
                value, gradient = loss.value_and_gradient(trial)
                passes += 1
                new_total = value + 0.5 * norm(trial) ** 2
                if new_total <= total + 1e-4 * fraction * descent + noise * abs(total):
                    break
                rise = (new_total - total, dot(gradient + trial, step))
                fraction *= _shortening(fraction, descent, *rise)
                if fraction < _SHORTEST and -descent <= _SEEN * abs(total):
                    break
                if fraction < _SHORTEST:
                    raise DivergenceError(
                        "Newton's method found no descent: outputs so large that rounding hides "
                        "the loss (are the inputs scaled as in training?), a likelihood whose "
                        "gradient and H do not belong to its log_prob, or a model that changes "
                        "from call to call."
                    )
            stuck = new_total >= total and norm(gradient + trial) >= size
            stuck |= fraction < _SHORTEST
            x, total = trial, new_total
            if stuck:
                break
        size, length = norm(gradient + x), norm(x)
        return Minimum(x, value, size, length, passes, size <= self.tolerance * length)


def conjugate_gradients(
    product: Operator,
    b: Tensor,
    enough: Callable[[Tensor, float], bool],
    precondition: Vectors | None = None,
    max_passes: int = 500,
) -> tuple[Tensor, int]:
    """Return x with (A + I) x ≈ b once ``enough(x, ‖residual‖)``, and the products taken."""
    x, residual, dot, norm = torch.zeros_like(b), b.clone(), product.space.dot, product.space.norm
    z = residual if precondition is None else precondition(residual[None])[0]
    direction, rho, passes = z.clone(), dot(residual, z), 0
    while passes < max_passes and not enough(x, norm(residual)):
        image = direction + product(direction[None])[0]
        passes += 1
        curvature = dot(direction, image)
        if not curvature > 0:
            raise FaultyProductError(
                "The Hessian has negative curvature: the likelihood's H is not positive "
                "semi-definite, or the model's J and Jᵀ disagree."
            )
        x += rho / curvature * direction
        residual -= rho / curvature * image
        z = residual if precondition is None else precondition(residual[None])[0]
        new = dot(residual, z)
        direction = z + new / rho * direction
        rho = new
    return x, passes


def _shortening(fraction: float, descent: float, rise: float, slope: float) -> float:
    """Return by how much to shorten a step: to the minimum of the cubic through both ends."""
    left, right = fraction * descent, fraction * slope
    # left t + b t² + a t³ has value ``rise`` and slope ``right`` at t = 1
    a, b = left + right - 2 * rise, 3 * rise - 2 * left - right
    discriminant = b * b - 3 * a * left
    if not discriminant > 0 or b + sqrt(discriminant) == 0:
        return 0.5
    return min(0.5, max(0.05, -left / (b + sqrt(discriminant))))
