"""The Gaussian posterior over a span of directions: small dense algebra at any λ, without a pass.

q = N(m, (G + Λ)⁻¹), with G = Σ_n J_nᵀ H_n J_n. What λ, σ and H are at is left to
``fixed_curvature.py`` and ``expected_curvature.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.inference.expectations import Expectations
from torch_lla_em.inference.span import Span
from torch_lla_em.solvers import Spectrum

Solve = Callable[[Tensor], Tensor]

_SHORTEST = 1e-3
"""The shortest step of Newton's method, relative to the whole one."""

_ROUNDINGS = 10
"""Roundings of the loss that a step of Newton's method may seem to raise it by."""


class Curved(NamedTuple):
    """G over a span, from one curvature, and the noise that belongs to it."""

    G: Tensor
    """(m, m), in float64, as all that follows."""

    eta: Tensor
    """The coordinates of η, (K, m)."""

    vectors: Tensor
    """The eigenvectors of G, (m, m)."""

    spectrum: Spectrum
    """The eigenvalues of G, and ξ and η in its eigenvectors."""

    blocks: Tensor | None = None
    """The curvature itself, (N, ..., C, C), where it is an expectation."""

    @classmethod
    def of(cls, G: Tensor, xi: Tensor, eta: Tensor, blocks: Tensor | None = None) -> Curved:
        """Return G with its eigenvectors, of the coordinates of ξ and η."""
        values, vectors = torch.linalg.eigh(0.5 * (G + G.T))
        spectrum = Spectrum(values.clamp_min(0), xi @ vectors, eta @ vectors)
        return cls(G, eta, vectors, spectrum, blocks)

    def inverse(self, precision: float, noise: float = 1.0) -> Solve:
        """Return the product with (G / noise² + λ)⁻¹."""
        divisor, V = self.spectrum.eigenvalues / noise**2 + precision, self.vectors
        return lambda b: V @ ((V.T @ b) / divisor)


class Q(NamedTuple):
    """The posterior over a span."""

    precision: float
    """λ."""

    noise: float
    """σ of a Gaussian likelihood, relative to the one that G was taken at; 1 for others."""

    curved: Curved
    mean: Tensor
    """m, (m,), in float64, as the others."""

    samples: Tensor
    """(K, m), with mean zero."""

    loss: float
    """E[-log p(y | J w)]: under q where the curvature is an expectation, else at the mean."""

    bounds: Tensor
    """The log evidence, or its bound, by the γ and the log det of every sample, (K,)."""

    effective_dims: Tensor
    """γ of every sample, (K,)."""

    root: Tensor | None = None
    """A root of the covariance of every example's outputs, (N, ..., C, C), if H is expected."""

    @property
    def bound(self) -> float:
        """The mean of the bounds."""
        return self.bounds.mean().item()


class OverSpan:
    """What both kinds of curvature share: G grown with the span, and the mean by Newton steps."""

    def __init__(self, span: Span, expected: Expectations):
        self.span, self.expected = span, expected

    def outputs(self, mean: Tensor) -> Tensor:
        """Return J m, (N, ..., C)."""
        return (self.span.J @ mean.to(self.span.J)).view(self.expected.shape)

    def grown(self, known: Curved | None, with_H: Callable[[Tensor], Tensor]) -> Tensor:
        """Return G over the span; where it is known of the first directions, by the others alone."""
        J, old = self.span.J, 0 if known is None else len(known.G)
        columns = (J.T @ with_H(J[:, old:])).double()
        if known is None:
            return columns
        return torch.cat([torch.cat([known.G, columns[:old].T]), columns], dim=1)

    def slope(self, h: Tensor, root: Tensor | None) -> Tensor:
        """Return the gradient of the expected loss in the coordinates, (m,)."""
        return (self.expected.slope(h, root).flatten() @ self.span.J).double()

    def newton_step(
        self, metric: Tensor | float, mean: Tensor, root: Tensor | None, solve: Solve
    ) -> tuple[Tensor, float]:
        """Return the mean after a step that lowers E[loss] + ½ ‖m‖²_Λ, and E[loss] there.

        ``metric`` is λ, or Λ over the span, (m, m).
        """

        def pulled(m: Tensor) -> Tensor:
            return metric @ m if isinstance(metric, Tensor) else metric * m

        h = self.outputs(mean)
        slope = self.slope(h, root) + pulled(mean)
        step = -solve(slope)
        moved, loss, fall = self.outputs(step), self.expected.loss(h, root), (slope @ step).item()
        rounding, length = _ROUNDINGS * torch.finfo(h.dtype).eps * abs(loss), 1.0
        while length > _SHORTEST:
            new = mean + length * step
            there = self.expected.loss(h + length * moved, root)
            gained = loss - there - 0.5 * ((new - mean) @ pulled(new + mean)).item()
            if gained >= -1e-4 * length * fall - rounding:
                return new, there
            length /= 2
        return mean, loss
