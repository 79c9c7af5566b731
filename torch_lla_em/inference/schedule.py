"""The decisions of a fit over a span: how λ, σ and H change, and when and why the fit ends. The
reasons are in docs/method.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from torch_lla_em.inference.em import e_step, m_step
from torch_lla_em.inference.mackay import accelerated
from torch_lla_em.inference.over_span import OverSpan
from torch_lla_em.inference.result import Estimate
from torch_lla_em.inference.state import Cut, State
from torch_lla_em.problem import towards
from torch_lla_em.runtime import PRECISION_BOUNDS
from torch_lla_em.solvers import DivergenceError

# On seven networks, values within a factor of two change neither the NLL nor the number of columns
# by more than 2 %, unless stated otherwise.

FALL = 3.0
"""Largest factor by which λ falls in a solution, unless the span has all directions. 1.5: 12 % more
columns; 6: 5 % fewer."""

STEPS, MOST = 3, 5
"""Number of steps in a block, and largest number of blocks in a solution. With two steps H lags
behind λ, and some fits do not end."""

DAMPING = 0.45
"""Share of the change of H in a step. With .55, the H of some examples alternates, and fits of
complete spans take a fifth more columns; with .3 λ changes by 10 %."""

GROWTH = 1.5
"""Growth of the span after which λ, σ and H are computed again. 2.25: 11 % more columns."""

LEARNT = 0.2
"""Errors of samples and mean below which the span is accurate enough for λ. .1: 10 % more
columns."""

RESTS = 2.0
"""log λ has converged if a solution changes it by at most this multiple of its Monte Carlo
error."""

NATS, SHARE = 2.0, 0.1
"""A block may lower the bound by the largest of these: this number of nats, its standard error, or
this share of γ for each unit of log λ, since its log determinant may be inexact. With a share of
.05 one network ended at another λ."""

FALLS = 0.1
"""A block may lower a bound that is computed without samples by this number of nats; if the first
block of a solution lowers it by more, λ has converged. With .01, the λ of 45 weights depended on
its start by a factor of two; with 2, the λ of separable labels drifted to 0."""


class SpanFit:
    """A fit over a span that grows."""

    def __init__(
        self, over: OverSpan, em_steps: int, tolerance: float, is_late: Callable[[], bool]
    ):
        self.over, self.span, self._tolerance, self._is_late = over, over.span, tolerance, is_late
        self._learns = em_steps > 0
        """Whether λ and σ are learnt."""

        self._most = em_steps or (20 if over.expected.number else 0)
        """Largest number of solutions; if λ is fixed, these are for H only."""

    def run(self, q: State) -> Iterator[State]:
        """Yield the state after every extension of the span, until it contains the reason why the
        fit ended. The first state has no posterior yet, or is that of an earlier run."""
        over, span, grew = self.over, self.span, True
        if not len(q.samples):
            q = self._posterior(q)
        elif not q.fate.cut:
            q = self._extended(q)[0]
        while True:
            # λ, σ and H are computed again over a span that has grown enough
            due = span.size >= GROWTH * q.fate.solved or not over.expected.number
            due = due or max(q.errors) < LEARNT or span.is_complete or not grew
            if q.fate.cut or (due and not q.fate.converged and q.fate.number < self._most):
                q = self.solved(q)
            q = self.judged(over.measured(q), grew)
            yield q
            if q.fate.why:
                return
            q, grew = self._extended(q)

    def _extended(self, q: State) -> tuple[State, bool]:
        """Return the state over the span extended by the residuals of mean and samples, and whether
        any of these was a new direction."""
        over, span, grew = self.over, self.span, True
        residuals = q.in_span.residuals
        if residuals is not None and not span.is_complete:
            if span.bytes_of(span.size + len(residuals)) > span.memory:
                q = over.restarted(q)
            grew = span.widen(residuals)
            q = over.widened(q)
        fixed = q.fate.converged or q.fate.number >= self._most
        return self._posterior(q, precise=fixed), grew

    def _posterior(self, q: State, precise: bool = False) -> State:
        """Return the posterior at λ, σ and H of a state, or at the first larger λ for which its
        expectations are finite; if ``precise``, with a mode that is accurate enough for the end of
        a fit, since H does not change any more."""
        fate = q.fate
        q = q._replace(fate=fate._replace(converged=fate.converged or precise))
        while True:
            try:
                return e_step(self.over, q)._replace(fate=fate)
            except DivergenceError:
                if not self._learns or q.precision >= PRECISION_BOUNDS[1]:
                    raise
                q = self.over.moved(q, 10 * q.precision, q.sigma, None)

    def _step(self, q: State, precision: Tensor, sigma: Tensor | None, share: float) -> State:
        """Return the posterior at another λ and σ. If H moves and is finite, it changes by a share
        of the difference to E_q[H]."""
        expected, problem, H = self.over.expected, q.in_span.problem, None
        if expected.number:
            H = towards(
                q.in_span.H, expected.H(problem.loss, q.in_span.outputs, problem.deviations), share
            )
        new = self.over.moved(q, precision, sigma, H)
        if not new.in_span.G.isfinite().all():
            new = self.over.moved(q, precision, None, None)
        return self._posterior(new)

    def solved(self, start: State) -> State:
        """Return the state with converged λ, σ, H and m over the present span, or the state after
        the present block if the time is over."""
        q, last, moved = start, start.fate.last, math.inf
        began = start.fate.cut or Cut(0, start.precision, start.sigma, start.errors[0])
        least = PRECISION_BOUNDS[0] if self.span.is_complete else float(began.precision) / FALL
        for number in range(began.blocks, MOST):
            if number > began.blocks and self._is_late():
                cut = began._replace(blocks=number)
                return q._replace(fate=q.fate._replace(last=last, moved=math.inf, cut=cut))
            new, last = self._block(q, last, least)
            change = abs(math.log(new.precision / q.precision))
            spread = Estimate.of(new.bounds).standard_error.nan_to_num(0.0).item()
            allowed = max(NATS, spread, SHARE * change * new.gamma.mean().item())
            allowed = FALLS if self.over.is_exact else allowed
            if not new.bounds.mean() > q.bounds.mean() - allowed:
                if not number:  # a smaller change of H may not lower the bound
                    q = self._step(q, q.precision, q.sigma, DAMPING / 2)
                moved = 0.0 if self.over.is_exact and not number else math.inf
                break
            q = new
            precision, sigma = self._update(q)
            moved = max(
                abs(math.log(q.precision / began.precision)), _of_noise(q.sigma, began.sigma)
            )
            way = accelerated(math.log(q.precision), math.log(precision), last)
            left = max(abs(way), _of_noise(sigma, q.sigma))
            rest = max(self.allowed(q), min(1.0, began.error) ** 2)
            if q.precision <= least or (self._learns and left < rest):
                break
        if self.span.is_complete:  # nothing else brings the mean to the tolerance
            q = self._posterior(q, precise=True)
        moved /= self.allowed(q, rises=bool(q.precision > began.precision))
        fate = q.fate._replace(number=start.fate.number + 1, solved=self.span.size, cut=None)
        return q._replace(fate=fate._replace(last=last, moved=moved))

    def _block(
        self, q: State, last: tuple[float, float] | None, least: float
    ) -> tuple[State, tuple[float, float]]:
        """Return the state after a few steps, of which the first goes to the λ of a secant, and the
        point for the next secant."""
        here, there = math.log(q.precision), math.log(self._update(q)[0])
        precision, last = q.precision * math.exp(accelerated(here, there, last)), (here, there)
        for _ in range(STEPS):
            q = self._step(q, precision.clamp_min(least), self._update(q)[1], DAMPING)
            precision = self._update(q)[0]
        return q, last

    def judged(self, q: State, grew: bool) -> State:
        """Decide whether λ has converged, and whether the fit ends here; return the state with both
        decisions."""
        fate = q.fate
        # if H follows its own Monte Carlo noise, solutions do not converge
        rests = fate.moved < max(RESTS, fate.number / 2)
        if fate.solved == self.span.size and max(q.errors) < LEARNT and rests:
            fate = fate._replace(converged=True)
        fixed, why = fate.converged or fate.number >= self._most, ""
        if fate.cut:
            why = "budget"
        elif fixed and max(q.errors) <= self._tolerance:
            why = "accurate"
        elif fixed and self.span.is_complete:
            why = "all directions"
        elif not grew:
            why = "rounding leaves no new direction"
        elif fate.restarts > 3:
            why = "no memory for more directions"
        elif self._is_late():
            why = "budget"
        return q._replace(fate=fate._replace(why=why))

    def raised(self, q: State) -> State:
        """Return the state, or if rounding dominates its posterior, that at the first larger λ
        where it does not, with the same H."""
        learnt = q.precision
        while q.fate.why != "budget" and not max(q.errors) <= 10:
            if q.precision >= PRECISION_BOUNDS[1]:
                break
            q = self.over.moved(q, 10 * q.precision, None, None)
            # the search for the mean starts from 0, since the mean may be lost
            q = self.over.measured(e_step(self.over, q._replace(mean=torch.zeros_like(q.mean))))
            why = f"rounding dominates at the prior precision of {learnt:.1e}"
            q = q._replace(fate=q.fate._replace(why=why))
        return q

    def allowed(self, q: State, rises: bool = False) -> float:
        """Return the Monte Carlo error of log λ, at least 1 %; it is 0.3 % if γ is computed without
        samples.

        A γ below 1 counts as 1, unless λ ``rises``: where the data determine nothing, λ grows
        without bound, and its value does not matter.
        """
        gamma = max(1e-12 if rises else 1.0, q.gamma.mean().item())
        if self.over.is_exact and gamma >= 1:
            return 0.003
        return float(max(0.01, (len(q.samples) * gamma) ** -0.5))

    def _update(self, q: State) -> tuple[Tensor, Tensor | None]:
        """Return λ and σ by MacKay's updates; λ changes by at most a factor of e."""
        if not self._learns:
            return q.precision, q.sigma
        precision, sigma = m_step(self.over, q)
        return precision.clamp(q.precision / math.e, q.precision * math.e), sigma


def _of_noise(new: Tensor | None, old: Tensor | None) -> float:
    """Return the largest change of log σ²; 0 without σ."""
    return 0.0 if new is None or old is None else 2 * (new / old).log().abs().max().item()
