"""What a fit will take, by one product of the first rows and one look at the loader."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from torch_lla_em.data import Data, map_tensors
from torch_lla_em.problem.cost import USUAL
from torch_lla_em.problem.problem import Problem

_PASSES = 25
# readings of a loader whose batches are kept then
_READS = 3
_BATCHES = 8
_COLUMNS = 8
# all that a fit does, over its products
_BESIDE = 2
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
        number, sizes, times = data.num_batches(), [], []
        if number is None:
            return None
        first = data.ahead()  # not timed: it meets cold files, which later batches do not
        for rows in (0, _BATCHES * len(first.rows)):
            began = time.monotonic()
            sizes.append(len(data.ahead(rows).rows))
            times.append(time.monotonic() - began)
        each = len(first.rows)
        more = (
            (times[1] - times[0]) / max(1, sizes[1] - each) * each if sizes[1] > each else times[0]
        )
        held: list[int] = []
        map_tensors(lambda t: held.append(t.nbytes), (first.inputs, first.targets))
        seconds = times[0] + max(more, 0.0) * (number - 1)
        return cls(number * each, number * sum(held), seconds)


class Forecast(NamedTuple):
    """What a fit will take; fits differ in columns by a factor of two either way."""

    columns: int
    passes: int
    seconds: float
    """Without the loader."""

    reads: int
    """How often the loader is read."""

    reading: Reading | None

    @classmethod
    def of(cls, problem: Problem, num_samples: int) -> Forecast:
        """Return the forecast of a problem whose memory is planned."""
        data, columns = problem.data, (USUAL + 1) * num_samples
        reading = Reading.of(data)
        kept = reading is not None and reading.bytes <= data.room_to_keep()
        seconds = _seconds_of_a_column(problem, num_samples) * columns
        seconds *= 1 if reading is None else reading.rows
        return cls(columns, _PASSES, seconds, _READS if kept else _PASSES, reading)

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
            f"{self.seconds:.2g} s, within a factor of two. The loader is read "
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
            f, _, pull = model.jvp_and_vjp(x, w)
            pull(
                torch.zeros(columns, *f.shape, dtype=f.dtype, device=f.device), torch.zeros_like(w)
            )
            float(w[0, 0])  # waits for the device
            times.append(time.monotonic() - began)
    return _BESIDE * min(times) / columns / len(batch.rows)
