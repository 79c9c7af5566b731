"""The labelled sites (pixels, tokens) of dense outputs as rows with weights; if there are many, a
random sample of them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import Batch
from torch_lla_em.problem.problem import Problem
from torch_lla_em.problem.sweep import FEW
from torch_lla_em.runtime import normals

KEPT_OUTPUTS = 1 << 18
"""Number of outputs of all examples above which labelled sites become rows; also the largest number
of outputs of these rows."""


class Sites(NamedTuple):
    """Labelled sites, sampled by strata: each example's labelled sites are cut into equal strata,
    and one site of each is drawn.

    A sum over them with weights 1 / share is an unbiased estimate of the sum over all labelled
    sites, and exact if all are kept. The draws are keyed by the example, so that they are the same
    in every pass and on every rank.
    """

    share: float
    """The share of the labelled sites that are kept."""

    most: int
    """Largest number of strata of an example."""

    outputs: float
    """Total number of outputs that are kept."""

    seed: int

    def take(
        self, problem: Problem, batch: Batch, f: Tensor, Jw: Tensor
    ) -> tuple[Batch, Tensor, Tensor]:
        """Return the kept sites of a batch as rows: their batch, f, (n, C), and J w, (K, n, C)."""
        numbers, at, weights = self.of(problem, batch, f)
        sites = f.shape[1:-1].numel()
        targets = batch.targets.reshape(len(f) * sites, -1)[at.to(batch.targets.device)]
        targets = targets[:, 0] if batch.targets[0].numel() == sites else targets
        rows = batch._replace(rows=numbers, targets=targets, weights=weights)
        return rows, f.flatten(0, -2)[at], Jw.flatten(1, -2)[:, at.to(Jw.device)]

    def of(self, problem: Problem, batch: Batch, f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the numbers of the rows, the places of their sites in the batch, and their
        weights, each (n,)."""
        counts = counted(problem, batch, f)
        order = (counts == 0).to(torch.uint8).argsort(dim=1, stable=True)
        labelled = (counts != 0).sum(1, keepdim=True)
        strata = torch.arange(self.most, device=f.device)
        within = torch.zeros(1, device=f.device)
        if self.share < 1:
            drawn = normals(self.seed, 2, [0], batch.rows, self.most)[0].to(f.device)
            within = 0.5 * (1 + torch.erf(drawn / math.sqrt(2)))  # uniform
        place = ((strata + within) / self.share).long().expand(len(counts), -1)
        kept = place < labelled
        site = order.gather(1, place.clamp_max(order.shape[1] - 1))
        examples = torch.arange(len(counts), device=f.device)[:, None]
        numbers = batch.rows[:, None] * self.most + torch.arange(self.most, device="cpu")
        weights = counts.gather(1, site) / self.share
        return numbers[kept.cpu()], (examples * counts.shape[1] + site)[kept], weights[kept]


def counted(problem: Problem, batch: Batch, f: Tensor) -> Tensor:
    """Return the weight of every site, 0 without a label, (B, sites)."""
    counts = problem.loss(batch.targets, batch.weights).counts
    if counts is None:
        return torch.ones(len(f), f.shape[1:-1].numel(), device=f.device)
    return counts.to(f.device).expand(f.shape).float().amax(-1).flatten(1)


def sites_of(problem: Problem, seed: int) -> Sites | None:
    """Return the sites that become rows, or None if the outputs are few, have one site each, or are
    continuous."""
    data, model = problem.data, problem.linear_model
    if data.facts.num_outputs <= KEPT_OUTPUTS or problem.likelihood.real_valued:
        return None
    few = problem.sweep.pieces(data.first(), FEW)[0]
    with model.network.guarded():
        _, *sites, classes = model.network.outputs(few.inputs).shape or (1, 1)
    if torch.Size(sites).numel() == 1:
        return None

    def labels(batch: Batch, f: Tensor, Jw: Tensor) -> tuple[int, int]:
        labelled = (counted(problem, batch, f) != 0).sum(1)
        return int(labelled.sum()), int(labelled.max())

    counts = problem.push_forward(problem.zeros(1), labels)
    every = data.group.meet(
        [sum(n for n, _ in counts), max([n for _, n in counts], default=0)], list
    )
    total, most = sum(n for n, _ in every), max(n for _, n in every)
    share = min(1.0, KEPT_OUTPUTS / max(1, total * classes))
    return Sites(share, max(1, math.ceil(most * share)), min(KEPT_OUTPUTS, total * classes), seed)
