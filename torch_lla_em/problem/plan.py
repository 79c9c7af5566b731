"""What a fit will hold, before it holds it: vectors, basis, one batch, and how many columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import Batch
from torch_lla_em.jacobian import LinearModel
from torch_lla_em.problem.sweep import Sweep, no_room
from torch_lla_em.runtime import Compute, DoesNotFit, attempt, pinned_bytes

VECTORS = 20
"""Vectors of length P per sample at the peak of a fit, without a Krylov basis."""

# of what is left beside the vectors, for one batch
_SHARE = 0.8
# of that, for factors of the Jacobian that are kept
_FACTORS = 0.25
# temporaries of an operation's derivative, in its own size
_TEMPORARIES = 3


class Activations(NamedTuple):
    """What one forward pass takes, in bytes."""

    kept: int
    """All that it keeps for backward."""

    largest: int
    """The largest tensor among it."""

    rows: int
    """Of that many rows."""

    @classmethod
    def of(cls, linear_model: LinearModel, x: Any, rows: int) -> Activations:
        """Measure by one forward pass inside the network's guard."""
        sizes: dict[int, int] = {}

        def see(tensor: Tensor) -> Tensor:
            if tensor.layout == torch.strided and type(tensor) is Tensor:
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        try:
            with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
                linear_model.by_autodiff(x).forward()
        except RuntimeError:  # torch.func inside a network allows no hooks: then it is not known
            linear_model.by_autodiff(x).forward()
        return cls(sum(sizes.values()), max(sizes.values(), default=0), rows)


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
        remedy = " This may not fit: take fewer samples (num_samples) or weights (parameters)."
        return (
            f"{self.num_samples} samples of {self.size:,} weights: vectors up to "
            f"{size_of(self.vectors)} on {self.vectors_on} ({size_of(self.free)} free, half "
            f"of which a Krylov basis may take); batches of {rows} rows keep "
            f"{size_of(self.activations.kept * rows / max(1, self.activations.rows))} a forward "
            f"pass, {self.columns or 'all'} columns at once; factors of J may keep "
            f"{size_of(self.factors)} where batches are kept.{remedy if self.tight else ''}"
        )


def measured(sweep: Sweep, first: Batch, rows: int | None) -> tuple[Batch, Activations]:
    """Probe the network on as many rows of a batch as fit, and measure a forward pass."""
    model = sweep.linear_model
    # of one row it cannot be told whether weights have factors
    part = first if rows is None else next(first.split(max(2, rows)))

    def measure() -> Activations:
        with model.network.guarded():
            sweep.probe(part)
            return Activations.of(model, part.inputs, len(part.rows))

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
