"""What a pass has summed so far, kept between its batches where passes take long."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from torch_lla_em.data import Data, Identity
from torch_lla_em.problem import Rows
from torch_lla_em.runtime import files, write_atomically
from torch_lla_em.runtime import records as persistence

logger = logging.getLogger("torch_lla_em")

INTERVAL = 300.0
"""Seconds between two writes, at least."""

WRITES = 0.05
"""Share of the time that writes may take."""

# of the time between two writes, at most, from one to the next
_GROWTH = 4


class Kept(NamedTuple):
    """What a pass goes on with."""

    rows: Rows
    """The rows whose work is in the sums."""

    before: dict[str, Tensor]
    """What the sums were before, on the host."""


class PartialPass:
    """One file with the sums over the first rows of the pass that is under way."""

    def __init__(self, path: Path):
        self._path = path
        self._interval = INTERVAL
        self._written_at = time.monotonic()
        self._asked: list[float] = []
        self._part = 0
        self.summed = 0, 0
        """Passes before, and rows of the one under way whose work is done."""

    def begin(self, asked: Tensor) -> None:
        """Note where a pass is taken; what is kept of another is not gone on with."""
        self._asked, self._part = asked.tolist(), 0

    def next_part(self) -> None:
        """Begin the next sweep over the data in the same pass."""
        self._part += 1

    def restore(self, position: int, sums: dict[str, Tensor], data: Data) -> Kept | None:
        """Fill in the sums of this pass, if any are known, beside no others on their device."""
        self._written_at = time.monotonic()
        if not os.path.exists(self._path):  # nor where the disk does not answer
            return None
        try:
            state = files.tensors_of(self._path, ("facts",))
        except (OSError, files.UnreadableError) as error:
            logger.warning(
                "What was kept of this pass is left, and the pass begins anew: %s", error
            )
            self.forget()
            return None
        facts = persistence.from_bytes(state.pop("facts"))
        shapes = {name: total.shape for name, total in sums.items()}
        place = position, self._part, *self._asked
        if not _near(facts["place"], place) or shapes != {n: t.shape for n, t in state.items()}:
            return None
        for name, total in sums.items():
            _exchange(total, state[name])
        data.num_outputs = facts["num_outputs"]
        logger.info("The checkpoint goes on with this pass after %d rows.", facts["rows"])
        return Kept(Rows(facts["rows"], prefix=Identity.of(facts["prefix"])), state)

    def due(self) -> bool:
        """Whether it is time to write."""
        elapsed = time.monotonic() - self._written_at
        if elapsed < 0:  # no clock should, but those of virtual machines that move have
            self._written_at += elapsed
        return elapsed >= self._interval

    def write(self, position: int, sums: dict[str, Tensor], data: Data) -> None:
        """Keep the sums over all rows that the data have yielded in this pass."""
        began = time.monotonic()
        facts = {
            "place": [position, self._part, *self._asked],
            "rows": data.rows_seen,
            "num_outputs": data.num_outputs,
            "prefix": data.fingerprint.state(),
        }
        write_atomically({**sums, "facts": persistence.to_bytes(facts)}, self._path)
        self._written_at = time.monotonic()
        spent = (self._written_at - began) / WRITES if WRITES else 0.0
        # not at once: of a machine that slept meanwhile, a clock tells of a long write too
        self._interval = min(max(INTERVAL, spent), _GROWTH * self._interval)

    def forget(self) -> None:
        """Remove the file: its pass has ended."""
        files.remove(self._path)


def _exchange(total: Tensor, other: Tensor) -> None:
    """Exchange the contents of two tensors, by rows: there may be no room for a third."""
    pairs = zip(total, other) if total.dim() > 1 else [(total, other)]
    for row, other_row in pairs:
        known = row.to(other_row.device, copy=True)
        row.copy_(other_row)
        other_row.copy_(known)


def _near(place: list[float], other: tuple[float, ...]) -> bool:
    """Whether two places are the same but for rounding."""
    return len(place) == len(other) and all(
        abs(a - b) <= 1e-6 * (1 + abs(b)) for a, b in zip(place, other)
    )
