"""Batches of a pass beside each other: joined into larger ones, or kept for the next pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.data.batch import Batch, is_sequence, map_tensors, tensors_in
from torch_lla_em.data.identity import Identity


class Joined:
    """Batches on their way, joined into ones of up to so many rows where rows go one to one."""

    def __init__(self) -> None:
        self._waiting: list[Batch] = []
        self._form: Any = None
        self._rows = 0

    def take(self, batch: Batch, at_most: int) -> Iterator[Batch]:
        """Yield what does not wait for more rows."""
        rows = len(batch.rows)
        form = _form((batch.inputs, batch.targets), rows) if rows < at_most else None
        if form is None or form != self._form or self._rows + rows > at_most:
            yield from self.rest()
        if form is None:
            yield batch
            return
        # a loader may fill the same memory again before this is read
        inputs, targets = map_tensors(Tensor.clone, (batch.inputs, batch.targets))
        self._waiting.append(batch._replace(inputs=inputs, targets=targets))
        self._form, self._rows = form, self._rows + rows
        if self._rows == at_most:
            yield from self.rest()

    def rest(self) -> Iterator[Batch]:
        """Yield what has waited, as one batch."""
        waited, self._waiting, self._form, self._rows = self._waiting, [], None, 0
        if len(waited) < 2:
            yield from waited
            return
        columns = [tensors_in((batch.inputs, batch.targets)) for batch in waited]
        whole = iter([torch.cat(column) for column in zip(*columns)])
        first, last = waited[0], waited[-1]
        inputs, targets = map_tensors(lambda _: next(whole), (first.inputs, first.targets))
        rows = torch.cat([batch.rows for batch in waited])
        yield Batch(f"{first.index} to {last.index}", rows, inputs, targets)


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
    """The batches of one pass, as far as they have room, each with what was seen by then."""

    def __init__(self, room: float):
        self._room = room
        self._seen: list[tuple[Batch, Identity]] = []
        self._marks: list[list[tuple[int, int]]] = []

    def __iter__(self) -> Iterator[tuple[Batch, Identity]]:
        return ((batch._replace(kept=self), identity) for batch, identity in self._seen)

    @property
    def has_room(self) -> bool:
        return self._room > 0

    def see(self, batch: Batch, identity: Identity) -> None:
        """Keep a batch, unless those before it have taken all of the room."""
        if self._room > 0:
            self._seen.append((batch, identity.so_far()))
            self._marks.append(_places(batch))
            self._room -= _bytes(batch)
        if self._room <= 0:
            self._seen.clear()

    def serves(self) -> bool:
        """Whether this is all of the pass, in memory of its own that nobody has written to.

        A loader that fills the same memory again would leave nothing but its last batch.
        """
        places = [place for batch, _ in self._seen for place in _places(batch)]
        alone = len({pointer for pointer, _ in places}) == len(places)
        return self._room > 0 and alone and sum(self._marks, []) == places


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
