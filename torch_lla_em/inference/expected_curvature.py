"""The variational posterior, whose curvature and mean are expectations under itself.

q = N(m, (G + Λ)⁻¹), G = Σ_n J_nᵀ E_q[H_n] J_n, with Σ_n J_nᵀ E_q[∇loss] + Λ m = 0, is where

    L = E_q[log p(y | J w)] − KL(q ‖ N(0, Λ⁻¹)),   KL = ½ (‖m‖²_Λ − γ + log det(I + Λ⁻¹ G)),

is stationary, and dL / d log λ = ½ (γ − λ ‖m‖²), so MacKay's fixed point is that of the bound. A
step that would lower the bound is rejected.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_lla_em.inference.expectations import Expectations, by_row, root_of
from torch_lla_em.inference.mackay import (
    PRECISION_BOUNDS,
    Expectation,
    Hyperparameters,
    MStep,
    function_space_Mackay_update,
)
from torch_lla_em.inference.over_span import Curved, OverSpan, Q
from torch_lla_em.inference.span import Span

_ROUNDS = 4
SMALL = 0.05
"""Nats; the rounds end after two in a row that gain less."""

_NEAR = 1e-4
"""Relative step of the mean at which Newton's method ends."""

_NEWTON = 2
"""Newton steps of the mean in every round towards a fixed point."""

_CLIMBS, _SETTLING = 30, 400
"""Numbers of ascents, and of rounds after them, towards the fixed point over a complete span."""

_POLISH = 50
"""Newton steps of the mean at the fixed point."""

_AT_REST = 1e-3
"""Relative change of the curvature in a round (for λ: six times this) that counts as converged."""

_SLACK = 1.0
"""Nats that the bound may decrease on the way to the fixed point, which is only near its maximum."""


