"""Collects the outputs of all examples of a rank from batches, and multiplies them by Jᵀ."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import Batch, Share
from torch_lla_em.jacobian import Rows
from torch_lla_em.problem.problem import Problem
from torch_lla_em.problem.sites import Sites
from torch_lla_em.problem.sweep import BLOCK, Contributions


class Outputs(NamedTuple):
    """f and J w of a rank's N examples, with their targets. Outputs of shape (N,) get an axis for
    one class."""

    share: Share  # which examples they are
    f: Tensor  # (N, ..., C)
    targets: Tensor  # (N, ...)
    Jw: Tensor  # (K, N, ..., C)
    weights: Tensor | None = None  # (N,), or in the shape of the targets; None: all are 1


def gathered(
    problem: Problem, pushed: list[tuple[Batch, Tensor, Tensor]], K: int, sites: int = 1
) -> Outputs | None:
    """Return f and J w of this rank's examples from those of batches; None if they differ in shape.

    Other tensors (K, B, ...) may replace J w. Every example has ``sites`` rows.
    """
    group, like = problem.data.group, problem.zeros(1)
    forms = set()
    for b, f, Jw in pushed:
        w = None if b.weights is None else b.weights.shape[1:]
        forms.add((b.targets.dtype, b.targets.shape[1:], f.shape[1:], Jw.shape[2:], w))
    forms = group.meet(forms, lambda every: set.union(*every))
    if len(forms) != 1:
        return None
    ((dtype, of_targets, of_f, of_Jw, of_weights),) = forms
    if not of_f:  # outputs of shape (N,) get an axis of the classes
        of_f, of_targets = torch.Size([1]), torch.Size([1, *of_targets])
        of_Jw = of_Jw or torch.Size([1])
    numbers = [torch.zeros(0, dtype=torch.long, device="cpu"), *(b.rows for b, _, _ in pushed)]
    share = Share(torch.cat(numbers).sort()[0], sites * problem.data.facts.num_rows, group)
    N = len(share.numbers)
    outputs = Outputs(
        share,
        like.new_zeros(N, *of_f),
        like.new_zeros(N, *of_targets, dtype=dtype),
        like.new_zeros(K, N, *of_Jw),
        None if of_weights is None else like.new_zeros(N, *of_weights),
    )
    for batch, f, Jw in pushed:
        rows = share.find(batch.rows)[1].to(like.device)
        outputs.f[rows] = f.to(like).view(-1, *of_f)
        outputs.targets[rows] = batch.targets.to(like.device).view(-1, *of_targets)
        outputs.Jw[:, rows] = Jw.to(like).view(K, -1, *of_Jw)
        if outputs.weights is not None and batch.weights is not None:
            outputs.weights[rows] = batch.weights.to(like)
    return outputs


def pull_back(problem: Problem, u: Tensor, share: Share, sites: Sites | None = None) -> Tensor:
    """Return Jᵀ u, shape (K, P), for u (K, n, ..., C) of the examples of a share, whose rows may be
    ``sites``.

    Ranks share sums only, whose size does not depend on N.
    """

    def add(rows: Rows, batch: Batch, columns: Tensor) -> Contributions:
        problem.inspect(rows, batch)
        numbers, places = batch.rows, None
        if sites is not None:
            numbers, places, _ = sites.of(problem, batch, rows.f)
        chosen, here = share.find(numbers)
        if len(chosen) < len(numbers):  # another order, which raises at the end of the pass
            return {}
        some = u[columns.to(u.device)[:, None], here.to(u.device)]  # u[columns] would be copied
        if places is not None:  # neighbouring strata may share a site
            every = some.new_zeros(len(some), rows.f[..., 0].numel(), rows.f.shape[-1])
            some = every.index_add_(1, places.to(some.device), some)
        return {"Ju": rows.pull(some.to(rows.f).view(-1, *rows.f.shape))}

    every = torch.arange(len(u), device="cpu")
    return problem.sweep(every, {"Ju": BLOCK}, add, weight=0.5)["Ju"]
