"""Outputs of the linear model for all examples at once, if their order is the same in every pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import Batch
from torch_lla_em.jacobian import Rows
from torch_lla_em.problem.problem import Problem
from torch_lla_em.problem.sweep import BLOCK, OF_ROWS, Pass, Sums


class Outputs(NamedTuple):
    """f and J w of all examples, with their targets."""

    f: Tensor
    """(N, ..., C)."""

    targets: Tensor
    """(N, ...)."""

    Jw: Tensor
    """(K, N, ..., C)."""


Pushed = list[tuple[Batch, Tensor, Tensor]]


def gathered(problem: Problem, pushed: Pushed, K: int) -> Outputs | None:
    """Return f and J w of all examples from those of batches; None if they differ in shape."""
    group, like = problem.data.group, problem.zeros(1)
    seen = [
        [str(b.targets.dtype), list(b.targets.shape[1:]), list(f.shape[1:])] for b, f, _ in pushed
    ]
    dtype, of_targets, of_f = group.meet(seen, _the_same)
    if dtype is None:
        return None
    N = problem.data.num_rows
    found = Outputs(
        like.new_zeros(N, *of_f),
        like.new_zeros(N, *of_targets, dtype=getattr(torch, dtype.split(".")[1])),
        like.new_zeros(K, N, *of_f),
    )
    for batch, f, Jw in pushed:
        rows = batch.rows.to(like.device)
        found.f[rows] = f.to(like)
        found.targets[rows] = batch.targets.to(like.device)
        found.Jw[:, rows] = Jw.to(like)
    return Outputs(*map(group.sum, found))


def pull_back(problem: Problem, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return Jᵀ u, shape (K, P), for u (K, N, ..., C), and the outputs f, shape (N C,)."""

    def add(rows: Rows, batch: Batch, columns: Tensor, sums: Sums) -> None:
        f = rows.f
        problem.inspect(rows, batch)
        _place(problem, batch, f.expand(len(columns), *f.shape), sums["f"])
        own = u[columns.to(u.device)][:, batch.rows.to(u.device)]
        rows.pull(own.view(-1, *f.shape).to(f), sums["Ju"])

    task = Pass({"Ju": BLOCK, "f": OF_ROWS}, add)
    sums = problem.sweep(torch.arange(len(u), device="cpu"), task)
    problem.cost.columns += 0.5 * len(u)
    return sums["Ju"], sums["f"][0]


def _place(problem: Problem, batch: Batch, outputs: Tensor, total: Tensor) -> None:
    """Copy the outputs of a batch, (K, B, ..., C), to their places among all, (K, N C)."""
    rows, entries = problem.data.num_rows, outputs[:, :1].numel() // len(outputs)
    if entries * rows != total.shape[1]:  # they have no place, as ``gathered`` has found
        return
    every = total.view(len(total), rows, entries)
    every[:, batch.rows.to(total.device)] = outputs.reshape(*outputs.shape[:2], -1).to(total)


def _the_same(every: list[list[list[Any]]]) -> list[Any]:
    """Return the dtype and shapes of outputs and targets if they agree on all batches and ranks."""
    seen = [one for rank in every for one in rank]
    return seen[0] if all(one == seen[0] for one in seen) else [None, None, None]
