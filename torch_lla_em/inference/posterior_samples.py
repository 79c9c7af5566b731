"""E-step, samples: w_k = argmin_w ½ ‖w - w0_k‖²_Λ + ½ Σ_n ‖J_n w‖²_{H_n} ~ N(0, (G + Λ)⁻¹)."""

from __future__ import annotations

import warnings
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torch_lla_em.inference.prior import Prior
from torch_lla_em.inference.stochastic_prior import StochasticPrior
from torch_lla_em.problem import Problem, WhitenedGGN
from torch_lla_em.solvers import SGD, BlockCG, DeflatedCG, DivergenceError, Solution

# an error of so many posterior standard deviations
_NOTHING = 1e3


class Solver(Protocol):
    """Anything that solves (A + I) X = B, from a start or from scratch."""

    @property
    def tolerance(self) -> float: ...

    def solve(self, product: WhitenedGGN, b: Tensor, start: Tensor | None = None) -> Solution: ...


class PosteriorSamples(NamedTuple):
    """Zero-mean samples of the posterior, how well they are known, and their γ."""

    w: Tensor
    """w_k, shape (K, P)."""

    certificate: Tensor
    """(K,): |J(x)(w_k - w_k*)| is at most this many posterior standard deviations at any x."""

    effective_dims: Tensor
    """γ of every sample, (K,) or (K, blocks)."""

    function_space_dims: Tensor
    """⟨w_k, G w_k⟩ of every sample, (K,): the seed estimator of γ."""

    error: float
    """√(mean certificate² / max(1, γ)), what ``tolerance`` bounds."""

    passes: int
    """K-column passes over the data."""

    converged: bool
    """Whether the error met the solver's tolerance."""

    Gw: Tensor
    """G w_k, shape (K, P), which spares a pass to whoever starts from here."""


class Start(NamedTuple):
    """Weights to start from, whose G w is known."""

    w: Tensor
    """(K, P)."""

    Gw: Tensor
    """(K, P)."""


def optimise_samples(
    problem: Problem,
    noise: StochasticPrior,
    precision: Tensor,
    solver: Solver = BlockCG(),
    start: Tensor | Start | None = None,
) -> PosteriorSamples:
    """Turn the stochastic prior into posterior samples, from scratch or from a start.

    Which is weights (K, P), with their G w where that is known.
    """
    prior, deviation = noise.prior, noise.prior.deviation(precision)
    b = noise.right_hand_side(precision)
    product = WhitenedGGN(problem, deviation)
    if isinstance(start, Start) and isinstance(solver, (BlockCG, DeflatedCG)):
        x = prior.whitened(start.w, precision)
        solution = solver.solve(product, b, x, deviation * start.Gw)
    else:
        w = start.w if isinstance(start, Start) else start
        x = None if w is None else prior.whitened(w, precision)
        solution = solver.solve(product, b, x)
    refuse_noise(solution.error, precision)
    if not solution.converged:
        more = "epochs" if isinstance(solver, SGD) else "passes"
        warnings.warn(
            f"The samples are known to an error of {solution.error:.1e} only, not "
            f"{solver.tolerance:.1e}, after {solution.passes} passes. Give the solver "
            f"({type(solver).__name__}) more {more}, raise `tolerance`, or use float64.",
            stacklevel=2,
        )
    return PosteriorSamples(
        deviation * solution.x,
        solution.certificate,
        effective_dims(noise, solution),
        solution.energy,
        solution.error,
        solution.passes,
        solution.converged,
        prior.whitened(solution.image, precision),
    )


def refuse_noise(error: float, precision: Tensor) -> None:
    """Raise where nothing of a posterior is left beside its error."""
    if error > _NOTHING:
        raise DivergenceError(
            f"The posterior at a prior precision of {precision.min().item():.1e} is known to an "
            f"error of {error:.1e} only, which leaves nothing of it: the prior is so wide, or "
            f"the outputs are so large, that the smaller is lost to rounding. Use a larger "
            "`prior_precision`, inputs scaled as in training, or a model and data in float64."
        )


def effective_dims(noise: StochasticPrior, solution: Solution) -> Tensor:
    """Return γ of every sample, (K,), or of every sample and block, (K, blocks).

    In all, ½(⟨w, G w⟩ + ‖Λ^{-1/2} ξ - w‖²_Λ): the two terms are independent and each has
    mean γ. Per block the second alone, which cannot turn negative; so too where the first,
    a difference of numbers near ‖Λ^½ w‖², drowns in their rounding.
    """
    prior: Prior = noise.prior
    shrunk = prior.sum_of_squares(noise.xi - solution.x)
    if prior.layerwise:
        return shrunk
    rounding = torch.finfo(solution.x.dtype).eps * prior.sum_of_squares(solution.x)
    return torch.where(solution.energy > rounding, 0.5 * (solution.energy + shrunk), shrunk)
