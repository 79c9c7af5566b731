"""EM on a linear model: the posterior at given λ, σ and H (E-step), and the λ and σ that follow (M-step).

The same two functions serve the whole problem, with iterative solvers (``whole.py``), and its restriction to a span of
directions, with dense algebra (``over_span.py``).
"""

from __future__ import annotations

from math import inf, nan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.inference.stages import (
    function_space_Mackay_update,
    mackay_noise,
    optimise_MAP,
    optimise_samples,
)


class State(NamedTuple):
    """Where a fit stands. Coordinates in a span are in float64."""

    precision: Tensor
    """λ, () or (blocks,)."""

    sigma: Tensor | None = None
    """σ, () or (C,); None if it is not learnt."""

    H: Any = None
    """H of this rank's examples; None if it is that at the network's outputs, for every example of a pass."""

    mean: Tensor | None = None
    """The mode m, (P,), or its coordinates in the span, (m,)."""

    samples: Tensor | None = None
    """w_k, (K, P), or their coordinates in the span."""

    loss: float = nan
    """E[-log p(y | J w)] under q; without draws that at the mode."""

    gamma: Tensor | None = None
    """γ of every sample, (K,) or (K, blocks)."""

    bounds: Tensor | None = None
    """The bound on the log evidence by γ and the log det of every sample, (K,)."""

    norm: Tensor | None = None
    """‖m‖² in scaled parameters, () or (blocks,)."""

    certificate: Tensor | None = None
    """The bound on the error of every sample, (K,)."""

    errors: tuple[float, float] = (inf, inf)
    """Numerical errors of samples and mean, in posterior standard deviations, and relative to the mean's norm."""

    # what the schedule decides by

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

    restarts: int = 0
    """How often the span was restricted, since there was no memory for more directions."""

    # over a span

    G: Tensor | None = None
    """G, (m, m)."""

    eta: Tensor | None = None
    """Coordinates of η ~ N(0, G), (K, m)."""

    residuals: Tensor | None = None
    """Residuals of samples and mean, (K + 1, P): the next directions."""

    outputs: Tensor | None = None
    """J m, (N, ..., C)."""

    curved: Any = None
    """The problem at this H and σ, which follows from the rest and is not stored."""


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


def slope_of(here: float, there: float, last: tuple[float, float] | None) -> float:
    """Return the slope of MacKay's update of log λ, from here to there, by a secant; 0 without one, or below -1."""
    if last is None or here == last[0]:
        return 0.0
    slope = (there - last[1]) / (here - last[0])
    return slope if slope > -1 else 0.0
