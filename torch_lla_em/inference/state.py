"""The options of a fit, and its state."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, nan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.inference.span_problem import SpanProblem
from torch_lla_em.problem import Hessian

NONE_YET = torch.zeros(0, device="cpu")
"""An empty tensor, for the posterior of a state before the first solution."""


@dataclass(frozen=True)
class FitOptions:
    """Options of a fit."""

    num_samples: int = 32
    seed: int = 0
    g_prior: bool | None = None
    layerwise: bool = False
    solver: Any = None
    curvature: str | None = None
    tolerance: float = 0.03
    """Largest error of the final samples and mode, in posterior standard deviations."""

    span_memory: float | None = None
    """Largest size of the span in bytes; None: half of the free memory."""

    em_steps: int = 20
    prior_precision: Tensor | None = None
    """Largest number of steps of λ (0 keeps λ fixed), and the initial λ (None: chosen from the
    data)."""


class Cut(NamedTuple):
    """A solution over a span that was interrupted by the budget, with the number of its blocks so
    far."""

    blocks: int
    precision: Tensor
    sigma: Tensor | None
    error: float
    """λ, σ, and the error of the samples, at the beginning of the solution."""


class Fate(NamedTuple):
    """How far a fit has come, and why it has ended."""

    number: int = 0
    solved: int = 0
    restarts: int = 0
    """The number of solutions for λ, σ and H so far (without a span, of steps); the number of
    directions at the last one; and how often a full span was restricted."""

    last: tuple[float, float] | None = None
    """log λ at the beginning of the last steps, and the log λ of the update there, for a secant."""

    cut: Cut | None = None
    """The interrupted solution with which the fit continues; None if there is none."""

    moved: Tensor | float = inf
    """The change of log λ (and of log σ²) by the last solution, relative to the Monte Carlo error
    of log λ; the change itself for a last layer by its features."""

    converged: bool = False
    why: str = ""
    """Whether λ, σ and H have converged; and the reason why the fit ended, empty while it
    continues."""


class OfSpan(NamedTuple):
    """The part of a state for a span: H and its consequences, for this rank's examples or, in
    float64, over the span."""

    H: Hessian
    G: Tensor
    eta: Tensor
    """G over the span, (m, m), and coordinates of η ~ N(0, G), (K, m)."""

    outputs: Tensor
    """J m, (N, ..., C)."""

    problem: SpanProblem
    S_noise: Tensor
    """The problem over the span at this H and σ; and S ε, (K, N, ..., C), with S Sᵀ = H."""

    residuals: Tensor | None = None
    """The residuals of samples and mean, (K + 1, P), which are the next directions."""


class OfHead(NamedTuple):
    """The part of a state for a last layer fitted by its features, for this rank's examples."""

    H: Hessian
    blocks: tuple[Tensor, Tensor | None]
    """Blocks of G for the preconditioner, at an earlier H."""

    outputs: Tensor = NONE_YET
    """J m, (N, ..., C)."""

    deviations: Tensor = NONE_YET
    """Draws of the outputs minus J m, (S, N, ..., C)."""


class Stored(NamedTuple):
    """The parts of ``OfSpan`` that a checkpoint stores, for the examples of all ranks; the rest
    follows from them."""

    H: Tensor | None
    """The values of H; None if H is evaluated at the network's outputs."""

    G: Tensor
    eta: Tensor
    outputs: Tensor
    residuals: Tensor | None


class StoredHead(NamedTuple):
    """The parts of ``OfHead`` that a checkpoint stores: the values of H for the examples of all
    ranks, and blocks of G."""

    H: Tensor
    blocks: tuple[Tensor, Tensor | None]


class State(NamedTuple):
    """The state of a fit: λ, () or (blocks,); σ, () or (C,), None if it is not learnt; the
    posterior at these values; and the progress of the fit."""

    precision: Tensor
    sigma: Tensor | None = None
    mean: Tensor = NONE_YET
    samples: Tensor = NONE_YET
    """The mode m, (P,), and w_k, (K, P); or their coordinates in the span, (m,) and (K, m)."""

    loss: float = nan
    """E[-log p(y | J w)] under the posterior; without draws, -log p(y | J w) at the mode."""

    gamma: Tensor = NONE_YET
    bounds: Tensor = NONE_YET
    certificate: Tensor = NONE_YET
    """For every sample, (K,): γ, also (K, blocks); the bound on the log evidence that follows from
    it; and the bound on the numerical error."""

    norm: Tensor = NONE_YET
    """‖m‖² in scaled parameters, () or (blocks,)."""

    errors: tuple[float, float] = (inf, inf)
    """Numerical errors of the samples, in posterior standard deviations, and of the mean, relative
    to its norm."""

    fate: Fate = Fate()
    span: OfSpan | None = None
    head: OfHead | None = None
    """Both are None if a solver makes passes over the data, with H at the network's outputs."""

    @property
    def in_span(self) -> OfSpan:
        """The part of the state for a span."""
        assert self.span is not None
        return self.span

    @property
    def in_head(self) -> OfHead:
        """The part of the state for a last layer that is fitted by its features."""
        assert self.head is not None
        return self.head

    @property
    def of_examples(self) -> OfSpan | OfHead:
        """The part of the state for a span or for a last layer."""
        of_fit = self.span or self.head
        assert of_fit is not None
        return of_fit
