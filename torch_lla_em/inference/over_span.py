"""The Gaussian posterior over a span of directions, by dense linear algebra without a pass.

q = N(m, (G + Λ)⁻¹), with G = Σ_n J_nᵀ H_n J_n. ``fixed_curvature.py`` and ``expected_curvature.py``
choose λ, σ and H.
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
"""The shortest step of Newton's method, relative to the full step."""

_ROUNDINGS = 10
"""A Newton step may increase the loss by this multiple of its rounding error."""


class Curved(NamedTuple):
    """G over a span for one curvature, and the random probes that belong to it."""

    G: Tensor
    """(m, m), in float64, as all that follows."""

    eta: Tensor
    """The coordinates of η, (K, m)."""

    vectors: Tensor
    """The eigenvectors of G, (m, m)."""

    spectrum: Spectrum
    """The eigenvalues of G, and ξ and η in its eigenvectors."""

    blocks: Tensor | None = None
    """H of every example, (N, ..., C, C), if it is an expectation."""

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
    """σ of a Gaussian likelihood, relative to that of G; 1 for other likelihoods."""

    curved: Curved
    mean: Tensor
    """m, (m,), in float64, as the others."""

    samples: Tensor
    """(K, m), with mean zero."""

    loss: float
    """E[-log p(y | J w)]: under q if the curvature is an expectation, otherwise at the mean."""

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
    """Base class for both kinds of curvature: extends G with the span, and finds the mean."""

    def __init__(self, span: Span, expected: Expectations):
        self.span, self.expected = span, expected

    def outputs(self, mean: Tensor) -> Tensor:
        """Return J m, (N, ..., C)."""
        return (self.span.J @ mean.to(self.span.J)).view(self.expected.shape)

    def grown(self, known: Curved | None, with_H: Callable[[Tensor], Tensor]) -> Tensor:
        """Return G over the span; a known part for the first directions is only extended."""
        J, old = self.span.J, 0 if known is None else len(known.G)
        columns = (J.T @ with_H(J[:, old:])).double()
        if known is None:
            return columns
        return torch.cat([torch.cat([known.G, columns[:old].T]), columns], dim=1)

    def slope(self, h: Tensor, root: Tensor | None) -> Tensor:
        """Return the gradient of the expected loss in the coordinates, (m,)."""
        return (self.expected.slope(h, root).flatten() @ self.span.J).double()

    def newton_step(
        self, precision: float, mean: Tensor, root: Tensor | None, solve: Solve
    ) -> tuple[Tensor, float]:
        """Return the mean after a step that lowers E[loss] + ½ λ ‖m‖², and E[loss] there."""
        h = self.outputs(mean)
        slope = self.slope(h, root) + precision * mean
        step = -solve(slope)
        moved, loss, fall = self.outputs(step), self.expected.loss(h, root), (slope @ step).item()
        rounding, length = _ROUNDINGS * torch.finfo(h.dtype).eps * abs(loss), 1.0
        while length > _SHORTEST:
            new = mean + length * step
            there = self.expected.loss(h + length * moved, root)
            gained = loss - there - 0.5 * precision * ((new - mean) @ (new + mean)).item()
            if gained >= -1e-4 * length * fall - rounding:
                return new, there
            length /= 2
        return mean, loss
