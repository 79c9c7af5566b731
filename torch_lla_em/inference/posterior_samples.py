"""E-step, samples: w_k = argmin_w ½ ‖w - w0_k‖²_Λ + ½ Σ_n ‖J_n w‖²_{H_n} ~ N(0, (G + Λ)⁻¹)."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torch_lla_em.inference.prior import Prior
from torch_lla_em.inference.stochastic_prior import StochasticPrior
from torch_lla_em.problem import Problem, WhitenedGGN
from torch_lla_em.runtime import report
from torch_lla_em.solvers import BlockCG, DivergenceError, Solution, is_accurate

# largest usable error, in posterior standard deviations
_NOTHING = 1e3


class Solver(Protocol):
    """A solver of (A + I) X = B."""

    @property
    def tolerance(self) -> float: ...

    def solve(self, product: WhitenedGGN, b: Tensor, start: Tensor | None = None) -> Solution: ...


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
    solver: Solver = BlockCG(),
    start: Tensor | None = None,
) -> PosteriorSamples:
    """Compute posterior samples from the random probes, by solving K linear systems.

    Args:
        problem (Problem): The network, the likelihood and the data.
        noise (StochasticPrior): The random probes, with their prior.
        precision (Tensor): Prior precision λ, shape () or (blocks,).
        solver (Solver): The solver with its options. Default BlockCG().
        start (Tensor, optional): Initial samples, shape (K, P). Default None: zeros.

    Returns:
        ``PosteriorSamples`` with the samples ``w``, shape (K, P), the error bound ``certificate``
        of each, and the ``effective_dims`` γ.

    Raises:
        DivergenceError: If the solver diverges, or the error is too large for the samples to be used.

    Example:
        >>> from torch_lla_em.data import Data
        >>> from torch_lla_em.jacobian import LinearModel, Network, ParameterLayout
        >>> from torch_lla_em.problem import Problem
        >>> net = torch.nn.Linear(2, 3)
        >>> linear = LinearModel(Network(net), ParameterLayout.of(net, ["weight", "bias"]))
        >>> data = Data([(torch.randn(20, 2), torch.arange(20) % 3)], torch.device("cpu"))
        >>> problem = Problem(linear, Classification(), data)
        >>> noise = get_sto_samples(problem, num_samples=4)
        >>> optimise_samples(problem, noise, torch.tensor(10.0)).w.shape
        torch.Size([4, 9])
    """
    prior, deviation = noise.prior, noise.prior.deviation(precision)
    x = None if start is None else prior.whitened(start, precision)
    product = WhitenedGGN(problem, deviation)
    solution = solver.solve(product, noise.right_hand_side(precision), x)
    refuse_noise(solution.error, precision)
    if not is_accurate(solution.error, solver.tolerance):
        report(
            "warn",
            f"The samples have a numerical error of {solution.error:.2g} posterior standard deviations "
            f"after {solution.passes} passes, above the tolerance of {solver.tolerance:.2g}. Allow {type(solver).__name__} more "
            "passes, increase `tolerance`, or use float64.",
        )
    return PosteriorSamples(
        deviation * solution.x,
        solution.certificate,
        effective_dims(noise, solution),
        solution.energy,
        solution.error,
        solution.passes,
        solution.converged,
    )


def refuse_noise(error: float, precision: Tensor) -> None:
    """Raise an error if the numerical error is as large as the posterior itself."""
    if error > _NOTHING:
        raise DivergenceError(
            f"The posterior at a prior precision of {precision.min().item():.1e} has a numerical "
            f"error of {error:.1e} and cannot be used: the prior is so wide, or the outputs are "
            "so large, that rounding dominates. Use a larger `prior_precision`, inputs scaled as "
            "in training, or a model and data in float64."
        )


def effective_dims(noise: StochasticPrior, solution: Solution) -> Tensor:
    """Return γ of every sample, (K,), or of every sample and block, (K, blocks).

    The total is ½(⟨w, G w⟩ + ‖Λ^{-1/2} ξ - w‖²_Λ): the terms are independent and have mean γ. The
    second term, which cannot be negative, is used alone for the γ of a block, and if rounding
    dominates the first term, a difference of numbers close to ‖Λ^½ w‖².
    """
    prior: Prior = noise.prior
    shrunk = prior.sum_of_squares(noise.xi - solution.x)
    if prior.layerwise:
        return shrunk
    rounding = torch.finfo(solution.x.dtype).eps * prior.sum_of_squares(solution.x)
    return torch.where(solution.energy > rounding, 0.5 * (solution.energy + shrunk), shrunk)
