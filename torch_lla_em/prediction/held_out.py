"""The log predictive of rows that were not trained on, jointly in small groups."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_lla_em.inference import Estimate
from torch_lla_em.prediction.parts import predicted
from torch_lla_em.problem import Problem


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
