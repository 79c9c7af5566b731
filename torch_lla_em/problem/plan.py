"""The memory plan of a fit, made after a probe of the network and before any allocation."""

from __future__ import annotations

from math import inf
from time import perf_counter
from typing import NamedTuple

import torch

from torch_lla_em.data import Batch
from torch_lla_em.jacobian import Report
from torch_lla_em.problem.problem import Problem
from torch_lla_em.problem.sweep import FEW, Limits, no_room
from torch_lla_em.runtime import (
    Compute,
    DoesNotFit,
    Group,
    free_memory,
    least_share,
    place_of,
    release,
    shortage_of,
)

VECTORS = 20
"""Vectors of length P per sample at the peak of a fit, without a Krylov basis."""

# share of the memory left by the vectors that one batch may use
_SHARE = 0.8
# shares of that memory for batches and for Jacobian factors that are kept from pass to pass
_BATCHES, _FACTORS = 0.3, 0.25
# good size of a batch: small batches are joined up to it, and on a CPU large ones are split
_BATCH_ROWS = 1024
_BATCH_BYTES = 1 << 26
# passes of most fits: of the networks of benchmarks/cost.py, 9 of 10 take as many
_PASSES = 10, 40
_SECONDS = (86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms")
_BYTES = (1e9, "GB"), (1e6, "MB"), (1e3, "kB")
# seconds above which ways to a shorter fit are named, and examples of which a pass is timed
_LONG, _TIMED = 60.0, 256


class Memory(NamedTuple):
    """The peak of a fit in bytes, of most fits like it within a factor of two, and with three times the passes."""

    expected: float
    most: float


class Plan(NamedTuple):
    """Where vectors are stored, and the memory for everything else."""

    size: int
    num_samples: int
    vectors: float
    """Bytes of the vectors at the peak, without a basis."""

    vectors_on: torch.device
    free: float
    """Free memory in bytes where the vectors are stored."""

    example: Report
    """What an example takes."""

    batches: float = 0.0
    factors: float = 0.0
    """Bytes of batches, and of their Jacobian factors, that are kept from pass to pass."""

    pass_seconds: float | None = None
    memory: Memory | None = None

    @property
    def tight(self) -> bool:
        """Whether the vectors may not fit."""
        return self.vectors > self.free

    @property
    def of_memory(self) -> str:
        """What ``str`` says of the memory."""
        expected, most = map(size_of, self.memory or (self.vectors, 2 * self.vectors))
        remedy = " This may not fit: reduce num_samples, or choose fewer `parameters`."
        return (
            f"A fit of {self.num_samples} samples of {self.size:,} parameters will take about {expected} of memory on "
            f"{self.vectors_on}, and up to {most} if it needs three times the usual passes; {size_of(self.free)} are "
            f"free.{remedy if self.tight else ''}"
        )

    def __str__(self) -> str:
        seconds = self.pass_seconds
        unknown = "How long a pass takes is not known: the loader does not state its length."
        return f"{unknown if seconds is None else time_of_fit(seconds)} {self.of_memory}"


def time_of_fit(pass_seconds: float) -> str:
    """Return what is known of the time of a fit whose passes take so long, and what makes it shorter."""
    least, most = _PASSES
    words = f"A pass over the data takes about {duration(pass_seconds)}; most fits take {least} to {most}."
    if not is_long(pass_seconds):
        return words
    return f'{words} To shorten the fit, use parameters="last_layer" or Compute(budget=seconds).'


def is_long(pass_seconds: float) -> bool:
    """Return whether a fit whose passes take so long may take more than a minute."""
    return _PASSES[1] * pass_seconds > _LONG


def prepare(problem: Problem, num_samples: int, compute: Compute) -> Plan:
    """Read the first batch, plan the memory, and configure the passes accordingly.

    The numbers of columns and examples that are processed at once are not planned: the sweep halves
    them if memory runs out.
    """
    model, data, sweep = problem.linear_model, problem.data, problem.sweep
    P, itemsize, device = model.layout.size, model.dtype.itemsize, model.network.device
    model.network.use(compute.precision)
    limits = sweep.limits._replace(rows=compute.rows or inf, columns=compute.columns)
    sweep.take(limits)  # the probe keeps to them
    first = data.first()  # of one example it is not known whether weights have factors
    if model.report is not None and model.report.examples == 1 < len(first.rows):
        model.forget()
    example = measured(problem, first)
    free, vectors = free_for_each(data.group, device), VECTORS * num_samples * P * itemsize
    place = place_of_vectors(vectors, compute, device, free)
    is_near, group = place.type == device.type, None
    left = _SHARE * max(free - vectors * is_near, 0.1 * free)
    if not is_near:  # directions, products and one chunk of gradients: a third of what is left
        group = max(1, min(2 * num_samples, int(_SHARE * free / 3 / (3 * P * itemsize))))
        free = free_for_each(data.group, place)
    # several ranks compare their data in every pass
    keeps = compute.keep_data and data.group.size == 1
    kept = _BATCHES * left * keeps, _FACTORS * left * keeps * is_near
    batch_rows, merged = inf, 0
    if sweep.stand_alone(first):
        rows = int(max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1.0, example.activations))))
        batch_rows, merged = rows if device.type == "cpu" else inf, rows * keeps
    data.store(kept[0], merged)
    sweep.take(Limits(place, limits.rows, limits.columns, batch_rows, group, kept[1]))
    return Plan(P, num_samples, vectors, place, free, example, *kept)


