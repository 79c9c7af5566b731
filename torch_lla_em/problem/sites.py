"""A random part of the sites (pixels, tokens) of each example, at which outputs are kept."""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import Batch
from torch_lla_em.problem.problem import Problem
from torch_lla_em.problem.sweep import FEW
from torch_lla_em.runtime import normal

KEPT_OUTPUTS = 1 << 18
"""Number of outputs of all examples above which only those of some sites are kept."""

_STREAM = 2


class Sites(NamedTuple):
    """The sites of each example that are kept: one at random in each of several equal parts.

    A sum over them, times ``total / number``, is an unbiased estimate of that over all sites. They
    are keyed by the example, so that they are the same in every pass and on every rank.
    """

    number: int
    """Kept sites of an example."""

    total: int
    """All sites of an example."""

    seed: int

    @property
    def share(self) -> float:
        """The share of sites that are kept."""
        return self.number / self.total

    def of(self, rows: Tensor) -> Tensor:
        """Return the indices of the sites of examples, (B, number)."""
        drawn = normal(self.seed, _STREAM, 0, rows, self.number)
        places = torch.arange(self.number, device=rows.device)
        within = 0.5 * (1 + torch.erf(drawn / sqrt(2)))  # uniform
        found = ((places + within) * (self.total / self.number)).long()
        return found.clamp_max(self.total - 1)

    def take(self, values: Tensor, rows: Tensor, axis: int = 0) -> Tensor:
        """Return values (..., B, *sites, C) at the sites, (..., B, number, C); examples are on ``axis``."""
        index = self.of(rows).to(values.device)
        examples = torch.arange(len(index), device=values.device)[:, None]
        flat = values.flatten(axis + 1, -2)
        return flat[(slice(None),) * axis + (examples, index)]

    def take_targets(self, targets: Tensor, rows: Tensor) -> Tensor:
        """Return targets (B, *sites, ...) at the sites, (B, number, ...)."""
        size = targets[0].numel() // self.total
        found = self.take(targets.reshape(len(targets), self.total, size), rows)
        dims = targets.dim() - 1
        while dims and targets.shape[1:][:dims].numel() != self.total:
            dims -= 1
        return found.reshape(*found.shape[:2], *targets.shape[1 + dims :])

    def batch(self, batch: Batch) -> Batch:
        """Return a batch with the targets, and their weights, at its sites only."""
        targets, weights = self.take_targets(batch.targets, batch.rows), batch.weights
        if weights is not None and weights.dim() > 1:
            weights = self.take_targets(weights, batch.rows)
        return batch._replace(targets=targets, weights=weights)

    def put(self, values: Tensor, rows: Tensor, like: Tensor) -> Tensor:
        """Return values (K, B, number, C) at their sites and 0 at the others, (K, *like.shape)."""
        index = self.of(rows).to(values.device)[None, :, :, None]
        total = values.new_zeros(*values.shape[:2], self.total, values.shape[-1])
        total.scatter_add_(2, index.expand_as(values), values)
        return total.view(len(values), *like.shape)


def sites_of(problem: Problem, seed: int) -> Sites | None:
    """Return the sites that are kept, or None if outputs are kept at all of them.

    All are kept if they are few, if there is one site per example, or their number varies, and for
    continuous targets.
    """
    data, model = problem.data, problem.linear_model
    if data.facts.num_outputs <= KEPT_OUTPUTS or problem.likelihood.real_valued:
        return None
    first = data.first()
    few = next(first.split(FEW)) if problem.sweep.pieces.stand_alone(first) else first
    with model.network.guarded():
        _, *sites, classes = model.outputs(few.inputs).shape or (1, 1)
    total, examples = torch.Size(sites).numel(), data.facts.num_rows or 1
    if total == 1 or examples * total * classes != data.facts.num_outputs:
        return None
    number = max(1, KEPT_OUTPUTS // (examples * classes))
    return Sites(number, total, seed) if number < total else None
