"""The stages of the method, and EM on a linear model, which repeats them: of the whole problem, or of a span of directions."""

from __future__ import annotations

import math
from math import inf, nan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.inference.prior import Prior, StochasticPrior
from torch_lla_em.problem import Problem, WhitenedGGN
from torch_lla_em.runtime import PRECISION_BOUNDS, or_float64, report
from torch_lla_em.solvers import BlockCG, DivergenceError, Minimum, Newton, is_accurate

STEEP = 0.9
"""Largest slope of MacKay's update in log λ that a secant takes for real. .95: λ of single networks moves by 10 %."""


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
    return PosteriorSamples(deviation * solution.x, solution.certificate, gamma, solution.error)


def refuse_noise(error: float, precision: Tensor, dtype: torch.dtype, usable: float = 1e3) -> None:
    """Raise an error if the numerical error is above the largest usable one."""
    if error > usable:
        raise DivergenceError(
            f"The posterior at a prior precision of {precision.min().item():.1e} has a numerical "
            f"error of {error:.1e} and cannot be used: the prior is so wide, or the outputs are "
            "so large, that rounding dominates. Use a larger `prior_precision`, or inputs scaled as "
            f"in training{or_float64(dtype)}."
        )


def optimise_MAP(
    problem: Problem,
    prior: Prior,
    precision: Tensor,
    solver: Any = Newton(),
    start: Tensor | None = None,
) -> Minimum:
    """Find the mode of the linear model, w_lin = argmin_w Σ_n loss(J_n w, y_n) + ½ ‖w‖²_Λ.

    Args:
        problem (Problem): The network, the likelihood and the data.
        prior (Prior): The prior of ``get_sto_samples``.
        precision (Tensor): Prior precision λ, shape () or (blocks,).
        solver (Newton): The solver with its options. Default Newton().
        start (Tensor, optional): Initial weights, shape (P,). Default None: zeros.

    Returns:
        A ``Minimum`` with the weights ``w``, the ``loss`` Σ_n -log p(y_n | J_n w), and a bound on the relative ``error`` ‖w - w*‖_Λ / ‖w‖_Λ.

    Raises:
        DivergenceError: If the loss cannot be decreased, or is not finite.

    Example:
        >>> mode = optimise_MAP(problem, noise.prior, torch.tensor(1.0))
    """
    deviation = prior.deviation(precision)
    x = problem.zeros(1)[0] if start is None else prior.whitened(start, precision)
    minimum: Minimum = solver.minimise(WhitenedGGN(problem, deviation), x)
    if not minimum.converged:
        report(
            "warn",
            f"The mode is not as accurate as its tolerance asks. Increase Compute(tolerance=){or_float64(problem.dtype)}.",
        )
    return minimum._replace(w=deviation * minimum.w)


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


def mackay_noise(model: Any, q: State) -> tuple[Tensor, Tensor]:
    """Return σ ← √(Σ(y - J w_lin)² / (N - γ)), () or (C,), and whether it may be lost to rounding."""
    problem, sigma, K = model.problem, q.sigma, len(q.samples)
    sums = q.mean.new_zeros(2 + K * sigma.dim(), sigma.numel(), dtype=torch.float64)
    for y, mean, pushed in model.outputs(q):
        each = y.to(mean) - mean, y, *pushed
        squares = [part.double().square().reshape(-1, sigma.numel()).sum(0) for part in each]
        sums += torch.stack(squares).to(sums)
    residual, targets, *of_samples = problem.data.group.sum(sums).to(sigma.device)
    if sigma.dim():
        dims = torch.stack(of_samples).mean(0) / sigma**2
    else:
        residual, targets, dims = residual[0], targets[0], q.gamma.mean(0).sum().to(sigma)
    eps, number = torch.finfo(problem.dtype).eps, problem.data.facts.num_targets
    count = torch.full_like(sigma, number / sigma.numel())
    if problem.moments is not None:
        means = problem.moments[0].square().to(sigma)
        targets = targets + eps * count * (means if sigma.dim() else means.mean())
    left = torch.maximum(count - dims, 0.1 * count)  # γ may come close to N
    learnt = (torch.maximum(residual, eps * targets) / left).sqrt()
    return torch.where(learnt > 0, learnt, sigma), residual < 10 * eps * targets  # all may be 0


