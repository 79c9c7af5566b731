"""The prior N(0, Λ⁻¹): Λ = λ diag(scale)⁻², one λ for all weights or one per tensor."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torch_lla_em.jacobian import ParameterLayout
from torch_lla_em.solvers import Space

logger = logging.getLogger("torch_lla_em")

DAMPING = 0.01
"""Share of the mean squared feature that the g-prior adds to that of every parameter."""

_POWERS = {"tensor": (1.0, 0.0), "root": (0.5, 0.0), "half": (1.0, 0.5)}
"""Powers of s / m (the feature of a parameter relative to its tensor) and of m, by which it divides."""

_MOST_IDLE = 0.25
"""Share of idle parameters above which ``g_prior=None`` uses "half" instead of "root"."""


@dataclass(frozen=True)
class Prior:
    """The prior's shape; its precision λ is passed to every method."""

    layout: ParameterLayout
    scale: Tensor
    """(P,): the prior standard deviation at λ = 1; 0 for weights that move no output."""

    layerwise: bool = False

    space: Space = Space()
    """The space of vectors."""

    def deviation(self, precision: Tensor) -> Tensor:
        """Return the prior standard deviation scale / √λ, shape (P,)."""
        return self.scale * self.per_weight(precision).rsqrt().to(self.scale)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over weights, (..., P): in all, (...), or per block, (..., blocks)."""
        return self.layout.block_sums(values) if self.layerwise else values.sum(-1)

    def sum_of_squares(self, rows: Tensor) -> Tensor:
        """Sum the squares of vectors (K, P) over weights, (K,), or per block, in float64."""
        pieces = rows.split(self.layout.sizes, dim=1) if self.layerwise else (rows,)
        sums = torch.stack([Space().dots(piece, piece) for piece in pieces], dim=1)
        return sums if self.layerwise else sums[:, 0]

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

    def per_weight(self, values: Tensor) -> Tensor:
        """Return values, () or (blocks,), for every weight: () or (P,)."""
        return self.layout.expand(values) if values.dim() else values


def g_prior_scale(squares: Tensor, prior: Prior, g_prior: bool | str = True) -> Tensor:
    """Return the prior standard deviation of every weight at λ = 1, (P,), from squared features s².

    True: 1 / s. With m the root mean square of s over a tensor, "tensor": m / s, so that tensors keep
    the balance that they have under the plain prior; "root": √(m / s), half-way between "tensor" and
    the plain prior; "half": √m / s, half-way between "tensor" and True. "auto" chooses between the
    last two. 0 where a weight moves no output; 1 everywhere where none does. 1 % of the mean s² is
    added to every s²: otherwise weights that hardly any example moves would get prior deviations up
    to millions of times the others'.
    """
    live = squares > 0
    if not live.any():  # the curvature is 0 at every example
        return torch.ones_like(squares)
    by_tensor = replace(prior, layerwise=g_prior is not True)
    counts = by_tensor.sum(live.double()).clamp_min(1)
    mean = by_tensor.per_weight(by_tensor.sum(squares.double()) / counts).to(squares)
    if g_prior == "auto":
        g_prior = _choose(squares <= DAMPING * mean, prior)
    within, across = _POWERS.get(str(g_prior), (1.0, 1.0))
    mean = torch.where(mean > 0, (1 + DAMPING) * mean, 1)
    relative = (squares + DAMPING / (1 + DAMPING) * mean) / mean
    return torch.where(live, relative ** (-within / 2) * mean ** (-across / 2), 0)


def _choose(idle: Tensor, prior: Prior) -> str:
    """Return "half" or "root", by the share of parameters that hardly change any output."""
    of_all = replace(prior, layerwise=False)
    total = of_all.sum(torch.ones_like(idle, dtype=torch.float64))
    share = (of_all.sum(idle.double()) / total).item()
    chosen = "half" if share > _MOST_IDLE else "root"
    logger.info('Scaling "%s": %.0f %% of the weights move hardly any output.', chosen, 100 * share)
    return chosen


def _inverse(x: Tensor) -> Tensor:
    return torch.where(x > 0, 1 / x, 0)
