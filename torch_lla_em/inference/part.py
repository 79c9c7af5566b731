"""Directions for the span of a last layer, which nearly solve the equations of a part of the examples.

The next directions of a span are the residuals r of A z = b. If the parameters are those of a last layer, a
product with A of a part of the examples costs a small part of one with A, and no pass over the network. Solutions
of A_part z = r are better directions than r, so the span remains smaller, with the square of whose size the time
for G grows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_lla_em.inference.over_span import OverSpan
from torch_lla_em.inference.q import Q
from torch_lla_em.solvers import BlockCG, FaultyProductError, Operator

_SHARE, _FEWEST = 8, 2048
"""The part is one of so many examples, but has at least so many, as far as there are."""

_SOLVER = BlockCG(tolerance=0.1, max_passes=20)


def ahead(over: OverSpan, q: Q, residuals: Tensor) -> Tensor:
    """Return directions (k, P) from the residuals of q; without features of a last layer these themselves."""
    span, outputs = over.span, over.span.of_all
    if outputs.features is None:
        return residuals
    total = over.share.total
    number = min(total, max(total // _SHARE, _FEWEST))
    chosen = torch.arange(number, device="cpu") * total // number
    rows = over.share.find(chosen)[1].to(residuals.device)
    part, layout = outputs.of(rows), span.prior.layout
    scale = span.prior.scale * math.sqrt(total / number / q.precision)

    def product(z: Tensor) -> Tensor:
        Jw = part.push_weights(z * scale, layout)
        return part.pull_weights(over.expected.product(q.curved.H, Jw, rows), layout) * scale

    try:
        return _SOLVER.roughly(Operator(product), residuals)
    except FaultyProductError:  # the prior is lost to rounding, which the next residuals will show
        return residuals
