"""The Gaussian whose curvature and mean are expectations under itself, and its ascent.

q = N(m, (G + Λ)⁻¹), G = Σ_n J_nᵀ E_q[H_n] J_n, with Σ_n J_nᵀ E_q[∇loss] + Λ m = 0, is where

    L = E_q[log p(y | J w)] − KL(q ‖ N(0, Λ⁻¹)),   KL = ½ (‖m‖²_Λ − γ + log det(I + Λ⁻¹ G)),

is stationary, and dL / d log λ = ½ (γ − λ ‖m‖²): MacKay's fixed point is that of the bound. Over
directions whose J v is kept, all of it takes no pass; what the passes add are the residuals of
the samples and of the mean. A step that would lower the bound is not taken.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.inference.draws import Draws, by_row, root_of
from torch_lla_em.inference.mackay import PRECISION_BOUNDS, function_space_Mackay_update
from torch_lla_em.inference.search_space import SearchSpace

_ROUNDS = 4
SMALL = 0.05
"""Nats: two rounds in a row that gain no more are the last."""

_NEAR = 1e-4
"""The step of the mean that ends Newton's method, relative."""

_NEWTON = 2
"""Newton steps of the mean in every round towards a fixed point."""

_CLIMBS, _SETTLING = 30, 200
"""Climbs, and rounds after them, towards the fixed point over a complete span."""

_AT_REST = 2e-3
"""Relative change of the curvature in a round, and six times that of λ, at the fixed point."""

_SLACK = 1.0
"""Nats that the bound may fall on the way to the fixed point, which is only near its maximum."""


class Spectrum(NamedTuple):
    """G over the space, from one curvature: what follows at every λ."""

    curvature: Tensor
    """E[H], (N, ..., C, C)."""

    values: Tensor
    """(m,)."""

    vectors: Tensor
    """(m, m)."""

    xi: Tensor
    """Of ξ, (K, m), in the eigenvectors."""

    eta: Tensor
    """Of η, (K, m)."""


class Q(NamedTuple):
    """The variational posterior over the space."""

    precision: float
    spectrum: Spectrum
    mean: Tensor
    """m, (m,), in float64, as the others."""

    samples: Tensor
    """(K, m)."""

    root: Tensor
    """Of the covariance of every row's outputs, (N, ..., C, C)."""

    bounds: Tensor
    """L by the γ and the log det of every sample, (K,)."""

    effective_dims: Tensor
    """γ of every sample, (K,)."""

    @property
    def bound(self) -> float:
        """L."""
        return self.bounds.mean().item()

    def stepped(self, stride: float) -> float:
        """Return λ after so many of MacKay's steps at once."""
        gamma, norm = self.effective_dims.mean(), self.mean.square().sum()
        precision = torch.full_like(norm, self.precision)
        return function_space_Mackay_update(gamma, norm, precision, stride).item()


