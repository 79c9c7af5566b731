"""The mode for a fixed H: over a span that every gradient widens, else by Newton-CG or SGD."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from math import log
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.inference.linear_mode import LinearMode, Precondition, first_mode, optimise_MAP
from torch_lla_em.inference.prior import Prior
from torch_lla_em.inference.span import Span
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.problem import Problem, room
from torch_lla_em.solvers import SGD, Newton, Operator, Space

_NO_ORDER = "Examples come in another order at every pass: the mode takes products with G."
_NO_ROOM = "Out of memory: the mode is found without a subspace."
# of the free memory, for the span
_SHARE = 1 / 4
# directions with which a span is of use: the last two points and the next gradient
_FEWEST = 3
_MAX_PASSES = 300
# of the tolerance, for the minimum over the span
_WITHIN = 0.2

logger = logging.getLogger("torch_lla_em")


class ModeSearch:
    """The mode at one λ after the other, over one span for all of them.

    The minimum over the span takes no pass over the data. Its gradient takes half a pass, and
    half a pass more takes it into the span. Where memory is short, the span keeps the last two
    points alone, so that each gradient is a step of conjugate gradients.
    """

    def __init__(self, problem: Problem, prior: Prior, solver: Newton | SGD = Newton()):
        self._problem, self._prior, self._solver = problem, prior, solver
        self.visited: dict[float, LinearMode] = {}
        """By the geometric mean of λ."""

        self._span = None if isinstance(solver, SGD) else self._empty()
        self._coordinates = torch.zeros(0, dtype=torch.float64, device="cpu")
        """Of the last minimum over the span, (m,)."""

    def find(
        self,
        problem: Problem,
        precision: Tensor,
        tolerance: float,
        precondition: Precondition | None = None,
    ) -> LinearMode:
        """Return w_lin at these hyper-parameters."""
        tolerance, mode = max(tolerance, 10 * torch.finfo(problem.dtype).eps), None
        if self._span is not None:
            over_span = partial(self._find, problem, precision, tolerance, precondition)
            mode, shortage = problem.attempt(over_span)
            if mode is None:
                logger.warning(_NO_ROOM) if shortage else logger.info(_NO_ORDER)
                self._span = None
        if mode is None or not mode.converged:
            start = self._start(problem, precision) if mode is None else mode.w
            solver = replace(self._solver, tolerance=tolerance)
            wish = problem, self._prior, precision, solver, start
            mode = optimise_MAP(*wish, precondition=precondition)
        self.visited[_mean(precision)] = mode
        return mode

    def objective(self, problem: Problem, precision: Tensor) -> tuple[float, float] | None:
        """Return Σ loss and ‖w_lin / scale‖² over the span, at no pass; None without a span."""
        if self._span is None or not self._span.size:
            return None
        coordinates, loss, _ = self._minimum(problem, precision, 1e-2)
        return loss, coordinates.square().sum().item()

    def state(self) -> dict[str, Any]:
        """Return all that it goes on with."""
        span = None if self._span is None else self._span.size and self._span.state()
        return {"visited": self.visited, "span": span, "coordinates": self._coordinates}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Go on from a state, if there is one."""
        if state is None:
            return
        self.visited, self._coordinates = state["visited"], state["coordinates"]
        if state["span"] is None:
            self._span = None
        elif state["span"]:
            self._span.restore(state["span"])

    def _empty(self) -> Span:
        none = self._problem.zeros(1)[:0]
        return Span(self._problem, self._prior, none, room(self._problem) * _SHARE)

    def _start(self, problem: Problem, precision: Tensor) -> Tensor:
        """Return the mode at the visited λ that is nearest."""
        if self.visited:
            here = _mean(precision)
            return self.visited[min(self.visited, key=lambda other: abs(log(other / here)))].w
        return first_mode(problem, self._prior, precision)

    def _find(
        self,
        problem: Problem,
        precision: Tensor,
        tolerance: float,
        precondition: Precondition | None,
    ) -> LinearMode | None:
        """Return the mode over the span; None where there is no room or order for one."""
        span, prior, space, passes = self._span, self._prior, problem.space, 0.0
        if not span.size:
            _, gradient = problem.loss_and_gradient(problem.zeros(1)[0])
            first = torch.stack([prior.unscaled(problem.w_MAP), prior.scale * gradient])
            if not (span.has_room(_FEWEST) and span.widen(first)):
                return None
            self._coordinates = torch.zeros(span.size, dtype=torch.float64, device=first.device)
            passes += 2
        root = prior.unscaled(prior.deviation(precision))  # Λ^{-1/2} of scaled weights, (P,)
        while True:
            before = self._coordinates
            self._coordinates, loss, u = self._minimum(problem, precision, tolerance)
            pulled = span.pulled(u[None])
            if pulled is None:
                return None
            passes += 0.5
            w = span.weights(self._coordinates[None])[0]
            x = prior.whitened(w, precision)
            slope = root * pulled[0] + x
            error = space.norm(slope) / max(space.norm(x), 1e-300)
            if error <= tolerance or passes >= _MAX_PASSES:
                return LinearMode(w, loss, error, passes, error <= tolerance)
            if precondition is not None:
                slope = precondition(slope[None])[0]
            if not span.has_room(1):
                turn = span.restart(torch.stack([self._coordinates, before]))
                self._coordinates = self._coordinates @ turn
            if not span.widen((root * slope)[None]):
                return LinearMode(w, loss, error, passes, False)
            passes += 0.5
            self._coordinates = torch.cat([self._coordinates, self._coordinates.new_zeros(1)])

    def _minimum(
        self, problem: Problem, precision: Tensor, tolerance: float
    ) -> tuple[Tensor, float, Tensor]:
        """Return the minimum over the span, Σ loss there, and its slope in J w, (N, ..., C)."""
        span, solver = self._span, Newton(_WITHIN * tolerance, 10_000)
        if problem.likelihood.is_quadratic:
            solver = replace(solver, forcing=0.0)
        loss = _SpanLoss(span, problem.likelihood, span.metric(precision))
        start = self._coordinates @ loss.root
        found = solver.minimise(loss, start, loss.inverse_at(start))
        return found.x @ loss.turn, found.loss, loss.slope(found.x)


