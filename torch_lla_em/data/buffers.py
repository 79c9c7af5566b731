"""Joins small batches into larger ones, and stores the batches of a pass for the next pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf
from typing import Any

import torch

from torch_lla_em.data.batch import Batch
from torch_lla_em.data.trees import map_tensors, row_form, tensors_in


def joined(batches: Iterable[tuple[int, Batch]], size: int) -> Iterator[tuple[int, Batch]]:
    """Join small batches of each loader into batches of up to ``size`` examples.

    Only batches in which every tensor has a row for every example are joined.
    """
    waiting: list[Batch] = []
    key: Any = None
    for part, batch in batches:
        form = row_form((batch.inputs, batch.targets), len(batch.rows))
        alone = form is None or len(batch.rows) >= size
        rows = sum(len(other.rows) for other in waiting) + len(batch.rows)
        if waiting and (alone or (part, form) != key or rows > size):
            yield key[0], _together(waiting)
            waiting = []
        if alone:
            yield part, batch
            continue
        key = part, form
        # a loader may overwrite the memory of a batch before the batch is used
        waiting.append(batch.copied())
    if waiting:
        yield key[0], _together(waiting)


def _together(batches: list[Batch]) -> Batch:
    """Concatenate batches of the same format."""
    first, last = batches[0], batches[-1]
    if first is last:
        return first
    columns = [tensors_in((batch.inputs, batch.targets)) for batch in batches]
    whole = iter([torch.cat(column) for column in zip(*columns)])
    inputs, targets = map_tensors(lambda _: next(whole), (first.inputs, first.targets))
    rows = torch.cat([batch.rows for batch in batches])
    return Batch(f"{first.index} to {last.index}", rows, inputs, targets)


class Kept:
    """Stores the batches of one pass, if they fit into a given amount of memory."""

    def __init__(self, room: float):
        self._room = room
        self._batches: list[Batch] = []
        self._places: list[tuple[int, int]] = []

    def __iter__(self) -> Iterator[Batch]:
        return (batch._replace(kept=self) for batch in self._batches)

    @property
    def has_room(self) -> bool:
        return self._room > 0

    def add(self, batch: Batch) -> None:
        """Store a batch; drop all batches if they need more memory than allowed."""
        if self._room > 0:
            self._batches.append(batch)
            self._places += _places(batch)
            self._room -= _bytes(batch)
        if self._room <= 0:
            self._batches.clear()

    def is_whole(self) -> bool:
        """Whether all batches of the pass are stored, and nobody has written to their memory.

        If a loader reuses the memory of its batches, only the last batch would be left.
        """
        places = [place for batch in self._batches for place in _places(batch)]
        alone = len({pointer for pointer, _ in places}) == len(places)
        return self._room > 0 and alone and self._places == places


def _places(batch: Batch) -> list[tuple[int, int]]:
    """Return the addresses and version counters of the tensors of a batch."""
    return [
        (tensor.data_ptr(), tensor._version)
        for tensor in tensors_in((batch.inputs, batch.targets))
        if tensor.layout == torch.strided and tensor.numel() and not tensor.is_inference()
    ]


def _bytes(batch: Batch) -> float:
    """Return the size of a batch; that of objects such as graphs is unknown."""
    sizes: list[float] = [batch.targets.nbytes]
    map_tensors(
        lambda tensor: sizes.append(tensor.numel() * tensor.element_size()),
        batch.inputs,
        lambda _: sizes.append(inf),
    )
    return sum(sizes)
