"""EM on a linear model: the posterior at given λ, σ and H (E-step), and the λ and σ that follow (M-step).

The same two functions serve the whole problem, with iterative solvers (``whole.py``), and its restriction to a span of
directions, with dense algebra (``over_span.py``).
"""

from __future__ import annotations

from math import inf, nan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.inference.linear_mode import optimise_MAP
from torch_lla_em.inference.mackay import function_space_Mackay_update, mackay_noise
from torch_lla_em.inference.posterior_samples import optimise_samples


class State(NamedTuple):
    """Where a fit stands. A checkpoint stores the first part, from which the second follows without a pass."""

    precision: Tensor
    """λ, () or (blocks,)."""

    sigma: Tensor | None = None
    """σ, () or (C,); None if it is not learnt."""

    H: Any = None
    """H of this rank's examples; None if it is that at the network's outputs, for every example of a pass."""

    mean: Tensor | None = None
    """The mode m, (P,), or its coordinates in the span, (m,), in float64."""

    loss: float = nan
    """E[-log p(y | J w)] under q; without draws that at the mode."""

    number: int = 0
    """Solutions for λ, σ and H so far: over a span, and by a solver steps."""

    solved: int = 0
    """Directions of the span at the last of them."""

    last: tuple[float, float] | None = None
    """log λ at the beginning of the last steps, and that of MacKay's update there, for a secant."""

    moved: Tensor | float = inf
    """Changes of log λ (and log σ²) by the last solution, relative to the Monte Carlo error of log λ."""

    peak: float = -inf
    """The highest bound on the log evidence at which a solution has ended."""

    converged: bool = False
    """Whether λ, σ and H stay fixed."""

    why: str = ""
    """What ended the fit; empty: it goes on."""

    errors: tuple[float, float] = (inf, inf)
    """Numerical errors of samples and mean, in posterior standard deviations, and relative to the mean's norm."""

    restarts: int = 0
    """How often the span was restricted, since there was no memory for more directions."""

    samples: Tensor | None = None
    """w_k, (K, P), or their coordinates in the span."""

    G: Tensor | None = None
    """G over the span, (m, m), in float64."""

    eta: Tensor | None = None
    """Coordinates of η ~ N(0, G) in the span, (K, m), in float64."""

    residuals: Tensor | None = None
    """Residuals of samples and mean, (K + 1, P): the next directions."""

    gamma: Tensor | None = None
    """γ of every sample, (K,) or (K, blocks)."""

    bounds: Tensor | None = None
    """The bound on the log evidence by γ and the log det of every sample, (K,)."""

    certificate: Tensor | None = None
    """The bound on the error of every sample, (K,)."""

    norm: Tensor | None = None
    """‖m‖² in scaled parameters, () or (blocks,)."""

    outputs: Tensor | None = None
    """J m, (N, ..., C), over a span."""

    # what follows

    curved: Any = None
    """The problem at this H and σ."""


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
    precision, sigma = function_space_Mackay_update(q.gamma.mean(0), q.norm, q.precision), q.sigma
    if sigma is not None:
        residual, least, dims, count = model.noise_sums(q)
        learnt = mackay_noise(torch.maximum(residual, least), dims, count)
        sigma = torch.where(learnt > 0, learnt, sigma)  # all targets are 0
    return precision, sigma
