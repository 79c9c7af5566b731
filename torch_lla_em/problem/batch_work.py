"""What one batch adds to a pass: Jᵀ u, with u made of J w or of noise."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_lla_em.data import Batch
from torch_lla_em.jacobian import AddPullback
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.problem.curvature import Curvature, hessian_product, hessian_sqrt_product
from torch_lla_em.problem.finite import DERIVATIVE, LIKELIHOOD, OUTPUTS, all_finite
from torch_lla_em.problem.passes import LocalPasses

Cotangent = Callable[[Batch, Tensor, Tensor], Tensor]
"""(batch, outputs (M, B, ..., C) that H is taken at, J w) -> u."""


class BatchWork:
    """A batch's own products under a likelihood, with H where a curvature says."""

    def __init__(self, local: LocalPasses, likelihood: Likelihood, curvature: Curvature):
        self._model, self._data, self._finite = local.linear_model, local.data, local.finite
        self.likelihood, self.curvature = likelihood, curvature

    def add_product(self, batch: Batch, cotangent: Cotangent, w: Tensor, total: Tensor) -> None:
        """Add Jᵀ u to the total, with u = cotangent(batch, at, J w)."""
        at, Jw, pull = self._pushed(batch, w)
        u = cotangent(batch, at, Jw)
        self.note(batch, DERIVATIVE, all_finite(Jw))
        self.note(batch, LIKELIHOOD, all_finite(u))
        pull(u, total)

    def curved(self, batch: Batch, at: Tensor, Jw: Tensor) -> Tensor:
        """Return H J w."""
        return self._masked(hessian_product(self.likelihood, at, Jw), batch)

    def sloped(self, batch: Batch, at: Tensor, Jw: Tensor) -> Tensor:
        """Return ∇loss(J w)."""
        return self._masked(self.likelihood.gradient(Jw, batch.targets), batch)

    def _masked(self, u: Tensor, batch: Batch) -> Tensor:
        mask = self.likelihood.mask(batch.targets)
        return u if mask is None else u * mask.unsqueeze(-1)

    def _pushed(self, batch: Batch, w: Tensor) -> tuple[Tensor, Tensor, AddPullback]:
        """Return where H is taken, (M, B, ..., C), J w, and the map that adds Jᵀ u."""
        M = self.curvature.columns(batch)
        columns = torch.cat([self.curvature.points.to(w), w]) if M else w
        f, Jw, pull = self._model.jvp_and_vjp(batch.inputs, columns)
        self.inspect(batch, f)
        if self.curvature.points is None:
            return f[None], Jw, pull
        if not M:
            return self.curvature.outputs(batch), Jw, pull
        if self._data.kept:
            self.curvature.know(batch, Jw[:M])
        return Jw[:M], Jw[M:], pull

    def noise_outputs(
        self, batch: Batch, draw: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, AddPullback]:
        """Return S ε, with ε = draw(at), and the map that adds Jᵀ u."""
        f, pull = self._model.vjp(batch.inputs)
        self.inspect(batch, f)
        at = f[None]
        if self.curvature.points is not None:
            at = self._model.jvp(batch.inputs, self.curvature.points)[1]
            self.note(batch, DERIVATIVE, all_finite(at))
        u = self._masked(hessian_sqrt_product(self.likelihood, at, draw(at)), batch)
        self.note(batch, LIKELIHOOD, all_finite(u))
        return u, pull

    def inspect(self, batch: Batch, f: Tensor) -> None:
        """Note whether outputs are finite; in the first pass, check targets against them."""
        finite = torch.isfinite(f).all()
        self.note(batch, OUTPUTS, finite)
        if self._data.num_passes == 0:
            self._data.num_outputs += f.numel()
            try:
                self.likelihood.check(f, batch.targets)
            except (TypeError, ValueError) as error:
                if finite:  # else that is refused when the pass has ended
                    raise type(error)(f"Batch {batch.index}: {error}") from None

    def note(self, batch: Batch, what: str, fine: Tensor) -> None:
        self._finite.note(batch.index, what, fine)
