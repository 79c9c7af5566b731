"""Passes over a loader, with a check that every pass sees the same data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from math import inf
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.data.batch import Batch, TargetFn
from torch_lla_em.data.identity import Identity
from torch_lla_em.data.reading import Reader, joined
from torch_lla_em.data.trees import map_tensors
from torch_lla_em.data.weights import Weights
from torch_lla_em.runtime import Group, free_memory, report

_EMPTY = "The loader is empty: it yielded no examples."
_OTHER_COUNT = (
    "The loader yielded {} examples in this pass but {} in the first. Every pass must see the same "
    "data: make the loader re-iterable and finite, or pass a list of its batches."
)
_CHANGED = (
    "Two passes over the loader returned different data, for example because of random "
    "augmentation. The posterior needs the same data in every pass: fit on a loader without "
    "augmentation."
)
_DRAWN = (
    "The loader's {} drew other examples in this pass than in the first, but the posterior needs "
    "the same data in every pass. Pass a DataLoader of the dataset without this sampler (with "
    "shuffle=True if you like). To let some examples count more than others, call fit(..., "
    "weights=...)."
)
_OTHER_RANKS = (
    "A rank has other data than rank 0, or the data change from pass to pass. Pass the same loader on "
    "every rank, in the same order and without random augmentation: fit distributes its batches. A "
    "DistributedSampler is allowed."
)
_OTHER_THAN_SAVED = (
    "The checkpoint belongs to other data: its fit read {} examples, and this loader yields {} "
    "examples with other content. Delete its folder, or pass another one."
)

_FACTS = "num_rows", "num_targets", "num_labelled", "num_outputs", "num_passes"


class Kept:
    """Stores the batches of one pass, if they fit into a given amount of memory."""

    def __init__(self, room: float):
        self.room = room
        """Number of bytes that are left."""

        self._batches: list[Batch] = []

    def __iter__(self) -> Iterator[Batch]:
        return (batch._replace(kept=self) for batch in self._batches)

    def add(self, batch: Batch, is_list: bool) -> None:
        """Store a batch; drop all batches if they need more memory than allowed."""
        if self.room > 0:
            self.room -= _bytes(batch.tensors())
            # a loader may write the next batch to the same memory
            self._batches.append(batch if is_list or self.room <= 0 else batch.copied())
        if self.room <= 0:
            self._batches.clear()


class Data:
    """A re-iterable loader whose passes are compared: each must see the same examples, in any order.

    Batches are (inputs, targets), longer tuples that end with the targets, mappings with
    "labels", or anything that ``target_fn`` takes targets from. Each of several ranks reads its
    share; counts are those of all ranks.
    """

    def __init__(
        self,
        loader: Any,
        device: torch.device,
        target_fn: TargetFn | None = None,
        group: Group = Group(),
        weights: Weights | None = None,
    ):
        self._reader = Reader(loader, device, target_fn, group.size, weights)
        self.is_weighted = weights is not None
        self._source = self._reader.source
        self.group, self._device = group, device
        self.identity: Identity | None = None
        """The examples of a pass; None before the first, and if they change from pass to pass."""

        self._is_restored = False
        """Whether only an earlier run has read these examples."""

        self._num_steps: int | None = None
        self._bytes: float | None = None
        """Size of all batches: that of a list is known at once, others are measured in a pass."""

        self._fits: bool | None = None
        """Whether all batches are kept, which is decided once, as soon as their size is known."""

        self.kept: Kept | None = None
        """All batches, if a quarter of the memory holds them: those of a list from the first pass
        on, others once two passes were the same."""

        self.keep = True
        """Whether batches may be kept."""

        self.merge_rows = 0
        """Size up to which batches are joined, if examples do not depend on each other; 0: never."""

        self.num_rows: int | None = None
        """N, known after the first pass."""

        self.num_targets = 0
        """Entries of all targets, N C where every output has one."""

        self.num_outputs = self.num_labelled = 0
        """Entries of all outputs, N C, and examples with a label, known after the first pass."""

        self._counts: dict[int, tuple[int, Tensor]] = {}
        """The same of this rank's pieces in the first pass, by the number of their first example."""

        self.num_passes = 0

    def store(self, keep: bool, merge_rows: int) -> None:
        """Set whether batches may be kept, and the size up to which they are joined."""
        self.keep, self.merge_rows = keep, merge_rows

    def first(self) -> Batch:
        """Return the first batch, or small ones joined to it, with two examples if there are two.

        The next pass continues after these batches, so the loader is started only once.
        """
        batch = self._reader.first()
        if batch is None:
            raise ValueError(
                _EMPTY if self.num_rows is None else _OTHER_COUNT.format(0, self.num_rows)
            )
        return batch.on(self._device)[0]

    def batches(self, in_step: bool = False) -> Iterator[Batch]:
        """Yield this rank's batches of one pass.

        ``in_step``: yield the loader's own batches, without joining any, and as many on every rank: a
        rank with fewer yields empty ones at the end.
        """
        if self.kept is not None and not in_step:
            yield from self.kept
            self.num_passes += 1
            return
        # after the first pass each rank reads the share of another, so the sum of hashes changes
        # if ranks have different data
        share = (self.group.rank + (self.num_passes > 0)) % self.group.size
        read = self._reader.begin(share, self.num_passes if in_step else None)
        ordered = self._source.keeps_order and not (in_step and self._source.shuffles)
        own, candidate, size = Identity(ordered), Kept(self._room(in_step)), 0.0

        def counted(batches: Iterable[Batch]) -> Iterator[Batch]:
            nonlocal size
            for batch in batches:
                size += _bytes(batch.tensors())
                yield batch

        read = counted(read)
        if in_step:
            yield from self._in_step(self._counted(read, own, candidate))
        else:
            yield from self._counted(joined(read, self.merge_rows), own, candidate)
            if self.group.size == 1:
                self._num_steps = self._reader.num_read
        self._end(self.group.meet(own, Identity.of))
        self._bytes = size
        if self.keep and not self._changes and candidate.room > 0:
            self.kept = candidate

    __iter__ = batches

    def count(self, batch: Batch, outputs: int, labelled: Tensor) -> None:
        """Note the number of outputs of a batch, or a piece of one, and of its labelled examples.

        A piece that is repeated is counted once. The number of labelled examples is a tensor, (), which is
        read at the end of the pass.
        """
        self._counts[batch.place[0]] = outputs, labelled

    def num_batches(self) -> int:
        """Return the number of batches of a pass over all ranks; 0 if it is not known without one."""
        return self._source.num_batches()

    def num_steps(self) -> int | None:
        """Return the number of batches per rank of the last pass; None if it is not known."""
        return self._num_steps

    def facts(self) -> dict[str, Any]:
        """Return the counts of the passes as plain numbers, for ``restore``."""
        known = {name: getattr(self, name) for name in _FACTS}
        return {**known, "identity": None if self.identity is None else self.identity.state()}

    def restore(self, facts: dict[str, Any]) -> None:
        """Restore the counts of an earlier run; the data must be the same."""
        for name in _FACTS:
            setattr(self, name, facts[name])
        if facts["identity"] is not None:
            self.identity, self._is_restored = Identity.from_state(facts["identity"]), True

    def confirm(self) -> None:
        """Read the data once if only an earlier run has read them, to refuse other data."""
        if self._is_restored:
            self.keep = False
            for _ in self:
                pass
            self.num_passes -= 1

    @property
    def _changes(self) -> bool:
        """Whether examples have changed from pass to pass."""
        return self.identity is None and self.num_passes > 0

    def _counted(self, batches: Iterable[Batch], own: Identity, candidate: Kept) -> Iterator[Batch]:
        """Yield batches on the device; count them, and store them if they may be kept."""
        for batch in batches:
            own.add(tuple(batch.tensors().values()), counts_only=self._changes)
            batch, wait = batch.on(self._device)
            candidate.add(batch, self._source.is_list)
            yield batch._replace(kept=candidate if candidate.room > 0 else None)
            wait()

    def _in_step(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield as many batches on every rank, with the number of examples of all ranks."""
        nothing, steps = torch.zeros(0, device="cpu"), 0
        for batch in chain(batches, repeat(Batch(-1, nothing.long(), None, nothing))):
            step_rows = self.group.meet(len(batch.rows), sum)
            if not step_rows:
                break
            yield batch._replace(step_rows=step_rows)
            steps += 1
        self._num_steps = steps

    def _room(self, in_step: bool) -> float:
        """Return the number of bytes that the batches of a pass may take to be kept."""
        keeps = self.keep and self.kept is None and not self._changes and self.group.size == 1
        if not keeps or (in_step and self.merge_rows) or self._fits is False:
            return 0.0
        if self._bytes is None and self._source.is_list:
            self._bytes = sum(map(_bytes, self._source.loader))
        room = free_memory(self._device) / 4
        if self._fits is None and self._bytes is not None:
            self._fits = self._bytes < room
        return room if self._fits else 0.0

    def _end(self, whole: Identity) -> None:
        """Store the counts of all ranks; refuse other data, and warn if the data change."""
        differ = self.identity is not None and not self.identity.agrees(whole)
        if differ and self._is_restored:
            raise ValueError(_OTHER_THAN_SAVED.format(self.num_rows, whole.num_rows))
        if self.num_rows is None and not whole.num_rows:
            raise ValueError(_EMPTY)
        if differ and self._source.drawn_by:
            raise ValueError(_DRAWN.format(self._source.drawn_by))
        if differ and self.group.size > 1:
            raise ValueError(_OTHER_RANKS)
        if whole.num_rows != (self.num_rows or whole.num_rows):
            raise ValueError(_OTHER_COUNT.format(whole.num_rows, self.num_rows))
        if self.num_passes == 0:
            own = [int(sum(each)) for each in zip(*self._counts.values())] or [0, 0]
            self.num_outputs, self.num_labelled = self.group.meet(own, _added)
            self._counts.clear()
        if self.num_passes == 0 or self._is_restored:
            self.identity, self._is_restored = whole, False
        self.num_rows, self.num_targets = whole.num_rows, whole.num_targets
        self.num_passes += 1
        if differ:
            report("warn", _CHANGED)
            self.identity = self.kept = None


def _added(every: list[list[int]]) -> list[int]:
    return [sum(each) for each in zip(*every)]


def _bytes(tree: Any) -> float:
    """Return the size of all tensors; that of objects such as graphs is unknown."""
    sizes: list[float] = []
    map_tensors(
        lambda tensor: sizes.append(tensor.numel() * tensor.element_size()),
        tree,
        lambda _: sizes.append(inf),
    )
    return sum(sizes)
