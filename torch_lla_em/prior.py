"""The prior N(0, Λ⁻¹): Λ = λ diag(scale)⁻², one λ for all weights or one per tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_lla_em.parameters import ParameterLayout


@dataclass(frozen=True)
class Prior:
    """The prior's shape; its precision λ is passed to every method."""

    layout: ParameterLayout
    scale: Tensor
    """(P,): the prior standard deviation at λ = 1; 0 for weights that move no output."""

    layerwise: bool = False

    def deviation(self, precision: Tensor) -> Tensor:
        """Return the prior standard deviation scale / √λ, shape (P,)."""
        return self.scale * self._per_weight(precision).rsqrt().to(self.scale)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over weights, (..., P): in all, (...), or per block, (..., blocks)."""
        return self.layout.block_sums(values) if self.layerwise else values.sum(-1)

    def squared_norm(self, w: Tensor) -> Tensor:
        """Return ‖w / scale‖², in all or per block, in float64."""
        return self.sum(self.unscaled(w).double().square())

    def num_weights(self) -> Tensor:
        """Return the number of live weights, in all or per block."""
        return self.sum((self.scale > 0).double())

    def unscaled(self, w: Tensor) -> Tensor:
        """Return w / scale, 0 for dead weights."""
        return w * _inverse(self.scale)

    def whitened(self, w: Tensor, precision: Tensor) -> Tensor:
        """Return x = Λ^{1/2} w, 0 for dead weights."""
        return w * _inverse(self.deviation(precision))

    def _per_weight(self, precision: Tensor) -> Tensor:
        return self.layout.expand(precision) if precision.dim() else precision


def g_prior_scale(squares: Tensor) -> Tensor:
    """Return 1 / s, and 0 where a weight moves no output."""
    return _inverse(squares.sqrt())


def _inverse(x: Tensor) -> Tensor:
    return torch.where(x > 0, 1 / x, 0)