class Variational:
    """q over a search space, and the rounds by which it ascends the bound."""

    def __init__(self, space: SearchSpace, draws: Draws, epsilon: Tensor):
        self.space, self.draws, self._epsilon = space, draws, epsilon

    def spectrum(self, curvature: Tensor) -> Spectrum:
        """Return G and the noise over the space."""
        J = self.space.J
        shape = *self.draws.shape, J.shape[1]
        curved = self.draws.masked((curvature @ J.view(shape)).movedim(-1, 0)).flatten(1)
        noise = self.noise(curvature).flatten(1)
        G = (curved @ J).double()
        values, vectors = torch.linalg.eigh(0.5 * (G + G.T))
        xi, eta = self.space.xi @ vectors, (noise @ J).double() @ vectors
        return Spectrum(curvature, values.clamp_min(0), vectors, xi, eta)

    def noise(self, curvature: Tensor) -> Tensor:
        """Return S ε, (K, N, ..., C)."""
        S = root_of(curvature)
        return self.draws.root_masked(by_row(S, self._epsilon))

    def at(self, spectrum: Spectrum, precision: float, mean: Tensor, steps: int = 1) -> Q:
        """Return q at this λ and curvature, with its mean some steps of Newton on."""
        values, xi = spectrum.values, spectrum.xi
        x = (math.sqrt(precision) * xi + spectrum.eta) / (values + precision)
        shrunk = (xi - math.sqrt(precision) * x).square().sum(1)
        gamma = 0.5 * ((values * x.square()).sum(1) + shrunk)
        log_dets = (xi.square() * (values / precision).log1p()).sum(1)
        samples = x @ spectrum.vectors.T
        root = self._root(samples)
        for _ in range(steps):
            before = mean
            mean, loss = self._moved(spectrum, precision, mean, root)
            if (mean - before).norm() <= _NEAR * mean.norm():
                break
        norm = precision * mean.square().sum()
        bounds = -loss - 0.5 * (norm - gamma + log_dets)
        return Q(precision, spectrum, mean, samples, root, bounds, gamma)

    def widened(self, q: Q, steps: int = 1) -> Q:
        """Return q over the space as it is now, at the same λ and curvature."""
        mean = q.mean.new_zeros(self.space.size)
        mean[: len(q.mean)] = q.mean
        return self.at(self.spectrum(q.spectrum.curvature), q.precision, mean, steps)

    def restarted(self, q: Q) -> Q:
        """Return q over the span of ξ, its mean and its samples alone."""
        turn = self.space.restart(torch.cat([q.mean[None], q.samples]))
        return self.at(self.spectrum(q.spectrum.curvature), q.precision, q.mean @ turn)

    def ascend(self, q: Q, least: float) -> Q:
        """Return q after a few rounds of λ, curvature and mean, none of which lowers the bound.

        ``least`` is the smallest λ, or the only one where it is infinite.
        """
        damping, stride, small, refused = 0.7, 2.0, 0, 0
        for _ in range(_ROUNDS):
            precision = q.precision
            if least < math.inf:
                precision = max(q.stepped(stride), least)
            tried = self.at(q.spectrum, precision, q.mean)
            H = self.draws.curvature(self.outputs(tried.mean), tried.root)
            H = q.spectrum.curvature + damping * (H - q.spectrum.curvature)
            new = self.at(self.spectrum(H), precision, tried.mean)
            if new.bound > q.bound:
                small = small + 1 if new.bound < q.bound + SMALL else 0
                damping, stride, refused = min(1.0, 1.3 * damping), min(4.0, 1.3 * stride), 0
                q = new
            else:
                damping, stride, refused = damping / 2, stride / 3, refused + 1
            if small > 1 or refused > 3:
                break
        return q

    def settle(self, q: Q, learns: bool) -> tuple[Q, bool]:
        """Return q at the fixed point of curvature and mean, and whether it was reached.

        And of λ, where it is learnt.

        This is for spans that hold all directions: no pass is needed. Full steps of the
        curvature may overshoot forever, so they shrink where they turn back, and grow where
        they keep their direction.
        """
        for _ in range(_CLIMBS):
            before, q = q, self.ascend(q, PRECISION_BOUNDS[0] if learns else math.inf)
            if q.bound < before.bound + SMALL:
                break
        damping, last = 0.5, torch.zeros_like(q.spectrum.curvature)
        for _ in range(_SETTLING):
            precision = q.stepped(1.0) if learns else q.precision
            change = self.draws.curvature(self.outputs(q.mean), q.root) - q.spectrum.curvature
            moved = (change.norm() / q.spectrum.curvature.norm().clamp_min(1e-300)).item()
            step = abs(math.log(precision / q.precision))
            if moved < _AT_REST and step < _AT_REST / 6:
                return q, True
            ahead = (change * last).sum().item() > 0
            damping = min(1.0, 1.1 * damping) if ahead else max(0.02, 0.7 * damping)
            last = change
            H = q.spectrum.curvature + damping * change
            new = self.at(self.spectrum(H), precision, q.mean, _NEWTON)
            if new.bound < q.bound - _SLACK:
                damping /= 2
            else:
                q = new
        return q, False

    def residuals(self, q: Q) -> tuple[Tensor, Tensor] | None:
        """Return those of the samples, (K, P), and of the mean, (1, P); None where rows moved."""
        J, shape = self.space.J, self.draws.shape
        pushed = (q.samples.to(J) @ J.T).view(-1, *shape)
        curved = by_row(q.spectrum.curvature, pushed)
        of_samples = self.noise(q.spectrum.curvature) - self.draws.masked(curved)
        of_mean = -self.draws.slope(self.outputs(q.mean), q.root)
        pulled = self.space.pulled(torch.cat([of_samples, of_mean[None]]))
        if pulled is None:
            return None
        pulled -= q.precision * self.space.scaled(torch.cat([q.samples, q.mean[None]]))
        pulled[:-1] += math.sqrt(q.precision) * self.space.noise
        return pulled[:-1], pulled[-1:]

    def outputs(self, mean: Tensor) -> Tensor:
        """Return J m, (N, ..., C)."""
        return (self.space.J @ mean.to(self.space.J)).view(self.draws.shape)

    def _root(self, samples: Tensor) -> Tensor:
        """Return a root of the samples' covariance of every row's outputs."""
        pushed = (self.space.J @ samples.T.to(self.space.J)).view(*self.draws.shape, -1)
        return root_of(pushed @ pushed.mT / pushed.shape[-1])

    def _moved(
        self, spectrum: Spectrum, precision: float, mean: Tensor, root: Tensor
    ) -> tuple[Tensor, float]:
        """Return the mean after a step of Newton that lowers E[loss] + ½ λ ‖m‖², and E[loss]."""
        h = self.outputs(mean)
        pulled = self.draws.slope(h, root).flatten() @ self.space.J
        slope = pulled.double() + precision * mean
        V = spectrum.vectors
        step = -(V @ ((V.T @ slope) / (spectrum.values + precision)))
        moved, loss, fall = self.outputs(step), self.draws.loss(h, root), (slope @ step).item()
        length = 1.0
        while length > 1e-3:
            new = mean + length * step
            there = self.draws.loss(h + length * moved, root)
            gained = loss - there + 0.5 * precision * (mean @ mean - new @ new).item()
            if gained >= -1e-4 * length * fall:
                return new, there
            length /= 2
        return mean, loss
