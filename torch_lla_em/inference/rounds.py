"""Steps of λ and a moving H over a span, and what the rest of their way is worth."""

from __future__ import annotations

import math

from torch_lla_em.inference.mackay import function_space_Mackay_update
from torch_lla_em.inference.over_span import OverSpan
from torch_lla_em.inference.q import Q
from torch_lla_em.inference.records import Way

OF_H, _LEAST_OF_H = 0.55, 0.1
"""Share of the change of H that a step takes at first and at least."""

_STEEP, _FAR = {False: 0.9, True: 0.99}, {False: math.log(2), True: math.log(4)}
"""Largest slope of MacKay's update that a secant takes for real, over spans that are complete or not, and the
largest change of log λ by it."""


def improve(over: OverSpan, q: Q, least: float, damping: float, stride: float) -> Q:
    """Return q after a step of λ, one of H, and one of the mean after each, if they raise the bound.

    ``damping`` is the share of the change of H, and ``stride`` the step of log λ, relative to MacKay's.
    """
    precision = stepped(over, q, least, stride)
    tried = over.at(q.curved, precision, 1.0, q.mean)
    H = over.expected.curvature(tried.outputs, tried.deviations)
    curved = over.curved(q.curved.H.lerp(H, damping))
    tried = over.at(curved, precision, 1.0, tried.mean)
    return tried if tried.bound > q.bound else q


def stepped(over: OverSpan, q: Q, least: float, stride: float) -> float:
    """Return λ after a step of ``stride`` times MacKay's in log λ."""
    if least == math.inf:
        return q.precision
    gamma, norm = q.effective_dims.mean(), q.mean.square().sum()
    return max(function_space_Mackay_update(gamma, norm, over.hyper(q)[0], stride).item(), least)


def course(q: Q, old: float, before: Way | None, complete: bool = False) -> Way:
    """Return where λ stands at q, after steps that began at λ ``old`` and its course there.

    Steps of H over a ``complete`` span become shorter where λ turns, since H overshoots there.
    """
    gamma, norm = q.effective_dims.mean(), q.mean.square().sum()
    here = gamma.new_tensor(q.precision)
    plain = function_space_Mackay_update(gamma, norm, here).log().item()
    moved, left, slope = math.log(q.precision / old), plain - math.log(q.precision), 0.0
    if before is not None and moved:
        slope = (plain - before.plain) / moved
    slope = min(slope, _STEEP[complete]) if slope > -1 else 0.0  # otherwise H has not followed yet
    far = _FAR[complete]
    step = max(-far, min(far, left / (1 - slope)))
    # the slope of the bound in log λ, which vanishes there
    worth = 0.25 * abs((gamma - q.precision * norm).item() * step)
    share = OF_H
    if complete and before is not None:
        turns = step * math.log(before.ahead / old) < 0
        share = max(_LEAST_OF_H, before.share / 2) if turns else before.share
    return Way(plain, q.precision * math.exp(step), worth, share)
