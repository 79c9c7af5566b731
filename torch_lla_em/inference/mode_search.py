"""The mode at one λ after the other, over a span that every gradient widens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_lla_em.inference.expectations import Expectations
from torch_lla_em.inference.linear_mode import LinearMode, Precondition
from torch_lla_em.inference.over_span import OverSpan
from torch_lla_em.inference.prior import Prior
from torch_lla_em.inference.span import Span
from torch_lla_em.problem import Problem, room

# share of the free memory for the span, and the fewest directions that are useful
_SHARE, _FEWEST = 1 / 4, 3
_MAX_PASSES = 300
# share of the tolerance for the minimum over the span, and most Newton steps towards it
_WITHIN, _NEWTON = 0.2, 50


class ModeSearch:
    """Minimises over the span without a pass, and widens it by the gradient there.

    Where memory is short, the span keeps the last two points alone, so that each gradient is a
    step of conjugate gradients.
    """

    def __init__(self, problem: Problem, prior: Prior, known: dict[str, Any] | None = None):
        none = problem.zeros(1)[:0]
        self._prior, self._span = prior, Span(problem, prior, none, room(problem) * _SHARE)
        self._mean = torch.zeros(0, dtype=torch.float64, device=none.device)
        """The coordinates of the last minimum, (m,)."""

        if known is not None:
            self._mean = known["mean"]
            self._span.restore(known["span"])

    def state(self) -> dict[str, Any] | None:
        """Return all that it goes on with, None before the first mode."""
        return {"mean": self._mean, "span": self._span.state()} if self._span.size else None

    def find(
        self,
        problem: Problem,
        precision: Tensor,
        tolerance: float,
        precondition: Precondition | None,
    ) -> LinearMode | None:
        """Return the mode; None where there is no memory for a span, or examples change places."""
        span, prior, space, passes = self._span, self._prior, problem.space, 0.0
        if not span.size:
            _, gradient = problem.loss_and_gradient(problem.zeros(1)[0])
            first = torch.stack([prior.unscaled(problem.w_MAP), prior.scale * gradient])
            if not (span.has_room(_FEWEST) and span.widen(first)):
                return None
            self._mean, passes = self._mean.new_zeros(span.size), 2.0
        over = OverSpan(span, Expectations(problem.likelihood, *span.rows[1::-1], 0, 0))
        root = prior.unscaled(prior.deviation(precision))  # Λ^{-1/2} of scaled weights, (P,)
        while True:
            before, loss = self._mean, self._minimise(over, problem, precision, tolerance)
            slope = over.expected.slope(over.outputs(self._mean), None)
            pulled = span.pulled(slope[None])
            if pulled is None:
                return None
            passes += 0.5
            w = span.weights(self._mean[None])[0]
            x = prior.whitened(w, precision)
            residual = root * pulled[0] + x
            error = space.norm(residual) / max(space.norm(x), 1e-300)
            if error <= tolerance or passes >= _MAX_PASSES:
                return LinearMode(w, loss, error, passes, error <= tolerance)
            if precondition is not None:
                residual = precondition(residual[None])[0]
            if not span.has_room(1):
                self._mean = self._mean @ span.restart(torch.stack([self._mean, before]))
            if not span.widen((root * residual)[None]):
                return LinearMode(w, loss, error, passes, False)
            passes += 0.5
            self._mean = torch.cat([self._mean, self._mean.new_zeros(1)])

    def _minimise(
        self, over: OverSpan, problem: Problem, precision: Tensor, tolerance: float
    ) -> float:
        """Move to the minimum over the span; return Σ loss there."""
        metric, H = self._span.metric(precision), problem.likelihood.hessian_product
        for _ in range(_NEWTON):
            h = over.outputs(self._mean)
            pull = metric @ self._mean
            size = (over.slope(h, None) + pull).norm()
            if size <= _WITHIN * tolerance * pull.norm():
                break
            moved = H(h, self._span.J.T.reshape(-1, *h.shape))
            G = (over.expected.masked(moved).flatten(1) @ self._span.J).double()
            factor = torch.linalg.cholesky(0.5 * (G + G.T) + metric)

            def solve(b: Tensor, factor: Tensor = factor) -> Tensor:
                return torch.cholesky_solve(b[:, None], factor)[:, 0]

            new, loss = over.newton_step(metric, self._mean, None, solve)
            if torch.equal(new, self._mean):
                break
            self._mean = new
        return over.expected.loss(over.outputs(self._mean), None)
