"""The second stage: the mode of the linear model."""

from __future__ import annotations

from torch import Tensor

from torch_lla_em.inference.linear_problem import LinearProblem, Whitened
from torch_lla_em.inference.prior import Prior
from torch_lla_em.runtime import or_float64, report
from torch_lla_em.solvers import Minimum, Newton, Search


def optimise_MAP(
    problem: LinearProblem,
    prior: Prior,
    precision: Tensor,
    solver: Search = Newton(),
    start: Tensor | None = None,
) -> Minimum:
    """Find the mode of the linear model, w_lin = argmin_w Σ_n loss(J_n w, y_n) + ½ ‖w‖²_Λ.

    Args:
        problem (LinearProblem): The network, the likelihood and the data: a ``Problem``.
        prior (Prior): The prior of ``get_sto_samples``.
        precision (Tensor): Prior precision λ, shape () or (blocks,).
        solver (Newton): The solver with its options. Default Newton().
        start (Tensor, optional): Initial weights, shape (P,). Default None: zeros.

    Returns:
        A ``Minimum`` with the weights ``w``, the ``loss`` Σ_n -log p(y_n | J_n w), and a bound on
        the relative ``error`` ‖w - w*‖_Λ / ‖w‖_Λ.

    Raises:
        DivergenceError: If the loss cannot be decreased, or is not finite.

    Example:
        >>> mode = optimise_MAP(problem, probes.prior, torch.tensor(1.0))
    """
    deviation = prior.deviation(precision)
    x = problem.zeros(1)[0] if start is None else prior.whitened(start, precision)
    minimum = solver.minimise(Whitened(problem, deviation), x)
    if not minimum.converged:
        report(
            "warn",
            "The mode is less accurate than its tolerance. Increase "
            f"Compute(tolerance=){or_float64(x.dtype)}.",
        )
    return minimum._replace(w=deviation * minimum.w)
