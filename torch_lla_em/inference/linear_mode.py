"""E-step, mode: w_lin = argmin_w Σ_n loss(J_n w, y_n) + ½ ‖w‖²_Λ, without the network's offset."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from math import inf, sqrt
from typing import NamedTuple

from torch import Tensor

from torch_lla_em.inference.prior import Prior
from torch_lla_em.problem import Problem, WhitenedLoss
from torch_lla_em.solvers import SGD, Newton

Precondition = Callable[[Tensor], Tensor]

_FIRST_MODE_PASSES = 6


class LinearMode(NamedTuple):
    """The mode of the linear model, and how well it is known."""

    w: Tensor
    """w_lin, shape (P,)."""

    loss: float
    """Σ_n -log p(y_n | J_n w_lin)."""

    error: float
    """A bound on ‖w - w*‖_Λ / ‖w‖_Λ: the gradient of the whole over the norm."""

    passes: float
    """Single-column passes over the data."""

    converged: bool
    """Whether the error met the solver's tolerance."""


def optimise_MAP(
    problem: Problem,
    prior: Prior,
    precision: Tensor,
    solver: Newton | SGD = Newton(),
    start: Tensor | None = None,
    *,
    precondition: Precondition | None = None,
) -> LinearMode:
    """Find the mode of the linear model, from ``start`` (P,) or 0."""
    deviation = prior.deviation(precision)
    loss = WhitenedLoss(problem, deviation)
    x = problem.zeros(1)[0] if start is None else prior.whitened(start, precision)
    if isinstance(solver, SGD):
        minimum = solver.minimise(loss, x)
    else:
        quadratic = problem.likelihood.is_quadratic
        solver = replace(solver, forcing=0.0) if quadratic else solver
        minimum = solver.minimise(loss, x, precondition)
    w = deviation * minimum.x
    mode = LinearMode(w, minimum.loss, minimum.error, minimum.passes, minimum.converged)
    if not mode.converged:
        _warn_of(mode, solver)
    return mode


def first_mode(problem: Problem, prior: Prior, precision: Tensor) -> Tensor:
    """Return a start for the mode, (P,): the best of multiples of the trained weights.

    J w_MAP nearly says what the network says (exactly, up to a factor, where the network is
    homogeneous in its weights), so that H there is near the one G is made of: the mode then
    takes a third of the passes that it takes from 0, where the softmax is undecided.
    """
    if problem.likelihood.is_quadratic:
        return problem.zeros(1)[0]
    loss = WhitenedLoss(problem, prior.deviation(precision))
    direction = prior.whitened(problem.w_MAP, precision)
    low, high, factor = 0.0, inf, 1.0
    best = inf, 0.0
    for _ in range(_FIRST_MODE_PASSES):
        x = factor * direction
        value, gradient = loss.value_and_gradient(x)
        best = min(best, (value + 0.5 * loss.space.norm(x) ** 2, factor))
        if loss.space.dot(direction, gradient + x) < 0:
            low = factor
        else:
            high = factor
        factor = 3 * low if high == inf else high / 3 if low == 0 else sqrt(low * high)
        if high < 2 * low:
            break
    return best[1] * problem.w_MAP * (prior.scale > 0)


def _warn_of(mode: LinearMode, solver: Newton | SGD) -> None:
    """Say that the mode is less exact than was asked, and what helps."""
    remedy = "Raise `tolerance`, or convert the model and its data to float64."
    if isinstance(solver, SGD):
        remedy = (
            f"The prior precision follows from this mode, and may be far off. Give SGD more epochs "
            f"(now {solver.epochs}), another learning_rate, or use the default solver."
        )
    warnings.warn(
        f"The linear mode is known to a relative error of {mode.error:.1e} only, not "
        f"{solver.tolerance:.1e}, after {mode.passes:g} passes. {remedy}",
        stacklevel=3,
    )
