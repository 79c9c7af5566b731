"""Before anything is allocated: the network is probed, and the memory of a fit planned."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from torch_lla_em.data import Batch
from torch_lla_em.jacobian import LinearModel
from torch_lla_em.problem.problem import Problem
from torch_lla_em.problem.sweep import Sweep, no_room
from torch_lla_em.runtime import (
    Compute,
    DoesNotFit,
    Group,
    attempt,
    free_memory,
    least_share,
    pinned_bytes,
    place_of,
)

logger = logging.getLogger("torch_lla_em")

VECTORS = 20
"""Vectors of length P per sample at the peak of a fit, without a Krylov basis."""

# share for one batch of the memory that the vectors leave
_SHARE = 0.8
# share of that for cached factors of the Jacobian
_FACTORS = 0.25
# temporaries of an operation's derivative, in its own size
_TEMPORARIES = 3
# number of examples for which a forward pass is measured
_FEW = 8
# what a batch best has: small ones are joined up to it, and large ones on a CPU are cut
_BATCH_ROWS = 1024
_BATCH_BYTES = 1 << 26


class Activations(NamedTuple):
    """What one forward pass takes, in bytes."""

    kept: int
    """All that it keeps for backward."""

    largest: int
    """The largest tensor among it."""

    rows: int
    """The number of examples for which these were measured."""

    @classmethod
    def of(cls, linear_model: LinearModel, x: Any, rows: int) -> Activations:
        """Measure by one forward pass inside the network's guard."""
        sizes: dict[int, int] = {}
        parameters = linear_model.network.module.parameters()
        weights = {p.untyped_storage().data_ptr() for p in parameters if p.layout == torch.strided}

        def see(tensor: Tensor) -> Tensor:
            if tensor.layout == torch.strided and type(tensor) is Tensor:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in weights:  # which are there anyway
                    sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        try:
            with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
                linear_model.by_autodiff(x).forward()
        except RuntimeError:  # torch.func inside a network allows no hooks: then it is not known
            linear_model.by_autodiff(x).forward()
        return cls(sum(sizes.values()), max(sizes.values(), default=0), rows)

    def of_rows(self, rows: int) -> Activations:
        """Return what a batch of so many rows takes, which grows with them."""
        more = rows / max(1, self.rows)
        return Activations(int(self.kept * more), int(self.largest * more), rows)


class Plan(NamedTuple):
    """Where vectors live, and how much of a batch is taken at once."""

    size: int
    num_samples: int
    vectors: float
    """Bytes of the vectors at the peak, without a basis."""

    vectors_on: torch.device
    free: float
    """Bytes free where the vectors live."""

    activations: Activations
    columns: int | None
    """Columns of a product at once; None: all of them."""

    rows: int | None
    """Rows of a batch at once; None: all of them."""

    group: int | None
    """Columns on the device at once, where the vectors live elsewhere; None: all of them."""

    factors: float = 0.0
    """Bytes that factors of the Jacobian may take, kept from pass to pass with their batches."""

    @property
    def tight(self) -> bool:
        """Whether the vectors may not fit."""
        return self.vectors > self.free

    def __str__(self) -> str:
        rows = self.rows or self.activations.rows
        activations = self.activations.kept * rows / max(1, self.activations.rows)
        remedy = " This may not fit: use fewer samples (num_samples) or weights (parameters)."
        return (
            f"{self.num_samples} samples of {self.size:,} weights need up to "
            f"{size_of(self.vectors)} on {self.vectors_on}, where {size_of(self.free)} are free; the "
            f"basis of directions may use half of that. A forward pass of {rows} examples keeps "
            f"{size_of(activations)}, and products take {self.columns or 'all'} columns at once. "
            f"Cached factors of J may use {size_of(self.factors)}.{remedy if self.tight else ''}"
        )


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
    if model.report is not None and model.report.examples == 1 < len(first.rows):
        model.forget()
    part, activations = measured(problem.sweep, first, compute.rows)
    _warn_of_influence(problem)
    if part is first:
        activations = _resized(problem, part, activations, compute.keep_data)
    if len(part.rows) < min(compute.rows or inf, len(first.rows)):
        problem.sweep.take(None, len(part.rows))
    held, free_on = columns_held(problem, num_samples), partial(free_for_each, group)
    plan = make_plan(model, held, compute, activations, free_on)
    problem.sweep.take(plan.columns, plan.rows)
    problem.sweep.kept.room = plan.factors
    problem.sweep.columns, problem.vectors.device = plan.group, plan.vectors_on
    return plan


