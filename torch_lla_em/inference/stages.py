"""The stages of the method that EM repeats: samples, mode, and the updates of λ and σ."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.inference.prior import Prior, StochasticPrior
from torch_lla_em.problem import Problem, WhitenedGGN
from torch_lla_em.runtime import PRECISION_BOUNDS, or_float64, report
from torch_lla_em.solvers import BlockCG, DivergenceError, Newton, is_accurate

LEAST_FREEDOM = 0.05
"""Smallest N - γ in the update of σ, relative to the number N of targets."""


class PosteriorSamples(NamedTuple):
    """Zero-mean samples of the posterior, with error bounds and their γ."""

    w: Tensor
    """w_k, shape (K, P)."""

    certificate: Tensor
    """(K,): |J(x)(w_k - w_k*)| is at most this many posterior standard deviations at any x."""

    effective_dims: Tensor
    """γ of every sample, (K,) or (K, blocks)."""

    function_space_dims: Tensor
    """⟨w_k, G w_k⟩ of every sample, (K,): the paper's estimator of γ."""

    error: float
    """√(mean certificate² / max(1, γ)), which is compared with ``tolerance``."""

    passes: int
    """K-column passes over the data."""

    converged: bool
    """Whether the error met the solver's tolerance."""


def optimise_samples(
    problem: Problem,
    noise: StochasticPrior,
    precision: Tensor,
    solver: Any = BlockCG(),
    start: Tensor | None = None,
) -> PosteriorSamples:
    """Compute samples w_k = argmin_w ½ ‖w - w0_k‖²_Λ + ½ Σ_n ‖J_n w‖²_{H_n} ~ N(0, (G + Λ)⁻¹), by K linear systems.

    Args:
        problem (Problem): The network, the likelihood and the data.
        noise (StochasticPrior): The random probes, with their prior.
        precision (Tensor): Prior precision λ, shape () or (blocks,).
        solver (BlockCG or SGD): The solver with its options. Default BlockCG().
        start (Tensor, optional): Initial samples, shape (K, P). Default None: zeros.

    Returns:
        ``PosteriorSamples`` with the samples ``w``, shape (K, P), the error bound ``certificate``
        of each, and the ``effective_dims`` γ.

    Raises:
        DivergenceError: If the solver diverges, or the error is too large for the samples to be used.

    Example:
        >>> samples = optimise_samples(problem, noise, torch.tensor(1.0)).w
    """
    prior, deviation = noise.prior, noise.prior.deviation(precision)
    x = None if start is None else prior.whitened(start, precision)
    product = WhitenedGGN(problem, deviation)
    solution = solver.solve(product, noise.right_hand_side(precision), x)
    refuse_noise(solution.error, precision, problem.dtype)
    if not is_accurate(solution.error, solver.tolerance):
        stagnates = solution.passes < getattr(solver, "max_passes", 0)
        more = (
            "Increase" if stagnates else f"Allow {type(solver).__name__} more passes, or increase"
        )
        report(
            "warn",
            f"The samples are not as accurate as their tolerance asks. {more} Compute(tolerance=){or_float64(problem.dtype)}.",
        )
    # ½(⟨w, G w⟩ + ‖Λ^{-1/2} ξ - w‖²_Λ): the terms are independent and have mean γ. The second, which cannot be negative, is
    # used alone for the γ of a block, and if rounding dominates the first, a difference of numbers close to ‖Λ^½ w‖².
    gamma = prior.sum_of_squares(noise.xi - solution.x)
    if not prior.layerwise:
        rounding = torch.finfo(solution.x.dtype).eps * prior.sum_of_squares(solution.x)
        half = 0.5 * (solution.energy + gamma)
        gamma = torch.where(solution.energy > rounding, half, gamma)
    own = solution.energy, solution.error, solution.passes, solution.converged
    return PosteriorSamples(deviation * solution.x, solution.certificate, gamma, *own)


def refuse_noise(error: float, precision: Tensor, dtype: torch.dtype, usable: float = 1e3) -> None:
    """Raise an error if the numerical error is above the largest usable one."""
    if error > usable:
        raise DivergenceError(
            f"The posterior at a prior precision of {precision.min().item():.1e} has a numerical "
            f"error of {error:.1e} and cannot be used: the prior is so wide, or the outputs are "
            "so large, that rounding dominates. Use a larger `prior_precision`, or inputs scaled as "
            f"in training{or_float64(dtype)}."
        )


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
    solver: Any = Newton(),
    start: Tensor | None = None,
) -> LinearMode:
    """Find the mode of the linear model, w_lin = argmin_w Σ_n loss(J_n w, y_n) + ½ ‖w‖²_Λ.

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
        >>> mode = optimise_MAP(problem, noise.prior, torch.tensor(1.0))
    """
    deviation = prior.deviation(precision)
    x = problem.zeros(1)[0] if start is None else prior.whitened(start, precision)
    minimum = solver.minimise(WhitenedGGN(problem, deviation), x)
    mode = LinearMode(deviation * minimum.x, *minimum[1:])
    if not mode.converged:
        report(
            "warn",
            f"The mode is not as accurate as its tolerance asks. Increase Compute(tolerance=){or_float64(problem.dtype)}.",
        )
    return mode


def function_space_Mackay_update(
    effective_dim: Tensor, squared_norm: Tensor, precision: Tensor
) -> Tensor:
    """Return MacKay's update of the prior precision, λ ← γ / ‖w_lin‖², within 1e-20 and 1e20.

    Args:
        effective_dim (Tensor): γ, shape () or (blocks,): the mean of ``effective_dims`` of
            ``optimise_samples`` over samples.
        squared_norm (Tensor): ‖w_lin‖² in scaled coordinates, shape () or (blocks,):
            ``prior.squared_norm(mode.w)`` of the mode that ``optimise_MAP`` returns.
        precision (Tensor): The current λ. Blocks that the data do not determine (γ = 0) keep it.

    Returns:
        The new λ, shape () or (blocks,).

    Example:
        >>> gamma, squared_norm = torch.tensor(8.0), torch.tensor(4.0)
        >>> float(function_space_Mackay_update(gamma, squared_norm, torch.tensor(1.0)))
        2.0
    """
    proposed = effective_dim / squared_norm
    return torch.where(proposed > 0, proposed, precision).clamp(*PRECISION_BOUNDS)


def mackay_noise(residual: Tensor, effective_dim: Tensor, count: Tensor) -> Tensor:
    """Return σ ← √(Σ(y - J w_lin)² / (N - γ)), for residual sums and counts of equal shape."""
    return (residual / torch.maximum(count - effective_dim, LEAST_FREEDOM * count)).sqrt()


def count_and_rounding(problem: Problem, sigma: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of targets and the rounding error of Σ(y - J w)², the shape of σ, from Σ y²."""
    eps, number = torch.finfo(problem.dtype).eps, problem.data.facts.num_targets
    count = torch.full_like(sigma, number / sigma.numel())
    if problem.moments is not None:
        means = problem.moments[0].square().to(sigma)
        targets = targets + eps * count * (means if sigma.dim() else means.mean())
    return count, eps * targets
