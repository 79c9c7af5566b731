"""A fit over several ranks: what they must have in common, and what each of them takes."""

from __future__ import annotations

import logging
from math import ceil
from typing import Any

import torch

from torch_lla_em.data import Data
from torch_lla_em.problem import VECTORS, ColumnSpread, DataSpread, Problem, WeightSpread
from torch_lla_em.runtime import Group

logger = logging.getLogger("torch_lla_em")

SHARDS = "auto", "data", "columns", "weights", None
"""What ranks share out; None: each fits on its own."""


def compare_ranks(group: Group, device: torch.device, settings: dict[str, Any]) -> None:
    """Refuse ranks with other models, settings or devices than rank 0, naming what differs."""
    group.meet("the settings", {"device": device.type, **settings}, _same)
    if group.size > 1:  # where a backend lacks the device, say so before anything is computed
        group.sum(torch.zeros(1, device=device))


def spread_of(problem: Problem, shard: str | None, num_samples: int) -> DataSpread:
    """Return how passes are spread over ranks, chosen by their cost in forward passes.

    A pass of K columns costs 1 + 4 K forward passes a batch.
    """
    data, group = problem.data, problem.data.group
    if group.size == 1:
        return DataSpread(group)
    if shard == "columns" and data.is_shared_out:
        raise ValueError(
            'shard="columns" gives every rank all data, but a DistributedSampler has shared them '
            'out: pass a loader without one, or shard="data".'
        )
    batches = group.meet("the number of batches", data.num_batches(), lambda counts: counts[0])
    if shard == "auto":
        shard, why = _too_large(problem, num_samples) or _cheaper(data, batches, num_samples)
        if group.rank == 0:
            logger.info("%d ranks share out the %s: %s.", group.size, shard, why)
    if shard == "weights":
        return WeightSpread(group, problem.size)
    return ColumnSpread(group) if shard == "columns" else DataSpread(group)


def share_path(problem: Problem) -> None:
    """Give ranks that saw no data the way of differentiating that the others have found."""
    model = problem.linear_model
    rules = model.network.own_tangents
    found = (model.report, model.path, rules.allowed) if model.report is not None else None
    report, path, allowed = problem.data.group.meet("the path", found, _first_found)
    if model.report is None:
        model.report, model.path, rules.allowed = report, path, allowed


def _too_large(problem: Problem, num_samples: int) -> tuple[str, str] | None:
    """Return the choice where whole vectors do not fit, and why."""
    needed = VECTORS * num_samples * problem.size * problem.dtype.itemsize
    free = problem.free_memory()
    if needed <= free:
        return None
    return "weights", f"vectors take {needed / 1e9:.1f} GB, and each rank has {free / 1e9:.1f} free"


def _cheaper(data: Data, batches: int | None, num_samples: int) -> tuple[str, str]:
    size = data.group.size
    if data.is_shared_out:
        return "data", "a DistributedSampler has done so"
    if not batches:
        return "data", "the number of batches is not known"
    by_data = (1 + 4 * num_samples) * ceil(batches / size)
    by_columns = (1 + 4 * ceil(num_samples / size)) * batches
    costs = f"a pass takes {by_data} forward passes of a batch by data, {by_columns} by columns"
    return ("columns" if by_columns < by_data else "data"), costs


def _same(every: list[dict[str, Any]]) -> None:
    for rank, settings in enumerate(every):
        for name in sorted(every[0].keys() | settings.keys()):
            own, first = settings.get(name), every[0].get(name)
            if own != first:
                raise ValueError(
                    f"Rank {rank} has another {name} than rank 0: {_short(own)} against "
                    f"{_short(first)}. Construct and fit the same object on every rank; to fit each "
                    "on its own, pass shard=None."
                )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _first_found(every: list[Any]) -> Any:
    return next((value for value in every if value is not None), (None, None))
