"""E-step, mode: w_lin = argmin_w Σ_n loss(J_n w, y_n) + ½ ‖w‖²_Λ, without the network's offset."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from torch_lla_em.inference.prior import Prior
from torch_lla_em.problem import Problem, WhitenedLoss
from torch_lla_em.solvers import SGD, Newton

Precondition = Callable[[Tensor], Tensor]


class LinearMode(NamedTuple):
    """The mode of the linear model, and how well it is known."""

    w: Tensor
    """w_lin, shape (P,)."""

    loss: float
    """Σ_n -log p(y_n | J_n w_lin)."""

    error: float
    """A bound on ‖w - w*‖_Λ / ‖w‖_Λ: the gradient of the whole over the norm."""

    passes: int
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
    if not minimum.converged:
        warnings.warn(
            f"The linear mode is known to a relative error of {minimum.error:.1e} only, not "
            f"{solver.tolerance:.1e}, after {minimum.passes} passes. {_remedy(solver)}",
            stacklevel=2,
        )
    w = deviation * minimum.x
    return LinearMode(w, minimum.loss, minimum.error, minimum.passes, minimum.converged)


def _remedy(solver: Newton | SGD) -> str:
    if isinstance(solver, SGD):
        return "Give SGD more epochs, another learning_rate, or use the default solver."
    return "Raise `tolerance`, or convert the model and its data to float64."