class Cut(NamedTuple):
    """A solution over a span that the budget has cut, which goes on after so many blocks."""

    blocks: int
    precision: Tensor
    sigma: Tensor | None
    error: float
    """λ, σ, and the error of the samples, at the beginning of the solution."""


class State(NamedTuple):
    """Where a fit stands: λ, () or (blocks,), and σ, () or (C,), None if it is not learnt; the posterior; and its fate.

    A span has coordinates in float64. H is that of this rank's examples; None: at the network's outputs, in every pass.
    """

    precision: Tensor
    sigma: Tensor | None = None
    H: Any = None
    mean: Tensor | None = None
    samples: Tensor | None = None
    """The mode m, (P,), and w_k, (K, P); or their coordinates in the span, (m,) and (K, m)."""

    loss: float = nan
    """E[-log p(y | J w)] under q; without draws that at the mode."""

    gamma: Tensor | None = None
    bounds: Tensor | None = None
    certificate: Tensor | None = None
    """γ, the bound on the log evidence by it, and the bound on the error, of every sample, (K,); γ also (K, blocks)."""

    norm: Tensor | None = None
    """‖m‖² in scaled parameters, () or (blocks,)."""

    errors: tuple[float, float] = (inf, inf)
    """Numerical errors of samples and mean, in posterior standard deviations, and relative to the mean's norm."""

    number: int = 0
    solved: int = 0
    restarts: int = 0
    """Solutions for λ, σ and H so far, by a solver steps; directions at the last one; and how often a full span was restricted."""

    last: tuple[float, float] | None = None
    """log λ at the beginning of the last steps, and that of MacKay's update there, for a secant."""

    cut: Cut | None = None
    """The solution in which the fit has stopped, if it goes on there."""

    moved: Tensor | float = inf
    """Changes of log λ (and log σ²) by the last solution, relative to the Monte Carlo error of log λ."""

    converged: bool = False
    why: str = ""
    """Whether λ, σ and H stay fixed; and what ended the fit: empty, it goes on."""

    G: Tensor | None = None
    eta: Tensor | None = None
    """G over the span, (m, m), and coordinates of η ~ N(0, G), (K, m)."""

    residuals: Tensor | None = None
    """Residuals of samples and mean, (K + 1, P): the next directions."""

    outputs: Tensor | None = None
    """J m, (N, ..., C)."""

    curved: Any = None
    """The problem over a span at this H and σ, which follows from the rest and is not stored."""


def e_step(model: Any, q: State) -> State:
    """Return the posterior at λ, σ and H of a state: samples and mode; ``model`` is ``OverSpan`` or ``Whole``."""
    problem, noise, solver, search = model.at(q)
    samples = optimise_samples(problem, noise, q.precision, solver, q.samples)
    problem = model.expecting(problem, samples, q.precision)
    mode = optimise_MAP(problem, noise.prior, q.precision, search, q.mean)
    found: State = model.found(q, samples, mode, problem)
    return found


def m_step(model: Any, q: State) -> tuple[Tensor, Tensor | None]:
    """Return λ and σ by MacKay's updates from a posterior."""
    precision = function_space_Mackay_update(q.gamma.mean(0), q.norm, q.precision)
    return precision, None if q.sigma is None else mackay_noise(model, q)[0]


def accelerated(
    here: float, there: float, last: tuple[float, float] | None, most: float = math.log(2)
) -> float:
    """Return the change of log λ after which a secant expects none, at most ``most``.

    MacKay's update of log λ goes from here to there, and in an earlier step from ``last[0]`` to ``last[1]``. Without an
    earlier step, or if the slope through both is below -1, the change is that of the update.
    """
    slope = 0.0
    if last is not None and here != last[0]:
        slope = (there - last[1]) / (here - last[0])
    way = (there - here) / (1 - min(slope if slope > -1 else 0.0, STEEP))
    return max(-most, min(most, way))
