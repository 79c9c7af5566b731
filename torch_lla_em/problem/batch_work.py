"""What one batch adds to a pass: Jᵀ u, with u made of J w or of noise."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_lla_em.data import Batch
from torch_lla_em.jacobian import Rows
from torch_lla_em.likelihoods import Likelihood, compare_with_log_prob
from torch_lla_em.problem.finite import DERIVATIVE, LIKELIHOOD, OUTPUTS
from torch_lla_em.problem.sweep import Sweep

Cotangent = Callable[[Batch, Tensor, Tensor], Tensor]
"""(batch, outputs (B, ..., C) that H is taken at, J w) -> u."""

# of J w at the point: 256 MB in float32
_OUTPUTS_KEPT = 1 << 26


class BatchWork:
    """A batch's own products under a likelihood, with H at the network's outputs or at J w."""

    def __init__(self, sweep: Sweep, likelihood: Likelihood, point: Tensor | None = None):
        self._data, self.finite = sweep.data, sweep.finite
        self.likelihood = likelihood
        self.point = point
        """The w of J w, (1, P), beside the network, which takes it again with every batch."""

        self._known: dict[tuple[int, int], Tensor] = {}
        self._last: tuple[Rows, Tensor] | None = None
        self._inspected: Rows | None = None

    def curved(self, batch: Batch, at: Tensor, Jw: Tensor) -> Tensor:
        """Return H J w."""
        return self._checked(batch, Jw, self.likelihood.hessian_product(at, Jw))

    def sloped(self, batch: Batch, at: Tensor, Jw: Tensor) -> Tensor:
        """Return ∇loss(J w)."""
        return self._checked(batch, Jw, self.likelihood.gradient(Jw, batch.targets))

    def _checked(self, batch: Batch, Jw: Tensor, u: Tensor) -> Tensor:
        u = self._masked(u, batch)
        self.finite.check(batch.index, DERIVATIVE, Jw)
        self.finite.check(batch.index, LIKELIHOOD, u)
        return u

    def _masked(self, u: Tensor, batch: Batch) -> Tensor:
        mask = self.likelihood.mask(batch.targets)
        return u if mask is None else u * mask.unsqueeze(-1).to(u.dtype)

    def pushed(self, rows: Rows, batch: Batch, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return where H is taken, (B, ..., C), and J w."""
        known = None if batch.kept is None else self._known.get(batch.place)
        if known is None and self._last is not None and self._last[0] is rows:
            known = self._last[1]
        more = self.point is not None and known is None
        Jw = rows.push(torch.cat([self.point.to(w), w]) if more else w)
        self.inspect(rows, batch)
        if not more:
            return rows.f if known is None else known, Jw
        self._last = rows, Jw[0]
        held = sum(map(torch.numel, self._known.values())) + Jw[0].numel()
        if batch.kept is not None and batch.kept is self._data.kept and held <= _OUTPUTS_KEPT:
            self._known[batch.place] = Jw[0].clone()
        return Jw[0], Jw[1:]

    def noise_outputs(
        self, rows: Rows, batch: Batch, draw: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return S ε, with ε = draw(at), and where H is taken, ``at``."""
        at = rows.f
        self.inspect(rows, batch)
        if self.point is not None:
            at = rows.push(self.point)[0]
            self.finite.check(batch.index, DERIVATIVE, at)
        u = self.root(batch, at, draw(at))
        self.finite.check(batch.index, LIKELIHOOD, u)
        return u, at

    def root(self, batch: Batch, at: Tensor, noise: Tensor) -> Tensor:
        """Return S ε."""
        mask = self.likelihood.mask(batch.targets)
        u = self.likelihood.hessian_sqrt_product(at, noise)
        return u if mask is None else u * mask.unsqueeze(-1).to(u.dtype).sqrt()

    def inspect(self, rows: Rows, batch: Batch) -> None:
        """Expect outputs to be finite; in the first pass, check targets against them."""
        if self._inspected is rows:
            return
        self._inspected, f = rows, rows.f
        self.finite.expect(batch.index, OUTPUTS, f)
        if self._data.num_passes == 0:
            is_first = self._data.num_outputs == 0
            self._data.num_outputs += f.numel()
            try:
                self.likelihood.check(f, batch.targets)
                if is_first:
                    compare_with_log_prob(self.likelihood, f, batch.targets)
            except (TypeError, ValueError) as error:
                if torch.isfinite(f).all():  # else that is refused when the pass has ended
                    raise type(error)(f"Batch {batch.index}: {error}") from None
