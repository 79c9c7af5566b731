"""Passes over a loader, with a check that every pass sees the same data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data.batch import Batch, Tally, TargetFn
from torch_lla_em.data.identity import Identity
from torch_lla_em.data.reading import Reader, joined
from torch_lla_em.data.trees import map_tensors
from torch_lla_em.data.weights import Weights
from torch_lla_em.runtime import Group, free_memory

_EMPTY = "The loader is empty: it yielded no examples."
_OTHER_COUNT = (
    "The loader yielded {} examples in this pass but {} in the first. Every pass must see the same "
    "data: make the loader re-iterable and finite, or pass a list of its batches."
)
_CHANGED = (
    "Two passes over the loader returned different data, for example because of random augmentation or "
    "noise. The posterior needs the same data in every pass: pass a loader of the training data with "
    "the transforms of your test data, DataLoader(dataset_without_augmentation, batch_size=256)."
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

_SHARE = 0.25
"""Share of the free memory in which batches are kept, if there is no plan for it."""


class Facts(NamedTuple):
    """What the first pass has found about the data of all ranks; 0 before it."""

    num_rows: int = 0
    """N, the number of examples."""

    num_targets: int = 0
    """Entries of all targets, N C where every output has one."""

    num_outputs: int = 0
    """Entries of all outputs of the network, N C."""

    num_labelled: int = 0
    """Number of examples with a label and a weight other than 0."""


class BatchCache:
    """Stores the batches of one pass, if they fit into a given amount of memory."""

    def __init__(self, room: float):
        self.room = room
        """Number of bytes that are left."""

        self.size = 0.0
        """Number of bytes of all batches, also of those that are not stored."""

        self._batches: list[Batch] = []

    def __iter__(self) -> Iterator[Batch]:
        return (batch._replace(cache=self) for batch in self._batches)

    def add(self, batch: Batch, is_list: bool) -> None:
        """Store a batch; drop all batches if they need more memory than allowed."""
        size = _bytes(batch.tensors())
        self.size += size
        if self.room > 0:
            self.room -= size
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
        self.group, self._device = group, device
        self.identity: Identity | None = None
        """The examples of a pass; None before the first, and if they change from pass to pass."""

        self._is_restored = False
        """Whether only an earlier run has read these examples."""

        self._num_steps: int | None = None
        self.room: float | None = None
        """Bytes that batches may take to be kept; None: a quarter of the memory that is free at first."""

        self._bytes: float | None = None
        """Size of all batches: that of a list is known at once, others are measured in a pass."""

        self.cache: BatchCache | None = None
        """All batches, if there is room for them: those of a list from the first pass on, others once
        two passes were the same."""

        self.merge_rows = 0
        """Size up to which batches are joined, if examples do not depend on each other; 0: never."""

        self.facts = Facts()
        """What the first pass has found."""

        self._most = 0
        """The largest number of examples of a rank in the last pass."""

        self.num_passes = 0
        self._others_wait = False
        """Whether the other ranks wait for this one at the end of a pass."""

    def store(self, room: float, merge_rows: int) -> None:
        """Set the bytes that batches may take to be kept, and the size up to which they are joined."""
        self.room, self.merge_rows = room, merge_rows

    def first(self) -> Batch:
        """Return the first batch, or small ones joined to it, with two examples if there are two.

        The next pass continues after these batches, so the loader is started only once.
        """
        batch = self._reader.first()
        if batch is None:
            raise ValueError(
                _OTHER_COUNT.format(0, self.facts.num_rows) if self.num_passes else _EMPTY
            )
        return batch.on(self._device)[0]

    def confirm_first(self) -> None:
        """Read the first batch again, to refuse data that change from pass to pass without two passes."""
        if self._reader.changes():
            raise ValueError(_CHANGED)

    def batches(self, in_step: bool = False) -> Iterator[Batch]:
        """Yield this rank's batches of one pass.

        ``in_step``: yield the loader's own batches, without joining any, and as many on every rank: a
        rank with fewer yields empty ones at the end.
        """
        if self.cache is not None and not in_step:
            yield from self.cache
            self.num_passes += 1
            return
        # after the first pass each rank reads the share of another, so the sum of hashes changes
        # if ranks have different data
        share = (self.group.rank + (self.num_passes > 0)) % self.group.size
        read = self._reader.begin(share, self.num_passes if in_step else None)
        own = Identity(self._reader.keeps_order and not (in_step and self._reader.shuffles))
        kept, tally = self._new_cache(in_step), None if self.num_passes else Tally()
        own_batches = read if in_step else joined(read, self.merge_rows)
        counted = self._counted(own_batches, own, kept, tally)
        self._others_wait = not in_step
        try:
            yield from self._in_step(counted) if in_step else counted
        except Exception as error:
            self.fail(error)
            raise
        self._others_wait = False
        if self.group.size == 1:
            self._num_steps = self._reader.num_read
        whole, self._most = self.group.meet(own, _merged)
        self._end(whole, tally)
        self._bytes = kept.size
        if kept.room > 0:
            self.cache = kept

    __iter__ = batches

    def fail(self, error: Exception) -> None:
        """End a pass in which this rank has failed on the other ranks, too."""
        if self._others_wait:
            self._others_wait = False
            self.group.fail(error)

    def num_batches(self) -> int:
        """Return the number of batches of a pass over all ranks; 0 if it is not known without one."""
        return self._reader.num_batches()

    @property
    def largest_share(self) -> float:
        """The largest share of the examples that a rank has; before the first pass, of the batches."""
        batches, size = self.num_batches(), self.group.size
        if size > 1 and self._most:
            return self._most / self.facts.num_rows
        if self._reader.by_examples or not batches:
            return 1 / size
        return -(-batches // size) / batches

    def num_steps(self) -> int | None:
        """Return the number of batches per rank of the last pass; None if it is not known."""
        return self._num_steps

    def state(self) -> dict[str, Any]:
        """Return what the passes have found as plain numbers, for ``restore``."""
        identity = None if self.identity is None else self.identity.state()
        return {**self.facts._asdict(), "num_passes": self.num_passes, "identity": identity}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what an earlier run has found; the data must be the same."""
        self.facts = Facts(**{name: state[name] for name in Facts._fields})
        self.num_passes = state["num_passes"]
        if state["identity"] is not None:
            self.identity, self._is_restored = Identity.from_state(state["identity"]), True

    def confirm(self) -> None:
        """Read the data once if only an earlier run has read them, to refuse other data."""
        if self._is_restored:
            self._read_again()

    def numbers(self) -> Tensor:
        """Return the numbers of this rank's examples, ascending: of several ranks each reads its share."""
        if self.group.size == 1:
            return torch.arange(self.facts.num_rows, device="cpu")
        return self._read_again().sort()[0]

    def read(self) -> Identity | None:
        """Read all examples once, of several ranks another share than before; return their identity."""
        self._read_again()
        self.num_passes += 1
        return self.identity

    def _read_again(self) -> Tensor:
        """Read the data in a pass that does not count, and return the numbers of the examples."""
        self.room = 0.0
        rows = [batch.rows for batch in self]
        self.num_passes -= 1
        return torch.cat([torch.zeros(0, dtype=torch.long, device="cpu"), *rows])

    def _counted(
        self, batches: Iterable[Batch], own: Identity, kept: BatchCache, tally: Tally | None
    ) -> Iterator[Batch]:
        """Yield batches on the device; count them, and store them if they may be kept."""
        for batch in batches:
            own.add(tuple(batch.tensors().values()))
            batch, wait = batch.on(self._device)
            kept.add(batch, self._reader.is_list)
            yield batch._replace(cache=kept if kept.room > 0 else None, tally=tally)
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

    def _new_cache(self, in_step: bool) -> BatchCache:
        """Return where the batches of a pass are stored; it has no room if they are not to be kept."""
        if self.room is None:
            self.room = _SHARE * free_memory(self._device)
        if self._bytes is None and self._reader.is_list:
            self._bytes = sum(map(_bytes, self._reader.loader))
        keeps = self.cache is None and self.group.size == 1 and not (in_step and self.merge_rows)
        fits = self._bytes is not None and self._bytes < self.room
        return BatchCache(self.room if keeps and fits else 0.0)

    def _end(self, whole: Identity, tally: Tally | None) -> None:
        """Note what the first pass has found; refuse other data, and data that change."""
        known = self.facts.num_rows
        differ = self.identity is not None and not self.identity.agrees(whole)
        fault = None
        if differ and self._is_restored:
            fault = _OTHER_THAN_SAVED.format(known, whole.num_rows)
        elif not known and not whole.num_rows:
            fault = _EMPTY
        elif differ and self._reader.drawn_by:
            fault = _DRAWN.format(self._reader.drawn_by)
        elif differ and self.group.size > 1:
            fault = _OTHER_RANKS
        elif whole.num_rows != (known or whole.num_rows):
            fault = _OTHER_COUNT.format(whole.num_rows, known)
        elif differ:
            fault = _CHANGED
        if fault is not None:
            raise ValueError(fault)
        if tally is not None:
            own = [int(sum(each)) for each in zip(*tally.values())] or [0, 0]
            self.facts = Facts(whole.num_rows, whole.num_targets, *self.group.meet(own, _added))
        if tally is not None or self._is_restored:
            self.identity, self._is_restored = whole, False
        self.num_passes += 1


def _added(every: list[list[int]]) -> list[int]:
    return [sum(each) for each in zip(*every)]


def _merged(parts: list[Identity]) -> tuple[Identity, int]:
    """Return the identity of the examples of all ranks, and the largest number of a rank."""
    return Identity.of(parts), max(part.num_rows for part in parts)


def _bytes(tree: Any) -> float:
    """Return the size of all tensors; that of objects such as graphs is unknown."""
    sizes: list[float] = []
    map_tensors(
        lambda tensor: sizes.append(tensor.numel() * tensor.element_size()),
        tree,
        lambda _: sizes.append(inf),
    )
    return sum(sizes)