def free_for_each(group: Group, device: torch.device) -> float:
    """Return the bytes that every rank may still allocate on a device, as many on each."""
    return group.meet([place_of(device), free_memory(device)], least_share)


def measured(problem: Problem, first: Batch) -> Report:
    """Probe the network on a few examples, fewer if memory runs out, and return what one of them takes."""
    model, sweep, part, rows = problem.linear_model, problem.sweep, first, FEW
    while True:
        try:
            with model.network.guarded():
                sweep.probe(part)
                sweep.stand_alone(part)
                if model.report is not None:
                    return model.report
                f = model.outputs(next(part.split(FEW)).inputs)  # J is zero at these
                return Report(outputs=f[0].numel(), classes=f.shape[-1] if f.dim() > 1 else 1)
        except (RuntimeError, MemoryError) as error:
            shortage = shortage_of(error)
        release()  # what the failed attempt held is free only outside of the handler
        part, rows = next(first.split(rows)), rows // 2
        if not rows:
            raise DoesNotFit(no_room(part, model.layout.size, shortage))


def seconds_of_pass(problem: Problem, plan: Plan, rows: float) -> float:
    """Return the seconds of a pass over so many examples, from those of some of the first."""
    model, few = problem.linear_model, problem.sweep.few(problem.data.first(), _TIMED)
    w = torch.ones(plan.num_samples + 1, plan.size, dtype=model.dtype, device=problem.device)

    def once() -> float:
        began = perf_counter()
        at = model.at(few.inputs, len(w), bool(model.factored))
        total = torch.zeros_like(w)
        at.pull(at.push(w), total)
        total.sum().item()  # which waits for the device
        return perf_counter() - began

    with model.network.guarded():
        return min(once(), once()) * rows / len(few.rows)  # the first loads kernels


def place_of_vectors(
    size: float, compute: Compute, device: torch.device, free: float
) -> torch.device:
    """Return the device for vectors of this size, given the free memory of the model's device."""
    fit = compute.vectors == "device" or (compute.vectors == "auto" and size <= _SHARE * free)
    return device if fit else torch.device("cpu")


def duration(seconds: float) -> str:
    """Return seconds in words."""
    return _in_words(seconds, _SECONDS)


def size_of(count: float) -> str:
    """Return a number of bytes in words."""
    return _in_words(count, _BYTES)


def _in_words(value: float, units: tuple[tuple[float, str], ...]) -> str:
    size, unit = next((each for each in units if value >= each[0]), units[-1])
    return f"{value / size:.3g} {unit}"
