"""Before anything is allocated: the network probed, memory planned, ranks and host in place."""

from __future__ import annotations

import logging
from functools import partial
from math import inf

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from torch_lla_em.data import Batch
from torch_lla_em.problem.plan import Activations, Plan, make_plan, measured
from torch_lla_em.problem.problem import Problem
from torch_lla_em.runtime import Compute, Group, free_memory, least_share, place_of

logger = logging.getLogger("torch_lla_em")

# up to which small batches are joined: beyond them a batch is no cheaper a row
_JOINED_ROWS = 1024
_JOINED_BYTES = 1 << 26


def prepare(problem: Problem, num_samples: int, compute: Compute, shard: str = "data") -> Plan:
    """Look at the first batch, plan memory, and have passes keep to the plan.

    ``shard`` is what ranks share out: "data", or "weights" as well.
    """
    model, data, group = problem.linear_model, problem.data, problem.data.group
    if shard == "weights":
        problem.vectors.group = group
    model.network.precision = compute.precision
    data.keep = compute.keep_data
    first = _several(problem, data.first())
    if model.rows_probed == 1 < len(first.rows):
        model.forget()
    part, activations = measured(problem.sweep, first, compute.rows)
    _warn_of_influence(problem, part)
    if part is first and compute.keep_data:
        activations = _joined(problem, part, activations)
    if len(part.rows) < min(compute.rows or inf, len(first.rows)):
        problem.sweep.take(None, len(part.rows))
    held, free_on = columns_held(problem, num_samples), partial(free_for_each, group)
    plan = make_plan(model, held, compute, activations, free_on)
    problem.sweep.take(plan.columns, plan.rows)
    problem.sweep.kept.room = plan.factors
    problem.sweep.columns, problem.vectors.device = plan.group, plan.vectors_on
    return plan


def _warn_of_influence(problem: Problem, batch: Batch) -> None:
    """Warn where the outputs of an example depend on the others in its batch."""
    pieces, module = problem.sweep.pieces, problem.linear_model.network.module
    with problem.linear_model.network.guarded():
        # two rows and four: the fewer they are, the more one changes
        if len(batch.rows) < 2 or pieces.stand_alone(batch, 1 + (len(batch.rows) > 3)):
            return
    if not pieces.influence:
        return
    layers = [
        f"{type(layer).__name__} {name!r}"
        for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm) and layer.running_mean is None
    ]
    logger.warning(
        "The network's outputs for an example change by %.0f %% with the other examples in its batch%s. "
        "The posterior and all predictions then depend on how data are batched: let layers use running "
        "statistics, or always predict batches as those of the fit.",
        100 * pieces.influence,
        f" (by {', '.join(layers)})" if layers else "",
    )


def _several(problem: Problem, first: Batch) -> Batch:
    """Return a batch of two rows or more in the place of one, where the network takes them together."""
    if len(first.rows) > 1:
        return first
    more = problem.data.ahead(2, least=2)
    with problem.linear_model.network.guarded():
        return more if len(more.rows) > 1 and problem.sweep.pieces.stand_alone(more, 1) else first


def _joined(problem: Problem, first: Batch, activations: Activations) -> Activations:
    """Have small batches joined where rows stand alone; return what a joined one takes."""
    data, per_row = problem.data, activations.kept / max(1, activations.rows)
    rows = int(min(_JOINED_ROWS, _JOINED_BYTES // max(1.0, per_row)))
    if data.group.size > 1 or rows < 2 * len(first.rows) or data.num_batches() == 1:
        return activations
    several = data.ahead(rows)
    if len(several.rows) < 2 * len(first.rows):
        return activations
    with problem.linear_model.network.guarded():
        if not problem.sweep.pieces.stand_alone(several, len(first.rows)):
            return activations
    data.merge_rows = rows
    more = rows / max(1, activations.rows)
    return Activations(int(activations.kept * more), int(activations.largest * more), rows)


def columns_held(problem: Problem, num_samples: int) -> int:
    """Return how many whole columns a rank holds in the place of K."""
    group = problem.vectors.group
    return num_samples if group is None else -(-num_samples // group.size)


def free_for_each(group: Group, device: torch.device) -> float:
    """Return the bytes that every rank may still allocate on a device, as many on each."""
    return group.meet("free memory", [place_of(device), free_memory(device)], least_share)


def room(problem: Problem) -> float:
    """Return the bytes that every rank may still allocate for vectors."""
    return free_for_each(problem.data.group, problem.device)
