"""E-step, mode: w_lin = argmin_w Σ_n loss(J_n w, y_n) + ½ ‖w‖²_Λ."""

from __future__ import annotations

import warnings
from dataclasses import replace
from math import inf, sqrt
from typing import NamedTuple

from torch import Tensor

from torch_lla_em.inference.prior import Prior
from torch_lla_em.problem import Problem, WhitenedLoss
from torch_lla_em.solvers import Newton, dot, norm

# largest number of gradients to find the best multiple of the trained weights
_FIRST_MODE_PASSES = 6


class LinearMode(NamedTuple):
    """The mode of the linear model, with a bound on its error."""

    w: Tensor
    """w_lin, shape (P,)."""

    loss: float
    """Σ_n -log p(y_n | J_n w_lin)."""

    error: float
    """A bound on the relative error ‖w - w*‖_Λ / ‖w‖_Λ, from the gradient of the objective."""

    passes: float
    """Single-column passes over the data."""

    converged: bool
    """Whether the error met the solver's tolerance."""


def optimise_MAP(
    problem: Problem,
    prior: Prior,
    precision: Tensor,
    solver: Newton = Newton(),
    start: Tensor | None = None,
) -> LinearMode:
    """Find the mode of the linear model.

    Args:
        problem (Problem): The network, the likelihood and the data.
        prior (Prior): The prior of ``get_sto_samples``.
        precision (Tensor): Prior precision λ, shape () or (blocks,).
        solver (Newton): The solver with its options. Default Newton().
        start (Tensor, optional): Initial weights, shape (P,). Default None: zeros.

    Returns:
        A ``LinearMode`` with the weights ``w``, the ``loss`` and a bound on the ``error``.

    Raises:
        DivergenceError: If the loss cannot be decreased, or is not finite.

    Example:
        >>> from torch_lla_em.data import Data
        >>> from torch_lla_em.jacobian import LinearModel, Network, ParameterLayout
        >>> from torch_lla_em.problem import Problem
        >>> net = torch.nn.Linear(2, 3)
        >>> linear = LinearModel(Network(net), ParameterLayout.of(net, ["weight", "bias"]))
        >>> data = Data([(torch.randn(20, 2), torch.arange(20) % 3)], torch.device("cpu"))
        >>> problem = Problem(linear, Classification(), data)
        >>> noise = get_sto_samples(problem, num_samples=4)
        >>> optimise_MAP(problem, noise.prior, torch.tensor(10.0)).w.shape
        torch.Size([9])
    """
    deviation = prior.deviation(precision)
    loss = WhitenedLoss(problem, deviation)
    x = problem.zeros(1)[0] if start is None else prior.whitened(start, precision)
    if problem.likelihood.is_quadratic:
        solver = replace(solver, forcing=0.0)
    minimum = solver.minimise(loss, x)
    mode = LinearMode(deviation * minimum.x, *minimum[1:])
    if not mode.converged:
        warnings.warn(
            f"The mode has a relative error of {mode.error:.1e} after {mode.passes:g} passes, and "
            f"did not reach the tolerance of {solver.tolerance:.1e}. Raise `tolerance`, or convert "
            "the model and its data to float64.",
            stacklevel=2,
        )
    return mode


def first_mode(problem: Problem, prior: Prior, precision: Tensor) -> Tensor:
    """Return a start for the mode, shape (P,): the best multiple of the trained weights.

    J w_MAP is close to the outputs of the network (equal up to a factor, if the network is
    homogeneous in its weights), so H there is close to the H of G. Finding the mode then takes a
    third of the passes that it takes from 0, where all classes are equally probable.
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
        best = min(best, (value + 0.5 * norm(x) ** 2, factor))
        if dot(direction, gradient + x) < 0:
            low = factor
        else:
            high = factor
        factor = 3 * low if high == inf else high / 3 if low == 0 else sqrt(low * high)
        if high < 2 * low:
            break
    return best[1] * problem.w_MAP * (prior.scale > 0)