class _SpanLoss:
    """Σ loss(J w, y) over a span, in coordinates x in which the prior is ½ ‖x‖²."""

    def __init__(self, span: Span, likelihood: Likelihood, metric: Tensor):
        self.space, self.rounding = Space(), 10 * torch.finfo(span.J.dtype).eps
        self._J, self._likelihood = span.J, likelihood
        f, self._targets, _ = span.rows
        self._shape, self._mask = f.shape, likelihood.mask(self._targets)
        self.root = torch.linalg.cholesky(metric)
        identity = torch.eye(len(metric), dtype=metric.dtype, device=metric.device)
        self.turn = torch.linalg.solve_triangular(self.root, identity, upper=False)

    def value_and_gradient(self, x: Tensor) -> tuple[float, Tensor]:
        """Return the loss and its gradient."""
        log_prob = self._likelihood.log_prob(self._push(x)[0], self._targets)
        return -log_prob.sum(dtype=torch.float64).item(), self._pull(self.slope(x)[None])[0]

    def hessian(self, x: Tensor) -> Operator:
        """Return the Hessian at x as a product."""
        f = self._push(x)[0]
        return Operator(lambda v: self._pull(self._curved(f, self._push(v))))

    def slope(self, x: Tensor) -> Tensor:
        """Return the gradient of the loss in the outputs, (N, ..., C)."""
        return self._masked(self._likelihood.gradient(self._push(x)[0], self._targets))

    def inverse_at(self, x: Tensor) -> Precondition:
        """Return the product with the inverse of I + G, with H at x."""
        curved = self._curved(self._push(x)[0], self._J.T.reshape(-1, *self._shape))
        G = self.turn @ (curved.flatten(1) @ self._J).double() @ self.turn.T
        values, vectors = torch.linalg.eigh(0.5 * (G + G.T))
        inverse = vectors / (1 + values.clamp_min(0)) @ vectors.T  # rounding may bring θ < 0
        return lambda rows: rows @ inverse

    def _curved(self, f: Tensor, u: Tensor) -> Tensor:
        return self._masked(self._likelihood.hessian_product(f, u))

    def _masked(self, u: Tensor) -> Tensor:
        return u if self._mask is None else u * self._mask.unsqueeze(-1).to(u.dtype)

    def _push(self, x: Tensor) -> Tensor:
        """Return J w over all rows, (k, N, ..., C)."""
        coordinates = x.view(-1, x.shape[-1]) @ self.turn
        return (coordinates.to(self._J) @ self._J.T).view(-1, *self._shape)

    def _pull(self, u: Tensor) -> Tensor:
        """Return Jᵀ u in the coordinates, (k, m)."""
        return (u.flatten(1).to(self._J) @ self._J).double() @ self.turn.T


def _mean(precision: Tensor) -> float:
    return precision.log().mean().exp().item()
