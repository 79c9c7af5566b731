"""BFGS from a quadratic model of the loss, for problems that are small enough for dense
matrices."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_lla_em.runtime import Group
from torch_lla_em.solvers.solution import ConvexLoss, Minimum, require_finite

_IDLE = 12
"""Number of successive steps that may fail to lower the objective; longer plateaus are rounding."""


@dataclass(frozen=True)
class BFGS:
    """Minimises a convex loss(x) + ½‖x‖² by BFGS, which begins with the Hessian of a quadratic
    model of the loss."""

    values: Tensor
    vectors: Tensor
    """The eigenvalues, (P,), and eigenvectors, (P, P), of the model's Hessian; a search uses
    coordinates in these eigenvectors."""

    tolerance: float
    """‖∇‖ / ‖x‖ at the end of a search."""

    roughly: float = 0.0
    """The error relative to ‖x‖, estimated by BFGS, at which a search ends earlier."""

    max_passes: int = 1000
    """Largest number of steps."""

    is_exact: bool = False
    """Whether the loss equals its quadratic model, so that no step is shortened; a second step
    corrects the rounding of the first."""

    group: Group = Group()
    """The ranks that search together: those that round differently take the steps of rank 0."""

    def minimise(self, loss: ConvexLoss, start: Tensor) -> Minimum:
        """Return the minimum of loss(x) + ½‖x‖² from a start, (P,)."""
        inverse, most = (1 / (self.values + 1)).diag(), 2 if self.is_exact else self.max_passes

        def at(c: Tensor) -> tuple[float, float, Tensor]:
            """Return the loss, the objective and its gradient, for coordinates in the
            eigenvectors."""
            value, gradient = loss.value_and_gradient(self.vectors @ c)
            both = torch.cat([gradient @ self.vectors, gradient.new_tensor([value])])
            both, value = self.group.from_first(both).split([len(c), 1])
            return value.item(), value.item() + 0.5 * (c @ c).item(), both + c

        c = start @ self.vectors
        of_loss, value, slope = at(c)
        length, idle, passes = 1.0, 0, 0
        while passes < most:
            require_finite(abs(value) + slope.norm().item())
            step, size = -self.group.from_first(inverse @ slope), c.norm().item()
            fall = -(slope @ step).item()
            if idle == _IDLE or fall <= (self.roughly * size) ** 2:
                break
            if slope.norm().item() <= self.tolerance * size:
                break
            step, passes = length * step, passes + 1
            of_new, new, slope_new = at(c + step)
            # rounding of the outputs may hide that a step lowers the objective
            rounding = max(loss.rounding, torch.finfo(c.dtype).eps) * abs(value)
            idle, lower = 0 if new < value - rounding else idle + 1, new < value
            if not lower and new <= value + 100 * rounding:
                lower = (slope_new @ inverse @ slope_new).item() < fall
            if lower or self.is_exact:
                inverse = _updated(inverse, step, slope_new - slope)
                c, of_loss, value, slope, length = c + step, of_new, new, slope_new, 1.0
            else:
                length *= _shorter(length * fall, max((slope_new @ step).item(), 2 * (new - value)))
        error = slope.norm().item() / max(c.norm().item(), 1e-300)
        return Minimum(self.vectors @ c, of_loss, error, passes + 1, passes < most or self.is_exact)


def _updated(inverse: Tensor, step: Tensor, change: Tensor) -> Tensor:
    """Update the inverse Hessian by a step and the change of the gradient. It is returned unchanged
    if the curvature is rounding."""
    curvature = (step @ change).item()
    if curvature <= 1e-12 * (step.norm() * change.norm()).item():
        return inverse
    turned = inverse @ change
    both = torch.outer(step, turned) / curvature
    longer = (1 + (change @ turned).item() / curvature) / curvature
    return inverse - both - both.T + longer * torch.outer(step, step)


def _shorter(down: float, rise: float) -> float:
    """Return the factor by which to shorten a step so that the slope along it vanishes, if the
    slope is linear between -down at the start and rise at the end.

    The factor is between .05 and .5, also if the objective is not finite.
    """
    share = down / max(down + rise, 1e-300)
    return 0.05 if math.isnan(share) else min(0.5, max(0.05, share))
