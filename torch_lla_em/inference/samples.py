"""The third stage: samples of the posterior, each the solution of a linear system."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.inference.linear_problem import LinearProblem, Whitened
from torch_lla_em.inference.prior import StochasticPrior
from torch_lla_em.runtime import or_float64, report
from torch_lla_em.solvers import BlockCG, DivergenceError, Solver, is_accurate


class PosteriorSamples(NamedTuple):
    """Zero-mean samples w_k of the posterior, (K, P)."""

    w: Tensor
    certificate: Tensor
    """(K,): |J(x)(w_k - w_k*)| is at most this many posterior standard deviations at any x."""

    effective_dims: Tensor
    """γ of every sample, (K,) or (K, blocks)."""

    error: float
    """√(mean certificate² / max(1, γ))."""


def optimise_samples(
    problem: LinearProblem,
    probes: StochasticPrior,
    precision: Tensor,
    solver: Solver = BlockCG(),
    start: Tensor | None = None,
) -> PosteriorSamples:
    """Compute samples w_k = argmin_w ½ ‖w - w0_k‖²_Λ + ½ Σ_n ‖J_n w‖²_{H_n} ~ N(0, (G + Λ)⁻¹), by K
    linear systems.

    Args:
        problem (LinearProblem): The network, the likelihood and the data: a ``Problem``.
        probes (StochasticPrior): The random probes, with their prior.
        precision (Tensor): Prior precision λ, shape () or (blocks,).
        solver (BlockCG or SGD): The solver with its options. Default BlockCG().
        start (Tensor, optional): Initial samples, shape (K, P). Default None: zeros.

    Returns:
        ``PosteriorSamples`` with the samples ``w``, shape (K, P), the error bound ``certificate``
        of each, and the ``effective_dims`` γ.

    Raises:
        DivergenceError: If the solver diverges, or the error is too large for the samples to be
            used.

    Example:
        >>> samples = optimise_samples(problem, probes, torch.tensor(1.0)).w
    """
    prior, deviation = probes.prior, probes.prior.deviation(precision)
    x = None if start is None else prior.whitened(start, precision)
    product = Whitened(problem, deviation)
    solution = solver.solve(product, probes.right_hand_side(precision), x)
    refuse_noise(solution.error, precision, solution.x.dtype)
    if not is_accurate(solution.error, solver.tolerance):
        stagnates = solution.passes < getattr(solver, "max_passes", 0)
        more = (
            "Increase" if stagnates else f"Allow {type(solver).__name__} more passes, or increase"
        )
        report(
            "warn",
            f"The samples are less accurate than their tolerance. {more} "
            f"Compute(tolerance=){or_float64(solution.x.dtype)}.",
        )
    # γ is estimated by ½(⟨w, G w⟩ + ‖Λ^{-1/2} ξ - w‖²_Λ), whose terms are independent and have mean
    # γ. The second, which cannot be negative, is used alone for the γ of a block, and if rounding
    # dominates the first, which is a difference of numbers close to ‖Λ^½ w‖².
    gamma = prior.sum_of_squares(probes.xi - solution.x)
    if not prior.layerwise:
        rounding = torch.finfo(solution.x.dtype).eps * prior.sum_of_squares(solution.x)
        half = 0.5 * (solution.energy + gamma)
        gamma = torch.where(solution.energy > rounding, half, gamma)
    return PosteriorSamples(deviation * solution.x, solution.certificate, gamma, solution.error)


def refuse_noise(error: float, precision: Tensor, dtype: torch.dtype, usable: float = 1e3) -> None:
    """Raise an error if the numerical error is above the largest usable one."""
    if error > usable:
        raise DivergenceError(
            f"The posterior at a prior precision of {precision.min().item():.1e} has a numerical "
            f"error of {error:.1e} and cannot be used: the prior is so wide, or the outputs are so "
            "large, that rounding dominates. Use a larger `prior_precision`, or inputs scaled as "
            f"in training{or_float64(dtype)}."
        )
