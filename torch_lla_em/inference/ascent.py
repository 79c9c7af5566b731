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

_QUIET, _CLIMBS = 4, 120
"""Rounds in a row without such a gain that end this way, and the largest number of rounds."""

_NEWTON, _POLISH = 2, 50
"""Newton steps of the mean in every step towards the fixed point, and there."""

_AT_REST = 1e-3
"""Largest change of log λ, log σ and (relative) H in a step that counts as converged."""

_SLOWER = 6
"""Factor of the change of log λ if H moves, because H follows λ."""

_SLACK = 1.0
"""Nats that the bound may decrease on the way to the fixed point, which is only near its maximum."""


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
    steps are small, it takes one step. Full steps of a moving H can overshoot forever, so steps
    shrink after a change of direction and grow otherwise.
    """
    learns, found, step, last = least < math.inf, False, None, None
    if not (learns or over.moves):
        return q, False
    damping = 0.5
    pace, quietly = Pace(), 0
    for _ in range(_CLIMBS * over.moves):
        before = q.bound
        q, pace = _round(over, q, least, pace)
        quietly = 0 if q.bound > before + SMALL else quietly + 1
        if quietly == _QUIET:
            break
    for _ in range(1 if m_step.update == "em" else steps):
        here = new = over.hyper(q)
        if learns and over.moves:
            new = here._replace(precision=_stepped(over, q, 1.0).clamp_min(least))
        elif learns:
            step = m_step(over.expectation(q), step)
            new = step.hyper._replace(precision=step.hyper.precision.clamp_min(least))
        noise, curved = over.noise_of(new), q.curved
        moved = (new.precision / here.precision).log().abs().item()
        moved = max(moved, abs(math.log(noise / q.noise)))
        if over.moves:
            change = over.expected.curvature(q.outputs, q.deviations) - curved.H
            of_H = (change.norm() / curved.H.norm().clamp_min(1e-300)).item()
            moved = max(_SLOWER * moved, of_H)
            ahead = last is not None and (change * last).sum().item() > 0
            damping, last = min(1.0, 1.1 * damping) if ahead else max(0.02, 0.7 * damping), change
            curved = over.curved(curved.H + damping * change)
        tried = over.at(curved, new.precision.item(), noise, q.mean, _NEWTON)
        if over.moves and tried.bound < q.bound - _SLACK:
            damping /= 2
        else:
            q = tried
        if moved < _AT_REST:
            found = True
            break
    return over.at(q.curved, q.precision, q.noise, q.mean, _POLISH), found


def _stepped(over: OverSpan, q: Q, stride: float) -> Tensor:
    """Return λ after a step of ``stride`` times MacKay's in log λ."""
    gamma, norm, start = q.effective_dims.mean(), q.mean.square().sum(), over.hyper(q).precision
    return function_space_Mackay_update(gamma, norm, start, stride)
