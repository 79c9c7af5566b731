"""One batch of a pass, and which of them may stay on the device for the next."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data.batches import cut, map_tensors


class Batch(NamedTuple):
    """One batch of a pass."""

    index: int
    """Position in the pass, from 0."""

    rows: Tensor
    """Row numbers in the pass, shape (B,), on the CPU: the key of each row's noise."""

    inputs: Any
    """What the network is called with."""

    targets: Tensor
    """y."""

    step_rows: int = 0
    """Rows of all ranks' batches, where they go step by step."""

    def split(self, size: int) -> Iterator[Batch]:
        """Yield the batch in pieces of at most ``size`` rows, or whole if it has no rows to cut."""
        rows = len(self.rows)
        if rows <= size or cut(self.inputs, rows, slice(0, 1)) is None:
            yield self
            return
        for start in range(0, rows, size):
            piece = slice(start, start + size)
            inputs = cut(self.inputs, rows, piece)
            yield Batch(self.index, self.rows[piece], inputs, self.targets[piece])


class Keeping:
    """The batches of one pass, while they have room, and if they can serve another."""

    def __init__(self, room: float):
        self._room = room
        self._batches: list[Batch] = []
        self._marks: list[list[tuple[int, int]]] = []

    def see(self, batch: Batch) -> None:
        """Keep a batch, unless those before it have taken all of the room."""
        if self._room > 0:
            self._batches.append(batch)
            self._marks.append(_places(batch))
            self._room -= _bytes(batch)

    def batches(self) -> list[Batch] | None:
        """Return all batches, or None where they had no room or have changed meanwhile.

        A loader that fills the same memory again would leave nothing but its last batch.
        """
        places = [place for batch in self._batches for place in _places(batch)]
        alone = len({pointer for pointer, _ in places}) == len(places)
        same = all(mark == _places(batch) for mark, batch in zip(self._marks, self._batches))
        return self._batches if self._room > 0 and alone and same else None


def _places(batch: Batch) -> list[tuple[int, int]]:
    """Return where the tensors of a batch lie, and how often each was written to."""
    places: list[tuple[int, int]] = []

    def see(tensor: Tensor) -> None:
        if tensor.layout == torch.strided and tensor.numel() and not tensor.is_inference():
            places.append((tensor.data_ptr(), tensor._version))

    map_tensors(see, (batch.inputs, batch.targets))
    return places


def _bytes(batch: Batch) -> float:
    """Return the size of a batch; that of objects with insides of their own is unknown."""
    sizes: list[float] = [batch.targets.nbytes]
    map_tensors(
        lambda tensor: sizes.append(tensor.numel() * tensor.element_size()),
        batch.inputs,
        lambda _: sizes.append(inf),
    )
    return sum(sizes)
