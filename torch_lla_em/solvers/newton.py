"""Newton's method with block conjugate gradients inside, for the mode of the linear model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_lla_em.solvers.block_cg import BlockCG
from torch_lla_em.solvers.solution import (
    ConvexLoss,
    DivergenceError,
    Minimum,
    Product,
    check_positive,
    require_finite,
)
from torch_lla_em.solvers.space import dot, norm

# shortest step that the line search tries, relative to the full step
_SHORTEST = 1e-6
# relative decrease of the loss that may be lost to rounding in a sum over many examples
_SEEN = 1e-4


@dataclass(frozen=True)
class Newton:
    """Minimises a convex loss(x) + ½‖x‖² by truncated Newton steps with a line search.

    Example:
        >>> solver = Newton(tolerance=1e-4)  # for optimise_MAP(problem, prior, precision, solver)
    """

    tolerance: float = 1e-2
    """Bound on ‖∇‖ / ‖x‖, the relative error of x. Default 0.01."""

    max_passes: int = 500
    """Largest number of gradients and products together; ``optimise_MAP`` warns if it is not
    enough. Default 500."""

    forcing: float = 0.1
    """Residual at which a Newton step is accepted, relative to ‖∇‖. Default 0.1; 0 for a quadratic
    loss, which needs one exact step."""

    preconditioner: Callable[[Tensor], Product] | None = None
    """A function of x, (P,). It returns a function from (K, P) to (K, P) that multiplies by an
    approximation of the inverse Hessian of the objective at x, which must be symmetric and positive
    definite. Default None: the identity."""

    def __post_init__(self) -> None:
        check_positive("Newton", tolerance=self.tolerance, max_passes=self.max_passes)

    def minimise(self, loss: ConvexLoss, start: Tensor) -> Minimum:
        """Minimise loss(x) + ½‖x‖².

        Args:
            loss (ConvexLoss): With ``value_and_gradient(x)``, ``hessian(x)``, and ``rounding``.
            start (Tensor): Initial x, (P,).
        """
        x, passes = start, 1
        noise = max(10 * torch.finfo(x.dtype).eps, loss.rounding)
        value, gradient = loss.value_and_gradient(x)
        total = value + 0.5 * norm(x) ** 2
        while True:
            slope = gradient + x
            size, goal = norm(slope), self.tolerance * norm(x)
            require_finite(size)
            left = self.max_passes - passes - 1  # the step itself takes a gradient
            if size <= goal or left < 1:
                break

            def enough(step: Tensor, residual: Tensor, x: Tensor = x, size: float = size) -> bool:
                goal = 0.3 * self.tolerance * norm(x + step[0])
                return norm(residual) <= max(self.forcing * size, goal)

            zeros, hessian = torch.zeros_like(x)[None], loss.hessian(x)
            solver = BlockCG(preconditioner=self.preconditioner and self.preconditioner(x))
            steps, _, used = solver.descend(hessian, zeros, -slope[None], enough, left)
            step, passes = steps[0], passes + used
            descent, fraction, before = dot(slope, step), 1.0, (total, value, gradient)
            while True:
                trial = x + fraction * step
                value, gradient = loss.value_and_gradient(trial)
                passes += 1
                new_total = value + 0.5 * norm(trial) ** 2
                if new_total <= total + 1e-4 * fraction * descent + noise * abs(total):
                    break
                if passes == self.max_passes:  # this step is too long, and no pass is left
                    trial, (new_total, value, gradient) = x, before
                    break
                fraction /= 2
                if fraction < _SHORTEST and -descent <= _SEEN * abs(total):
                    break
                if fraction < _SHORTEST:
                    raise DivergenceError(
                        "Newton's method cannot decrease the loss. Check that the inputs are "
                        "scaled as in training (the outputs may be so large that the loss is "
                        "rounded), that the gradient and H of the likelihood belong to its "
                        "log_prob, and that neither the model nor the data change from pass to "
                        "pass."
                    )
            stuck = new_total >= total and norm(gradient + trial) >= size
            stuck |= fraction < _SHORTEST
            x, total = trial, new_total
            if stuck:
                break
        error = norm(gradient + x) / max(norm(x), 1e-300)
        return Minimum(x, value, error, passes, error <= self.tolerance)
