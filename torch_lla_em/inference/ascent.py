"""Steps of λ, σ and H over a span of directions, which take no pass over the data."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from torch_lla_em.inference.mackay import MStep, function_space_Mackay_update
from torch_lla_em.inference.over_span import OverSpan, Q

_ROUNDS = 2
"""Rounds after every extension of the span."""

SMALL = 0.05
"""Nats that a round must gain to count, on the way to the fixed point of a moving H."""

_QUIET, _CLIMBS = 3, 120
"""Rounds in a row without such a gain that end this way, and the largest number of rounds."""

_NEWTON, _POLISH = 2, 50
"""Newton steps of the mean in every step towards the fixed point, and there."""

_AT_REST = 1e-3
"""Change of log λ, log σ and (relative) H in a step at which the steps end."""

_WINDOW, _STEPS, _ONWARD, _STRIDE = 24, 80, 0.2, 2.0
"""Steps of an averaged H in which λ must stay within its Monte Carlo error, their largest number, what
a step without a change of direction counts, and the first step of log λ, relative to MacKay's."""


class Pace(NamedTuple):
    """The length of a round's steps: it grows after a round that raises the bound."""

    damping: float = 0.7
    """Share of the change of H."""

    stride: float = 2.0
    """Length of the step of log λ, relative to MacKay's."""

    def after(self, better: bool) -> Pace:
        """Return the pace of the next round."""
        if better:
            return Pace(min(1.0, 1.6 * self.damping), min(4.0, 1.6 * self.stride))
        return Pace(max(0.1, self.damping / 2), max(0.3, self.stride / 3))


def climb(over: OverSpan, q: Q, least: float, pace: Pace) -> tuple[Q, Pace]:
    """Return q after two rounds of λ, a moving H and the mean, and the pace of the next.

    No round lowers the bound. ``least`` is a lower bound on λ; if it is infinite, λ stays fixed.
    """
    for _ in range(_ROUNDS):
        q, pace = _round(over, q, least, pace)
    return q, pace


def _round(over: OverSpan, q: Q, least: float, pace: Pace) -> tuple[Q, Pace]:
    """Return q after a step of λ, one of H, and one of the mean after each, if they raise the bound."""
    precision = q.precision
    if least < math.inf:
        precision = max(_stepped(over, q, pace.stride).item(), least)
    tried = over.at(q.curved, precision, 1.0, q.mean)
    H = over.expected.curvature(tried.outputs, tried.deviations)
    curved = over.curved(q.curved.H.lerp(H, pace.damping))
    tried = over.at(curved, precision, 1.0, tried.mean)
    better = tried.bound > q.bound
    return tried if better else q, pace.after(better)


def settle(over: OverSpan, q: Q, m_step: MStep, least: float, steps: int) -> tuple[Q, bool]:
    """Return q at the fixed point of λ, σ, H and mean, and whether it was reached.

    ``least`` is a lower bound on λ; if it is infinite, λ and σ stay fixed. With update="em", whose
    steps are small, it takes one step.
    """
    learns, found, step = least < math.inf, False, None
    if over.moves:
        return _averaged(over, _climbed(over, q, least), m_step, least)
    if not learns:
        return q, False
    for _ in range(1 if m_step.update == "em" else steps):
        here = over.hyper(q)
        step = m_step(over.expectation(q), step)
        new = step.hyper._replace(precision=step.hyper.precision.clamp_min(least))
        noise = over.noise_of(new)
        moved = (new.precision / here.precision).log().abs().item()
        q = over.at(q.curved, new.precision.item(), noise, q.mean)
        if max(moved, abs(math.log(noise / q.noise))) < _AT_REST:
            found = True
            break
    return q, found


def _climbed(over: OverSpan, q: Q, least: float) -> Q:
    """Return q after as many rounds as raise the bound."""
    pace, quietly = Pace(), 0
    for _ in range(_CLIMBS):
        before = q.bound
        q, pace = _round(over, q, least, pace)
        quietly = 0 if q.bound > before + SMALL else quietly + 1
        if quietly == _QUIET:
            break
    return q


def _averaged(over: OverSpan, q: Q, m_step: MStep, least: float) -> tuple[Q, bool]:
    """Return q at the fixed point of λ and a moving H, and whether λ has come to rest there.

    Samples and draws make E[H] a rough function of H, which full steps of H follow forever: they
    change H by about 1 % in every step. Steps of length 3 / (n + 6) find its average instead
    (Robbins and Monro), where n grows faster when the direction changes (Kesten). Steps of log λ grow
    in one direction and shrink when it changes. They end when λ stays within its Monte Carlo error.
    """
    K, turns, stride, last = len(q.effective_dims), 0.0, _STRIDE, 0.0
    allowed, path = math.inf, [math.log(q.precision)]
    before: Tensor | None = None
    for _ in range(_STEPS):
        H, new = q.curved.H, q.precision
        change = over.expected.curvature(q.outputs, q.deviations).sub_(H)
        if least < math.inf:
            new = max(_stepped(over, q, stride).item(), least)
            allowed = m_step.allowed(q.effective_dims.mean(), K).item()
        path.append(math.log(new))
        step = path[-1] - path[-2]
        stride = min(1.3 * stride, 4 * _STRIDE) if step * last >= 0 else max(stride / 2, 0.5)
        last = step
        turns += _ONWARD if before is None or (change * before).sum() > 0 else 1
        before, of_H = change, (change.norm() / H.norm().clamp_min(1e-300)).item()
        H = H.add(change, alpha=3 / (turns + 5))
        q = over.at(over.curved(H), new, 1.0, q.mean, _NEWTON)
        recent = path[-_WINDOW:]
        found = len(recent) == _WINDOW and max(recent) - min(recent) < allowed
        if found or (of_H < _AT_REST and abs(step) < allowed):
            break
    return over.at(q.curved, q.precision, 1.0, q.mean, _POLISH), abs(last) < allowed


def _stepped(over: OverSpan, q: Q, stride: float) -> Tensor:
    """Return λ after a step of ``stride`` times MacKay's in log λ."""
    gamma, norm, start = q.effective_dims.mean(), q.mean.square().sum(), over.hyper(q).precision
    return function_space_Mackay_update(gamma, norm, start, stride)
