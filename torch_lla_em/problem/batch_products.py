"""What one batch adds to a pass: Jᵀ u, with u made of J w or of noise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from torch_lla_em.data import Batch, Data
from torch_lla_em.jacobian import AddPullback, LinearModel
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.problem.finite import DERIVATIVE, LIKELIHOOD, all_finite
from torch_lla_em.problem.placed_vectors import PlacedVectors

# of J w at the curvature point: 256 MB in float32
_OUTPUTS_KEPT = 1 << 26

Self = TypeVar("Self", bound="BatchProducts")
Cotangent = Callable[[Batch, Tensor, Tensor], Tensor]
Draw = Callable[[Tensor, Tensor], Tensor]


class BatchProducts(PlacedVectors):
    """A batch's own products, with H at the network's outputs, or at J w for one point w."""

    def __init__(self, linear_model: LinearModel, likelihood: Likelihood, data: Data):
        super().__init__(linear_model, likelihood, data)
        self.curvature_point: Tensor | None = None
        self._at_point: dict[tuple[int, int], Tensor] = {}

    def with_likelihood(self: Self, likelihood: Likelihood) -> Self:
        """Return the same problem under another likelihood."""
        other = copy.copy(self)
        other.likelihood = likelihood
        return other

    def with_curvature_at(self: Self, w: Tensor | None) -> Self:
        """Return the same problem with H taken at J w, or at the network's outputs."""
        other = copy.copy(self)
        # beside the network, which takes it again with every batch
        near = self.linear_model.network.device
        other.curvature_point = None if w is None else self.spread.whole(w[None])[0].to(near)
        other._at_point = {}
        return other

    def _curvature(self, batch: Batch, at: Tensor, Jw: Tensor) -> Tensor:
        return self._masked(self.likelihood.hessian_product(at, Jw), batch)

    def _gradient(self, batch: Batch, at: Tensor, Jw: Tensor) -> Tensor:
        return self._masked(self.likelihood.gradient(Jw, batch.targets), batch)

    def _masked(self, u: Tensor, batch: Batch) -> Tensor:
        mask = self.likelihood.mask(batch.targets)
        return u if mask is None else u * mask.unsqueeze(-1)

    def _add_product(self, batch: Batch, cotangent: Cotangent, w: Tensor, total: Tensor) -> None:
        """Add Jᵀ u to the total, with u = cotangent(batch, at, J w)."""
        place, point = (int(batch.rows[:1].sum()), len(batch.rows)), self.curvature_point
        at = self._at_point.get(place)
        if point is None or at is not None:
            f, Jw, add_pullback = self.linear_model.jvp_and_vjp(batch.inputs, w)
        else:
            columns = torch.cat([point[None].to(w), w])
            f, Jw, add_pullback = self.linear_model.jvp_and_vjp(batch.inputs, columns)
            at, Jw = Jw[0], Jw[1:]
            if self.data.kept and self.data.num_outputs <= _OUTPUTS_KEPT:
                self._at_point[place] = at.clone()
        at = f if at is None else at
        self._inspect(batch, f)
        u = cotangent(batch, at, Jw)
        self._finite.note(batch.index, DERIVATIVE, all_finite(Jw))
        self._finite.note(batch.index, LIKELIHOOD, all_finite(u))
        add_pullback(u, total)

    def _root_product(self, batch: Batch, draw: Draw) -> Tensor:
        """Return J_bᵀ S_b ε, with ε = draw(rows, f) of shape (K, *f.shape)."""
        u, add_pullback = self._noise_outputs(batch, draw)
        total = self._near_zeros(len(u))
        add_pullback(u, total)
        return total

    def _root_products(
        self, batch: Batch, draw: Draw, take: Callable[[slice, Tensor], None]
    ) -> None:
        """Have J_bᵀ S_b ε taken, in as many columns at once as fit."""
        u, add_pullback = self._noise_outputs(batch, draw)
        self.linear_model.pull_in_columns(u, add_pullback, self._near_zeros, take)

    def _noise_outputs(self, batch: Batch, draw: Draw) -> tuple[Tensor, AddPullback]:
        """Return S_b ε, and the map of ``vjp``."""
        f, add_pullback = self.linear_model.vjp(batch.inputs)
        self._inspect(batch, f)
        at = f
        if self.curvature_point is not None:
            at = self.linear_model.jvp(batch.inputs, self.curvature_point[None])[1][0]
            self._finite.note(batch.index, DERIVATIVE, all_finite(at))
        u = self._masked(self.likelihood.hessian_sqrt_product(at, draw(batch.rows, f)), batch)
        self._finite.note(batch.index, LIKELIHOOD, all_finite(u))
        return u, add_pullback
