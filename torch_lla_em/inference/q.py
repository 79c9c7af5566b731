"""The Gaussian posterior q over a span of directions, and the curvature that it belongs to."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import Share
from torch_lla_em.inference.evidence import Spectrum
from torch_lla_em.inference.records import Estimate


class Curvature(NamedTuple):
    """G over a span for one curvature, and the random probes that belong to it."""

    G: Tensor
    """(m, m), in float64, as all that follows but H."""

    eta: Tensor
    """The coordinates of η, (K, m)."""

    vectors: Tensor
    """The eigenvectors of G, (m, m)."""

    spectrum: Spectrum
    """The eigenvalues of G, and ξ and η in its eigenvectors."""

    H: Tensor
    """H of this rank's examples, as ``FixedH`` or ``ExpectedH`` represents it."""

    S_noise: Tensor
    """S ε of these, (K, N, ..., C), with S Sᵀ = H."""

    fall: Tensor
    """-Jᵀ ∇loss at w = 0, (m,)."""

    @classmethod
    def of(
        cls, G: Tensor, xi: Tensor, pulled: Tensor, rows: tuple[Tensor, Tensor], share: Share
    ) -> Curvature:
        """Return G with its eigenvectors, of the coordinates of ξ, of those of η and ``fall``, and of H and S ε."""
        values, vectors = map(share.agreed, torch.linalg.eigh(0.5 * (G + G.T)))
        eta, fall = pulled[:-1], pulled[-1]
        spectrum = Spectrum(values.clamp_min(0), xi @ vectors, eta @ vectors)
        return cls(G, eta, vectors, spectrum, *rows, fall)

    def without_rows(self) -> Curvature:
        """Return it without its rows for examples."""
        return self._replace(H=self.G[:0], S_noise=self.G[:0])

    def solve(self, b: Tensor, precision: float) -> Tensor:
        """Return (G + λ)⁻¹ b, (m,)."""
        return self.vectors @ ((self.vectors.T @ b) / (self.spectrum.eigenvalues + precision))


class Q(NamedTuple):
    """The posterior over a span."""

    precision: float
    """λ."""

    noise: float
    """σ of a Gaussian likelihood, relative to that of G; 1 for other likelihoods."""

    curved: Curvature
    mean: Tensor
    """m, (m,), in float64, as the others."""

    samples: Tensor
    """(K, m), with mean zero."""

    loss: float
    """E[-log p(y | J w)]: under q if H moves, otherwise at the mean."""

    bounds: Tensor
    """The log evidence, or its bound, by the γ and the log det of every sample, (K,)."""

    effective_dims: Tensor
    """γ of every sample, (K,)."""

    outputs: Tensor
    """J m of this rank's examples, (N, ..., C)."""

    deviations: Tensor | None
    """Draws of these outputs less J m, (S, N, ..., C), if H moves."""

    def parted(self) -> tuple[Q, list[Tensor]]:
        """Return q without its rows for examples, and the rows that ``OverSpan.filled`` needs."""
        rows, curved = [self.outputs, self.curved.H], self.curved.without_rows()
        return self._replace(curved=curved, outputs=self.mean[:0], deviations=None), rows

    @property
    def bound(self) -> float:
        """The mean of the bounds."""
        return self.bounds.mean().item()

    @property
    def bound_error(self) -> float:
        """The Monte Carlo error of the bound: its standard error over samples, 0 for one sample."""
        return Estimate.of(self.bounds).standard_error.nan_to_num(0.0).item()
