"""The Monte Carlo error of q's mean, which was found with expectations over K samples."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_lla_em.inference.over_span import OverSpan
from torch_lla_em.inference.q import Q

_GROUPS = 8
"""Largest number of groups of samples, each of which is left out once."""


def error_of_mean(over: OverSpan, q: Q) -> Tensor:
    """Return the variance of this error relative to q's variance, (), averaged over training examples.

    Without a group of samples the mean would move by -(G + λ)⁻¹ Jᵀ Δ, where Δ is the change of E[∇loss]. The
    jackknife estimates its variance from these moves, without those of H, λ and the samples that follow. The
    averages are those of ‖H J w‖², how E[y] responds to a change of the outputs. It is 0 if expectations
    are taken over the covariance itself.
    """
    expected, of_all, K = over.expected, over.span.of_all, len(q.samples)
    if q.deviations is None or over.is_exact or K < 2:
        return q.mean.new_zeros(())
    groups, moves = min(_GROUPS, K), []
    pushed, slope = of_all.push(q.samples), expected.slope(q.outputs, q.deviations)
    for first in range(groups):
        left_out = slice(first, None, groups)
        kept = pushed.clone()
        kept[..., left_out] = 0
        kept *= (K / (K - len(range(K)[left_out]))) ** 0.5
        change = expected.slope(q.outputs, expected.deviations(kept)) - slope
        pulled = of_all.pull(change.reshape(-1, 1))[0].double()
        moves.append(q.curved.solve(pulled, q.precision))
    moved = torch.stack(moves)
    moved = (moved - moved.mean(0)) * ((groups - 1) / groups) ** 0.5

    def response(outputs: Tensor) -> Tensor:
        curved = expected.product(q.curved.H, outputs.flatten(0, -2))
        return curved.double().square().sum()

    sums = over.share.sum(torch.stack([response(of_all.push(moved)), response(pushed) / K]))
    return sums[0] / sums[1].clamp_min(1e-30)
