"""Rounds of λ, H and the mean over a span that must raise the bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from torch_lla_em.inference.mackay import function_space_Mackay_update
from torch_lla_em.inference.over_span import OverSpan
from torch_lla_em.inference.q import Q

SMALL, _ROUNDS_WITHOUT_GAIN, _MOST_ROUNDS = 0.05, 3, 120
"""Nats that a round must gain to count over a complete span, rounds in a row without such a gain that end
them, and their largest number."""


class Pace(NamedTuple):
    """The length of a round's steps over a span: it grows after a round that raises the bound."""

    damping: float = 0.7
    """Share of the change of H."""

    stride: float = 2.0
    """Length of the step of log λ, relative to MacKay's."""

    def after(self, better: bool) -> Pace:
        """Return the pace of the next round."""
        if better:
            return Pace(min(1.0, 1.6 * self.damping), min(4.0, 1.6 * self.stride))
        return Pace(max(0.1, self.damping / 2), max(0.3, self.stride / 3))


def summit(over: OverSpan, q: Q, least: float, is_late: Callable[[], bool]) -> Q:
    """Return q after as many rounds as raise the bound, until the time is over."""
    pace, quietly = Pace(), 0
    for _ in range(_MOST_ROUNDS):
        before = q.bound
        q, pace = improve(over, q, least, pace)
        quietly = 0 if q.bound > before + SMALL else quietly + 1
        if quietly == _ROUNDS_WITHOUT_GAIN or is_late():
            break
    return q


def improve(over: OverSpan, q: Q, least: float, pace: Pace) -> tuple[Q, Pace]:
    """Return q after a step of λ, one of H, and one of the mean after each, if they raise the bound."""
    precision = stepped(over, q, least, pace.stride)
    tried = over.at(q.curved, precision, 1.0, q.mean)
    H = over.expected.curvature(tried.outputs, tried.deviations)
    curved = over.curved(q.curved.H.lerp(H, pace.damping))
    tried = over.at(curved, precision, 1.0, tried.mean)
    better = tried.bound > q.bound
    return tried if better else q, pace.after(better)


def stepped(over: OverSpan, q: Q, least: float, stride: float) -> float:
    """Return λ after a step of ``stride`` times MacKay's in log λ."""
    if least == math.inf:
        return q.precision
    gamma, norm = q.effective_dims.mean(), q.mean.square().sum()
    return max(function_space_Mackay_update(gamma, norm, over.hyper(q)[0], stride).item(), least)
