"""Batches of a pass beside each other: joined into larger ones, or kept for the next pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import inf
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.data.batch import Batch, is_sequence, map_tensors, tensors_in


def joined(batches: Iterable[tuple[int, Batch]], at_most: int) -> Iterator[tuple[int, Batch]]:
    """Yield batches of each loader, joined into ones of up to so many rows where rows go one to one."""
    waiting: list[Batch] = []
    key: Any = None
    for part, batch in batches:
        form = _form((batch.inputs, batch.targets), len(batch.rows))
        alone = form is None or len(batch.rows) >= at_most
        rows = sum(len(other.rows) for other in waiting) + len(batch.rows)
        if waiting and (alone or (part, form) != key or rows > at_most):
            yield key[0], _together(waiting)
            waiting = []
        if alone:
            yield part, batch
            continue
        key = part, form
        # a loader may fill the same memory again before this is read
        inputs, targets = map_tensors(Tensor.clone, (batch.inputs, batch.targets))
        waiting.append(batch._replace(inputs=inputs, targets=targets))
        if rows == at_most:
            yield part, _together(waiting)
            waiting = []
    if waiting:
        yield key[0], _together(waiting)


def _together(batches: list[Batch]) -> Batch:
    """Return batches of one form as one."""
    first, last = batches[0], batches[-1]
    if first is last:
        return first
    columns = [tensors_in((batch.inputs, batch.targets)) for batch in batches]
    whole = iter([torch.cat(column) for column in zip(*columns)])
    inputs, targets = map_tensors(lambda _: next(whole), (first.inputs, first.targets))
    rows = torch.cat([batch.rows for batch in batches])
    return Batch(f"{first.index} to {last.index}", rows, inputs, targets)


def _form(tree: Any, rows: int) -> Any:
    """Return what batches that can be joined have in common, or None of others."""
    if isinstance(tree, Tensor):
        whole = tree.layout == torch.strided and tree.dim() and not tree.is_nested
        return (tree.dtype, tree.device, tree.shape[1:]) if whole and len(tree) == rows else None
    if isinstance(tree, Mapping):
        parts = {key: _form(value, rows) for key, value in tree.items()}
        return None if not parts or None in parts.values() else parts
    if is_sequence(tree):
        several = [_form(part, rows) for part in tree]
        return None if not several or None in several else several
    return None


class Kept:
    """The batches of one pass, as far as they have room."""

    def __init__(self, room: float):
        self._room = room
        self._batches: list[Batch] = []
        self._places: list[tuple[int, int]] = []

    def __iter__(self) -> Iterator[Batch]:
        return (batch._replace(kept=self) for batch in self._batches)

    @property
    def has_room(self) -> bool:
        return self._room > 0

    def see(self, batch: Batch) -> None:
        """Keep a batch, unless those before it have taken all of the room."""
        if self._room > 0:
            self._batches.append(batch)
            self._places += _places(batch)
            self._room -= _bytes(batch)
        if self._room <= 0:
            self._batches.clear()

    def serves(self) -> bool:
        """Whether this is all of the pass, in memory of its own that nobody has written to.

        A loader that fills the same memory again would leave nothing but its last batch.
        """
        places = [place for batch in self._batches for place in _places(batch)]
        alone = len({pointer for pointer, _ in places}) == len(places)
        return self._room > 0 and alone and self._places == places


def _places(batch: Batch) -> list[tuple[int, int]]:
    """Return where the tensors of a batch lie, and how often each was written to."""
    return [
        (tensor.data_ptr(), tensor._version)
        for tensor in tensors_in((batch.inputs, batch.targets))
        if tensor.layout == torch.strided and tensor.numel() and not tensor.is_inference()
    ]


def _bytes(batch: Batch) -> float:
    """Return the size of a batch; that of objects with insides of their own is unknown."""
    sizes: list[float] = [batch.targets.nbytes]
    map_tensors(
        lambda tensor: sizes.append(tensor.numel() * tensor.element_size()),
        batch.inputs,
        lambda _: sizes.append(inf),
    )
    return sum(sizes)
