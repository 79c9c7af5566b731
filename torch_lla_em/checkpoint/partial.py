"""What a pass has summed so far, kept between its batches where passes take long."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import inf, isclose
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.checkpoint.log import PARTIAL, Log
from torch_lla_em.data import Batch, Identity
from torch_lla_em.problem import (
    Cost,
    Layer,
    LocalPasses,
    Pass,
    State,
    Step,
    Sums,
    is_finite,
)
from torch_lla_em.runtime import Leaving, files, records

logger = logging.getLogger("torch_lla_em")

INTERVAL = 300.0
"""Seconds between two writes, at least."""

WRITES = 0.05
"""Share of the time that writes may take."""


class OtherOrderError(Exception):
    """The rows to be skipped are not those whose work is known."""


class _Known(NamedTuple):
    """The work on the first rows of a pass."""

    rows: int
    prefix: Identity
    num_outputs: int
    sums: Sums


class Partial(Layer):
    """Writes the sums of whole batches from time to time, and when somebody asks to leave.

    Of several ranks none keeps a part of a pass, since others may go on with the run.
    """

    def __init__(self, inner: LocalPasses, log: Log, leaving: Leaving, cost: Cost):
        super().__init__(inner)
        self._local, self._data, self._log = inner, inner.data, log
        self._leaving, self._cost = leaving, cost
        self._alone = inner.data.group.size == 1
        self._interval, self._written_at = INTERVAL, time.monotonic()
        self._asked: list[float] = []
        self._part = 0
        self._done = 0, 0
        """Passes before, and rows of the one under way whose work is done."""

        if self._alone:
            leaving.idle = lambda: self._done == self._read

    def begin(self, asked: Tensor) -> None:
        """Note where a pass is taken; what is kept of another is not gone on with."""
        self._asked, self._part = asked.tolist(), 0

    def forget(self) -> None:
        """Remove the file: its pass has ended."""
        if self._log.writes:
            files.remove(self._path)

    def fold(self, w: Tensor, task: Pass) -> Sums:
        """Return the sums over all batches, from those that are known on."""
        # groups of rows that go on from batch to batch begin with the pass
        goes_on = bool(task.kinds) and task.at_most == inf
        known = self._begun(self._local.zeros(len(w), task.kinds)) if goes_on else None
        outputs = self._data.num_outputs
        try:
            return self._from(known, w, task)
        except OtherOrderError:  # a loader that shuffles: the pass begins anew
            self._data.num_outputs = outputs
            return self._from(None, w, task)

    def steps(self, state: State = None) -> Iterator[Step]:
        """Yield the batches of an epoch after those whose steps are taken."""
        spent, before = self._cost.columns, {}
        kept: Sums = {}
        if state is not None:
            kept = {**state, "columns": torch.zeros((), dtype=torch.float64, device="cpu")}
        known = self._begun(kept) if kept else None
        if known is not None:
            before = {name: tensor.cpu().clone() for name, tensor in kept.items()}
            _restore(kept, known.sums)
            self._cost.columns = spent + kept["columns"].item()
        try:
            yield from self._steps(known, kept, spent)
        except OtherOrderError:
            _restore(kept, before)
            self._cost.columns = spent
            yield from self._steps(None, kept, spent)

    def _from(self, known: _Known | None, w: Tensor, task: Pass) -> Sums:
        fresh = known is not None
        held: Sums = {}

        def add(batch: Batch, w: Tensor, sums: Sums) -> None:
            nonlocal fresh
            held.update(sums)
            if fresh:
                _restore(sums, known.sums)
                self._data.num_outputs = known.num_outputs
                fresh = False
            start, end = int(batch.rows[0]), int(batch.rows[-1]) + 1
            if known is None or not self._skips(known, start, end):
                task.add(batch, w, sums)
            if end == self._data.rows_seen:  # the last piece of its batch
                self._settled(sums)

        self._done = self._data.num_passes, 0
        with self._kept_when_left(held):
            return self.inner.fold(w, task._replace(add=add))

    def _steps(self, known: _Known | None, kept: Sums, spent: float) -> Iterator[Step]:
        with self._kept_when_left(kept):
            for step in self.inner.steps():
                end = self._data.rows_seen
                if known is None or not self._skips(known, end - step.num_rows, end):
                    yield step
                if kept:
                    kept["columns"].fill_(self._cost.columns - spent)
                self._settled(kept)

    def _skips(self, known: _Known, start: int, end: int) -> bool:
        """Whether these rows are among those whose work is known; refuse another order."""
        read = self._data.fingerprint
        other = end == known.rows and (read is None or not read.repeats(known.prefix))
        if other or start < known.rows < end:
            raise OtherOrderError
        return end <= known.rows

    def _settled(self, sums: Sums) -> None:
        self._done = self._read
        if self._leaving.requested:
            raise self._leaving.requested
        if time.monotonic() - self._written_at >= self._interval:
            self._write(sums)

    @property
    def _path(self) -> Path:
        return self._log.folder / PARTIAL

    @property
    def _read(self) -> tuple[int, int]:
        """Passes so far, and rows of the one under way."""
        return self._data.num_passes, self._data.rows_seen

    @contextmanager
    def _kept_when_left(self, sums: Sums) -> Iterator[None]:
        """Keep the sums of whole batches where somebody asked to leave."""
        try:
            yield
        except BaseException as error:
            asked = self._leaving.requested
            mine = error is asked or isinstance(error, Exception)
            if asked and mine and self._leaving.idle():
                self._write(sums)
            raise

    def _begun(self, sums: Sums) -> _Known | None:
        """Return what is known of this part of a pass, with sums of these shapes."""
        self._written_at = time.monotonic()
        self._part += 1
        if not self._alone or not os.path.exists(self._path):  # nor where the disk is silent
            return None
        try:
            state = files.tensors_of(self._path, ("facts",))
        except (OSError, files.UnreadableError) as error:
            logger.warning("What was kept of this pass is left, and it begins anew: %s", error)
            self.forget()
            return None
        facts = records.from_bytes(state.pop("facts"))
        shapes = {name: total.shape for name, total in sums.items()}
        if shapes != {name: tensor.shape for name, tensor in state.items()}:
            return None
        near = partial(isclose, rel_tol=1e-6, abs_tol=1e-6)
        if not all(map(near, facts["place"], self._place())):
            return None
        logger.info("The checkpoint goes on with this pass after %d rows.", facts["rows"])
        return _Known(facts["rows"], Identity.of(facts["prefix"]), facts["num_outputs"], state)

    def _write(self, sums: Sums) -> None:
        """Keep the sums over the rows so far, if they are worth it."""
        data = self._data
        if not (self._alone and sums and self._log.writes and data.fingerprint and data.rows_seen):
            return
        if not (self._local.finite.fine and all(map(is_finite, sums.values()))):
            return
        self._local.refuse_changed_weights()
        began = time.monotonic()
        facts = {
            "place": self._place(),
            "rows": data.rows_seen,
            "num_outputs": data.num_outputs,
            "prefix": data.fingerprint.state(),
        }
        self._log.write({**sums, "facts": records.to_bytes(facts)}, self._path)
        self._written_at = time.monotonic()
        self._interval = max(INTERVAL, (self._written_at - began) / WRITES)

    def _place(self) -> list[float]:
        return [self._log.position, self._part, *self._asked]


def _restore(sums: Sums, known: Sums) -> None:
    for name, total in sums.items():
        total.copy_(known[name])
