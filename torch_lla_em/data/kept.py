"""Batches that are kept on the device from pass to pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch_lla_em.data.batch import Batch
from torch_lla_em.data.trees import is_opaque, leaves_of, tensors_in


class Kept:
    """A cache of the batches of a pass, if they all fit into ``room`` bytes and are the same in
    every pass."""

    def __init__(self, room: float = 0.0, copies: bool = True):
        """``copies``: whether batches are copied, because a loader may reuse their memory."""
        self.room, self._copies = room, copies
        self.batches: list[Batch] | None = None
        """All batches, once a pass has kept them."""

        self._new: list[Batch] = []
        self._may = False

    def begin(self, may: bool) -> None:
        """Begin a pass, whose batches may be kept or not."""
        self._new, self._may = [], may

    def let(self, may: bool) -> None:
        """Decide during a pass whether its batches may be kept."""
        self._may = may

    def of(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield batches, and cache them as long as they fit."""
        left = self.room
        for batch in batches:
            left -= sum(t.numel() * t.element_size() for t in tensors_in(batch.tensors()))
            has_objects = any(map(is_opaque, leaves_of(batch.tensors())))  # of unknown size
            self._may = self._may and left > 0 and not has_objects
            if self._may:
                batch = (batch.copied() if self._copies else batch)._replace(is_kept=True)
                self._new.append(batch)
            else:
                self._new.clear()
            yield batch

    def end(self) -> None:
        """End a pass over all examples."""
        if self._may:
            self.batches = self._new
