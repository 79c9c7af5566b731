"""What a fit will take, by one product of the first rows and one look at the loader."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from torch_lla_em.data import Data, tensors_in
from torch_lla_em.problem.problem import Problem

# of a fit, and of one with a precision for each tensor: K-fold columns, and passes
_USUAL, _LAYERWISE = (13, 25), (65, 130)
# readings of a loader whose batches are kept then
_READS = 3
_BATCHES = 8
_COLUMNS = 8
# all that a fit does, over its products
_BESIDE = 3
# of the time that products take, from which on reading is worth a word
_SLOW = 0.5


class Reading(NamedTuple):
    """One pass over the loader, without any product."""

    rows: int
    bytes: float
    seconds: float

    @classmethod
    def of(cls, data: Data) -> Reading | None:
        """Time the loader's first batches; None where its length is not known."""
        number = data.num_batches()
        if number is None:
            return None
        first = data.ahead()  # not timed: it meets cold files, which later batches do not
        size, began = len(first.rows), time.monotonic()
        data.ahead()
        one = time.monotonic() - began
        several = len(data.ahead(_BATCHES * size).rows) / size
        all_of_them = time.monotonic() - began - one
        # workers are started once
        each = (all_of_them - one) / (several - 1) if several > 1 else one
        held = sum(tensor.nbytes for tensor in tensors_in((first.inputs, first.targets)))
        seconds = one + max(each, 0.0) * (number - 1)
        return cls(number * size, number * held, seconds)


class Forecast(NamedTuple):
    """What a fit will take; fits differ by a factor of two either way."""

    columns: int
    passes: int
    seconds: float
    """Without the loader."""

    reads: int
    """How often the loader is read."""

    reading: Reading | None

    @classmethod
    def of(cls, problem: Problem, num_samples: int, layerwise: bool = False) -> Forecast:
        """Return the forecast of a problem whose memory is planned."""
        reading = Reading.of(problem.data)
        kept = reading is not None and reading.bytes <= problem.data.room_to_keep()
        each, passes = _LAYERWISE if layerwise else _USUAL
        columns, rows = each * num_samples, 1 if reading is None else reading.rows
        seconds = _BESIDE * columns * rows * _seconds_of_a_column(problem, num_samples)
        return cls(columns, passes, seconds, _READS if kept else passes, reading)

    @property
    def reads_slowly(self) -> bool:
        """Whether the loader is read often, and that takes long."""
        if self.reading is None or self.reads <= _READS:
            return False
        return self.reads * self.reading.seconds > max(1.0, _SLOW * self.seconds)

    def __str__(self) -> str:
        if self.reading is None:
            return f"About {self.columns} columns; the loader has no length, and no time is told."
        often = ", and its batches are kept" if self.reads <= _READS else ""
        remedy = (
            " Reading takes longer than it should: its rows do not fit beside the fit, so make "
            "it faster (workers, rows decoded beforehand), or give more memory."
        )
        return (
            f"About {self.columns} columns in {self.passes} passes over {self.reading.rows:,} rows: "
            f"{self.seconds / 2:.2g} to {2 * self.seconds:.2g} s. The loader is read "
            f"{self.reads} times, {self.reading.seconds:.2g} s each{often}."
            f"{remedy if self.reads_slowly else ''}"
        )


def _seconds_of_a_column(problem: Problem, num_samples: int) -> float:
    """Return what a column of a row takes, timed by a product of the first rows."""
    model, batch = problem.linear_model, problem.data.first()
    columns = min(num_samples, _COLUMNS)
    with model.network.guarded():
        x = model.prepare(batch.inputs, 2 * num_samples)
        w = torch.zeros(columns, model.layout.size, dtype=model.dtype, device=model.network.device)
        times = []
        for _ in range(2):
            began = time.monotonic()
            _, Jw, pull = model.jvp_and_vjp(x, w)
            pull(Jw, w)
            float(w[0, 0])  # waits for the device
            times.append(time.monotonic() - began)
    return min(times) / columns / len(batch.rows)
