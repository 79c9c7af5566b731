"""The outputs at which the Hessian H of the likelihood is evaluated: f, or J w for some w."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_lla_em.data import Batch, Data
from torch_lla_em.jacobian import Rows

# entries of J w at the point that are kept: 256 MB in float32
_OUTPUTS_KEPT = 1 << 26


class Point:
    """Returns the outputs at which H is evaluated, for each batch."""

    def __init__(self, data: Data, w: Tensor | None = None):
        self._data = data
        self.w = w
        """The w of J w, (1, P), on the network's device; None: the network's own outputs."""

        self._known: dict[tuple[int, int], Tensor] = {}
        self._last: tuple[Rows, Tensor] | None = None

    def of(self, rows: Rows) -> Tensor:
        """Return the outputs at which H is evaluated, (B, ..., C)."""
        return rows.f if self.w is None else rows.push(self.w)[0]

    def push(self, rows: Rows, batch: Batch, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs at which H is evaluated, and J w; this takes one more column at most."""
        if self.w is None:
            Jw = rows.push(w)
            return rows.f, Jw
        known = None if batch.kept is None else self._known.get(batch.place)
        if known is None and self._last is not None and self._last[0] is rows:
            known = self._last[1]
        if known is not None:
            return known, rows.push(w)
        Jw = rows.push(torch.cat([self.w.to(w), w]))
        self._last = rows, Jw[0]
        held = sum(map(torch.numel, self._known.values())) + Jw[0].numel()
        if batch.kept is not None and batch.kept is self._data.kept and held <= _OUTPUTS_KEPT:
            self._known[batch.place] = Jw[0].clone()
        return Jw[0], Jw[1:]
