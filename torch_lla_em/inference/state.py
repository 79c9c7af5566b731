"""Where a fit stands."""

from __future__ import annotations

from math import inf, nan
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.inference.span_problem import SpanProblem
from torch_lla_em.problem import Hessian

NONE_YET = torch.zeros(0, device="cpu")
"""What a state has of a posterior before the first solution."""


class Cut(NamedTuple):
    """A solution over a span that the budget has cut, which goes on after so many blocks."""

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
    """Solutions for λ, σ and H so far, by a solver steps; directions at the last one; and how often
    a full span was restricted."""

    last: tuple[float, float] | None = None
    """log λ at the beginning of the last steps, and that of MacKay's update there, for a secant."""

    cut: Cut | None = None
    """The solution in which the fit has stopped, if it goes on there."""

    moved: Tensor | float = inf
    """Changes of log λ (and log σ²) by the last solution, relative to the Monte Carlo error of log
    λ."""

    converged: bool = False
    why: str = ""
    """Whether λ, σ and H stay fixed; and what ended the fit: empty, it goes on."""


class OfSpan(NamedTuple):
    """What a span adds to a state: H, and what follows from it, for this rank's examples, or over
    the span in float64."""

    H: Hessian
    G: Tensor
    eta: Tensor
    """G over the span, (m, m), and coordinates of η ~ N(0, G), (K, m)."""

    outputs: Tensor
    """J m, (N, ..., C)."""

    problem: SpanProblem
    S_noise: Tensor
    """The problem over the span at this H and σ, and S ε with S Sᵀ = H, (K, N, ..., C)."""

    residuals: Tensor | None = None
    """Residuals of samples and mean, (K + 1, P): the next directions."""


class OfHead(NamedTuple):
    """What the fit of a last layer by its features adds to a state, for this rank's examples."""

    H: Hessian
    blocks: tuple[Tensor, Tensor | None]
    """Blocks of G for the preconditioner, at an earlier H."""

    outputs: Tensor = NONE_YET
    """J m, (N, ..., C)."""

    deviations: Tensor = NONE_YET
    """Draws of the outputs less J m, (S, N, ..., C)."""


class Stored(NamedTuple):
    """What a checkpoint stores of ``OfSpan``, from which the rest follows, for the examples of all
    ranks."""

    H: Tensor | None
    """The values of H; None: it is that at the network's outputs."""

    G: Tensor
    eta: Tensor
    outputs: Tensor
    residuals: Tensor | None


class StoredHead(NamedTuple):
    """What a checkpoint stores of ``OfHead``: the values of H for the examples of all ranks, and
    blocks of G."""

    H: Tensor
    blocks: tuple[Tensor, Tensor | None]


class State(NamedTuple):
    """λ, () or (blocks,), and σ, () or (C,), None if it is not learnt; the posterior at these; and
    how far the fit has come."""

    precision: Tensor
    sigma: Tensor | None = None
    mean: Tensor = NONE_YET
    samples: Tensor = NONE_YET
    """The mode m, (P,), and w_k, (K, P); or their coordinates in the span, (m,) and (K, m)."""

    loss: float = nan
    """E[-log p(y | J w)] under the posterior; without draws that at the mode."""

    gamma: Tensor = NONE_YET
    bounds: Tensor = NONE_YET
    certificate: Tensor = NONE_YET
    """γ, the bound on the log evidence by it, and the bound on the error, of every sample, (K,); γ
    also (K, blocks)."""

    norm: Tensor = NONE_YET
    """‖m‖² in scaled parameters, () or (blocks,)."""

    errors: tuple[float, float] = (inf, inf)
    """Numerical errors of samples and mean, in posterior standard deviations, and relative to the
    mean's norm."""

    fate: Fate = Fate()
    span: OfSpan | None = None
    head: OfHead | None = None
    """Both None: H is at the network's outputs, in every pass."""

    @property
    def in_span(self) -> OfSpan:
        """What a fit over a span adds."""
        assert self.span is not None
        return self.span

    @property
    def in_head(self) -> OfHead:
        """What a fit of a last layer by its features adds."""
        assert self.head is not None
        return self.head

    @property
    def of_examples(self) -> OfSpan | OfHead:
        """What a fit adds whose H moves."""
        of_fit = self.span or self.head
        assert of_fit is not None
        return of_fit
