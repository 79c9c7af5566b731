"""Passes over rows that were not trained on, and their log predictive, jointly in groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_lla_em.data import Data
from torch_lla_em.inference import Estimate
from torch_lla_em.prediction.parts import predicted
from torch_lla_em.problem import Problem
from torch_lla_em.runtime import group_of

if TYPE_CHECKING:
    from torch_lla_em.prediction.fitted import Fitted


@contextmanager
def over(fitted: Fitted, loader: Iterable[Any]) -> Iterator[Problem]:
    """Open a pass over other data, which ranks that have fitted together take together."""
    model = fitted._linear_model
    with torch.inference_mode(False), torch.no_grad(), group_of(fitted._shard).joined() as group:
        data = Data(loader, model.network.device, fitted.target_fn, group)
        yield Problem(model, fitted.likelihood, data)


def held_out_evidence(problem: Problem, columns: Tensor, table: Tensor, together: int) -> Estimate:
    """Return Σ log p(y of a group | x of the group) over groups of rows; one pass.

    Groups are of rows that follow each other in a batch. The standard error is that over groups.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=problem.device)
    for batch, f, Jw in problem.push_forward(columns):
        for start in range(0, len(f), together):
            rows = slice(start, start + together)
            prediction = predicted(problem.likelihood, f[rows], Jw[:, rows], table)
            value = prediction.joint_log_prob(batch.targets[rows]).double().to(sums.device)
            sums += torch.stack([torch.ones_like(value), value, value.square()])
    count, total, squares = problem.data.group.sum(sums)
    variance = (squares / count - (total / count) ** 2).clamp_min(0)
    return Estimate(total, (count * variance).sqrt())
