"""The memory plan of a fit, made after a probe of the network and before any allocation."""

from __future__ import annotations

from math import inf
from time import perf_counter

import torch

from torch_lla_em.jacobian import Ways
from torch_lla_em.problem.plan import Plan
from torch_lla_em.problem.problem import Problem
from torch_lla_em.runtime import Compute, free_for_each

# vectors of length P per sample at the peak of a fit, without a span
_VECTORS = 20
# shares of the free memory for batches that are kept, for their factors, and for vectors that are
# copied to a device
_SHARE = 0.25
# good size of a batch: small batches are joined up to it, and on a CPU large ones are split
_BATCH_ROWS, _BATCH_BYTES = 1024, 6.4e7


def prepare(problem: Problem, num_samples: int, compute: Compute) -> Plan:
    """Read the first batch, plan the memory, and configure the passes accordingly.

    The numbers of columns and examples that are processed at once are not planned: the sweep halves
    them if memory runs out.
    """
    model, data, sweep = problem.linear_model, problem.data, problem.sweep
    P, itemsize, device = problem.size, problem.dtype.itemsize, model.network.device
    first = data.first()
    with model.network.guarded():
        # again: after a probe by the inputs of a prediction it may be unknown whether weights have
        # factors
        sweep.probe(first, anew=True)
        splits = sweep.stand_alone(first)
    example = model.ways or Ways()  # if J is zero, nothing is known about an example
    free, vectors = free_for_each(data.group, device), _VECTORS * num_samples * P * itemsize
    place = place_of_vectors(vectors, compute, device, free)
    is_near, group = place.type == device.type, None
    left = _SHARE * max(free - (vectors if is_near else 0), 0.1 * free)
    if not is_near:  # room for directions, products and one chunk of gradients
        group = max(1, min(2 * num_samples, int(_SHARE * free / (3 * P * itemsize))))
        free = free_for_each(data.group, place)
    # several ranks compare their data in every pass
    keeps = compute.keep_data and data.group.size == 1
    kept, rows, merged = left if keeps else 0.0, inf, 0
    if splits:
        size = int(max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1.0, example.activations))))
        rows = size if device.type == "cpu" else inf
        merged = size if keeps else 0
    data.store(kept, merged)
    plan = Plan(
        place,
        rows,
        group=group,
        batches=kept,
        factors=kept if is_near else 0.0,
        num_samples=num_samples,
        size=P,
        vectors=vectors,
        free=free,
        example=example,
    )
    sweep.take(plan)
    return plan


def place_of_vectors(
    size: float, compute: Compute, device: torch.device, free: float
) -> torch.device:
    """Return the device for vectors of this size, given the free memory of the model's device."""
    auto = compute.vectors == "auto" and size <= (1 - _SHARE) * free
    return device if auto or compute.vectors == "device" else torch.device("cpu")


def seconds_of_pass(problem: Problem, plan: Plan, rows: float) -> float:
    """Return the seconds of a pass over ``rows`` examples for all samples, measured on a piece of
    the first batch.

    Only the network is counted: no random numbers, and no work on a span between passes.
    """
    few = problem.sweep.pieces(problem.data.first(), min(_BATCH_ROWS, plan.rows))[0]
    model = problem.linear_model
    w = torch.ones(plan.num_samples + 1, plan.size, dtype=model.dtype, device=problem.device)

    def once() -> float:
        began = perf_counter()
        at = model.at(few.inputs, len(w), bool(model.factored), plan.columns)
        total = torch.zeros_like(w)
        at.pull(at.push(w)).added_to(total)
        total.sum().item()  # waits for the device
        return perf_counter() - began

    with model.network.guarded():
        return min(once(), once()) * rows / len(few.rows)  # the first loads kernels