class ExpectedCurvature(OverSpan):
    """q over a span, and the rounds that increase the bound."""

    def __init__(self, span: Span, expected: Expectations, epsilon: Tensor):
        super().__init__(span, expected)
        self._epsilon = epsilon

    def first(self, precision: float) -> Q:
        """Return q at the average curvature of outputs 0 and of the network's outputs."""
        f, expected = self.span.rows.f, self.expected
        H = 0.5 * (expected.curvature(0 * f, None) + expected.curvature(f, None))
        return self.at(self.curved(H), precision, torch.zeros_like(self.span.xi[0]))

    def hyper(self, q: Q) -> Hyperparameters:
        """Return λ."""
        return Hyperparameters(torch.full_like(q.mean[0], q.precision))

    def expectation(self, q: Q, mode_error: float, sample_error: float) -> Expectation:
        """Return the expectations under q that EM records."""
        return Expectation(
            self.hyper(q),
            q.effective_dims,
            q.mean.square().sum(),
            self.expected.loss(self.outputs(q.mean), None),
            None,
            None,
            None,
            q.bounds,
            mode_error,
            sample_error,
        )

    def curved(self, blocks: Tensor, known: Curved | None = None) -> Curved:
        """Return G and the random probes over the span; known parts are extended to new directions."""
        span, old = self.span, 0 if known is None else len(known.G)
        G = self.grown(known, lambda J: self._with_H(blocks, J))
        eta = (self.noise(blocks).flatten(1) @ span.J[:, old:]).double()
        return Curved.of(
            G, span.xi, eta if known is None else torch.cat([known.eta, eta], 1), blocks
        )

    def noise(self, blocks: Tensor) -> Tensor:
        """Return S ε, (K, N, ..., C)."""
        return self.expected.root_masked(by_row(root_of(blocks), self._epsilon))

    def at(self, curved: Curved, precision: float, mean: Tensor, steps: int = 1) -> Q:
        """Return q at this λ and curvature, after some Newton steps of its mean."""
        spectrum, loss = curved.spectrum, math.inf
        samples = spectrum.solutions(precision) @ curved.vectors.T
        gamma, root = spectrum.effective_dims(precision), self._root(samples)
        log_dets = (spectrum.xi.square() * (spectrum.eigenvalues / precision).log1p()).sum(1)
        for _ in range(steps):
            before = mean
            mean, loss = self.newton_step(precision, mean, root, curved.inverse(precision))
            if (mean - before).norm() <= _NEAR * mean.norm():
                break
        norm = precision * mean.square().sum()
        bounds = -loss - 0.5 * (norm - gamma + log_dets)
        return Q(precision, 1.0, curved, mean, samples, loss, bounds, gamma, root)

    def stepped(self, q: Q, stride: float) -> float:
        """Return λ after a step of ``stride`` times MacKay's in log λ."""
        gamma, norm = q.effective_dims.mean(), q.mean.square().sum()
        precision = torch.full_like(norm, q.precision)
        return function_space_Mackay_update(gamma, norm, precision, stride).item()

    def widened(self, q: Q, steps: int = 1) -> Q:
        """Return q over the extended span, at the same λ and curvature."""
        mean = q.mean.new_zeros(self.span.size)
        mean[: len(q.mean)] = q.mean
        return self.at(self.curved(q.curved.blocks, q.curved), q.precision, mean, steps)

    def restarted(self, q: Q) -> Q:
        """Return q over the span of ξ, its mean and its samples only."""
        turn = self.span.restart(torch.cat([q.mean[None], q.samples]))
        return self.at(self.curved(q.curved.blocks), q.precision, q.mean @ turn)

    def ascend(self, q: Q, m_step: MStep, least: float) -> Q:
        """Return q after a few rounds of λ, curvature and mean, none of which lowers the bound.

        ``least`` is a lower bound on λ; if it is infinite, λ stays fixed.
        """
        damping, stride, small, refused = 0.7, 2.0, 0, 0
        for _ in range(_ROUNDS):
            precision = q.precision
            if least < math.inf:
                precision = max(self.stepped(q, stride), least)
            tried = self.at(q.curved, precision, q.mean)
            H = self.expected.curvature(self.outputs(tried.mean), tried.root)
            H = q.curved.blocks + damping * (H - q.curved.blocks)
            new = self.at(self.curved(H), precision, tried.mean)
            if new.bound > q.bound:
                small = small + 1 if new.bound < q.bound + SMALL else 0
                damping, stride, refused = min(1.0, 1.3 * damping), min(4.0, 1.3 * stride), 0
                q = new
            else:
                damping, stride, refused = damping / 2, stride / 3, refused + 1
            if small > 1 or refused > 3:
                break
        return q

    def settle(self, q: Q, m_step: MStep, learns: bool) -> tuple[Q, bool]:
        """Return q at the fixed point of curvature and mean (and λ), and whether it was reached.

        This is for spans that contain all directions, so no pass is needed. Full steps of the
        curvature can overshoot forever, so steps shrink after a change of direction and grow
        otherwise.
        """
        for _ in range(_CLIMBS):
            before, q = q, self.ascend(q, m_step, PRECISION_BOUNDS[0] if learns else math.inf)
            if q.bound < before.bound + SMALL:
                break
        damping, last, found = 0.5, torch.zeros_like(q.curved.blocks), False
        for _ in range(_SETTLING):
            precision = self.stepped(q, 1.0) if learns else q.precision
            change = self.expected.curvature(self.outputs(q.mean), q.root) - q.curved.blocks
            moved = (change.norm() / q.curved.blocks.norm().clamp_min(1e-300)).item()
            step = abs(math.log(precision / q.precision))
            if moved < _AT_REST and step < _AT_REST / 6:
                found = True
                break
            ahead = (change * last).sum().item() > 0
            damping = min(1.0, 1.1 * damping) if ahead else max(0.02, 0.7 * damping)
            last = change
            H = q.curved.blocks + damping * change
            new = self.at(self.curved(H), precision, q.mean, _NEWTON)
            if new.bound < q.bound - _SLACK:
                damping /= 2
            else:
                q = new
        return self.at(q.curved, q.precision, q.mean, _POLISH), found

    def residuals(self, q: Q) -> Tensor | None:
        """Return the residuals of samples and mean, (K + 1, P); None if the order has changed."""
        J, shape = self.span.J, self.expected.shape
        pushed = (q.samples.to(J) @ J.T).view(-1, *shape)
        curved = by_row(q.curved.blocks, pushed)
        of_samples = self.noise(q.curved.blocks) - self.expected.masked(curved)
        of_mean = -self.expected.slope(self.outputs(q.mean), q.root)
        pulled = self.span.pulled(torch.cat([of_samples, of_mean[None]]))
        if pulled is None:
            return None
        self.span.add_scaled(pulled, -q.precision * torch.cat([q.samples, q.mean[None]]))
        pulled[:-1].add_(self.span.noise, alpha=math.sqrt(q.precision))
        return pulled

    def _with_H(self, blocks: Tensor, J: Tensor) -> Tensor:
        """Return H J v for columns of J V, (N C, k)."""
        curved = blocks @ J.reshape(*self.expected.shape, -1)
        return self.expected.masked(curved.movedim(-1, 0)).movedim(0, -1).flatten(0, -2)

    def _root(self, samples: Tensor) -> Tensor:
        """Return a root of the sample covariance of the outputs of every example."""
        pushed = (self.span.J @ samples.T.to(self.span.J)).view(*self.expected.shape, -1)
        return root_of(pushed @ pushed.mT / pushed.shape[-1])