def _warn_of_influence(problem: Problem) -> None:
    """Warn where the outputs for an example depend on the others in its batch."""
    pieces, module = problem.sweep.pieces, problem.linear_model.network.module
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
    more = problem.data.first(2, least=2)
    return more if problem.sweep.pieces.stand_alone(more) else first


def _resized(problem: Problem, first: Batch, activations: Activations, join: bool) -> Activations:
    """Have small batches joined and large ones cut where examples stand alone."""
    data, per_row = problem.data, activations.kept / max(1, activations.rows)
    rows = int(max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1.0, per_row))))
    on_cpu = problem.linear_model.network.device.type == "cpu"
    if len(first.rows) > rows and on_cpu and problem.sweep.pieces.stand_alone(first):
        problem.sweep.batch_rows = rows
        return activations.of_rows(rows)
    one = data.group.size > 1 or rows < 2 * len(first.rows) or data.num_batches() == 1
    if one or not join:
        return activations
    several = data.first(rows)
    if len(several.rows) < 2 * len(first.rows) or not problem.sweep.pieces.stand_alone(several):
        return activations
    data.merge_rows = rows
    return activations.of_rows(rows)


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


def measured(sweep: Sweep, first: Batch, rows: int | None) -> tuple[Batch, Activations]:
    """Probe the network on a few examples of a batch, and measure a forward pass of all of them."""
    model = sweep.linear_model
    # of one example it is not known whether weights have factors
    part = first if rows is None else next(first.split(max(2, rows)))

    def measure() -> Activations:
        with model.network.guarded():
            sweep.probe(part)
            few = next(part.split(_FEW)) if sweep.pieces.stand_alone(part) else part
            return Activations.of(model, few.inputs, len(few.rows)).of_rows(len(part.rows))

    while True:
        activations, shortage = attempt(measure)
        if shortage is None:
            return part, activations
        half = next(part.split(max(1, len(part.rows) // 2)))
        if len(half.rows) == len(part.rows):
            raise DoesNotFit(no_room(part, model.layout.size, shortage))
        part = half


def make_plan(
    linear_model: LinearModel,
    num_samples: int,
    compute: Compute,
    activations: Activations,
    free_on: Callable[[torch.device], float],
) -> Plan:
    """Decide by what is free on a device for every process."""
    P, itemsize = linear_model.layout.size, linear_model.dtype.itemsize
    vectors, device = VECTORS * num_samples * P * itemsize, linear_model.network.device
    free = free_on(device)
    place = place_of_vectors(vectors, compute, device, free)
    elsewhere = place.type != device.type
    left = _SHARE * (free if elsewhere else max(free - vectors, 0.1 * free))
    group = None
    if elsewhere:
        block = num_samples * P * itemsize
        vectors = int(vectors * pinned_bytes(block) / block)
        # directions, products and one chunk of gradients: a third of what is left
        group = max(1, min(2 * num_samples, int(left / 3 / (3 * P * itemsize))))
        left *= 2 / 3
    rows = compute.rows
    if rows is None and 2 * activations.kept > left:
        rows = max(1, int(activations.rows * left / (2 * activations.kept)))
    shrunk = 1.0 if rows is None else min(1.0, rows / activations.rows)
    per_column = _TEMPORARIES * activations.largest * shrunk + 2 * P * itemsize
    fitting = max(1, int((left - activations.kept * shrunk) / per_column))
    columns = min(fitting, compute.columns or fitting)
    if columns >= 2 * num_samples + 1:
        columns = None
    kept = 0.0 if elsewhere or not compute.keep_data else _FACTORS * left
    free = free_on(place) if elsewhere else free
    return Plan(P, num_samples, vectors, place, free, activations, columns, rows, group, kept)


def place_of_vectors(
    size: float, compute: Compute, device: torch.device, free: float
) -> torch.device:
    """Return where vectors of so many bytes live, with so many free on the model's device."""
    fit = compute.vectors == "device" or (compute.vectors == "auto" and size <= _SHARE * free)
    return device if fit else torch.device("cpu")


def size_of(count: float) -> str:
    """Return a number of bytes in words."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"
