"""Where a fit stands."""

from __future__ import annotations

from math import inf, nan
from typing import Any, NamedTuple

from torch import Tensor

from torch_lla_em.inference.span_problem import SpanProblem


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

    problem: SpanProblem | None = None
    S_noise: Tensor | None = None
    """The problem over the span at this H and σ, and S ε with S Sᵀ = H, (K, N, ..., C): they follow, and are not stored."""
