"""Passes over loaders, with a check that every pass sees the same data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data.batch import Batch, TargetFn, check_rows, default_targets, split
from torch_lla_em.data.buffers import Kept, joined
from torch_lla_em.data.identity import Identity
from torch_lla_em.data.sources import Chain, Source, as_loader
from torch_lla_em.runtime import Group, free_memory

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
_OTHER_RANKS = (
    "A rank has other data than rank 0, or the data change from pass to pass. Pass the same loader on "
    "every rank, in the same order and without random augmentation: fit distributes its batches. A "
    "DistributedSampler is allowed."
)
_REPEATED = (
    "Each of the {0} workers of the DataLoader yields all examples of its IterableDataset, so "
    "every example is read {0} times. Split the examples among workers by "
    "torch.utils.data.get_worker_info() in the dataset's __iter__, or pass num_workers=0."
)
_OTHER_SIZE = (
    "Batch {} has {} examples, but was collated from {} of the dataset. If the loader shuffles or "
    "several ranks share it, its collate_fn must keep the number of examples. Pass a list of "
    "batches instead."
)
# among which a batch of several examples is looked for
_BATCHES_AHEAD = 32

_FACTS = "num_rows", "num_targets", "num_labelled", "num_outputs", "num_passes"

Mask = Callable[[Tensor], Tensor | None]


class Count(NamedTuple):
    """Counts of one pass, on one rank or on all ranks."""

    labelled: int
    """Examples with a label that is not ignored."""

    targets: int
    """Entries of all targets."""

    outputs: int
    """Entries of all outputs."""

    parts: list[Identity]
    """The examples of every loader."""

    @classmethod
    def together(cls, every: list[Count]) -> Count:
        """Return the counts of all ranks together."""
        labelled, targets, outputs, parts = zip(*every)
        identities = [Identity.of(list(of_ranks)) for of_ranks in zip(*parts)]
        return cls(sum(labelled), sum(targets), sum(outputs), identities)


class Data:
    """A re-iterable loader whose passes are compared: each must see the same examples, in any order.

    Batches are (inputs, targets), longer tuples that end with the targets, mappings with
    "labels", or anything that ``target_fn`` takes targets from. Each of several ranks reads its
    share; counts are those of all ranks. ``known`` are the identities of the first loaders, if an
    earlier fit has read them.
    """

    def __init__(
        self,
        loader: Any,
        device: torch.device,
        target_fn: TargetFn | None = None,
        group: Group = Group(),
        known: Sequence[Identity] | None = None,
    ):
        given = loader.loaders if isinstance(loader, Chain) else (loader,)
        loaders = [as_loader(part, target_fn) for part in given]
        self.group, self._device, self._target_fn = group, device, target_fn
        self._sources = [Source(part, group.size) for part in loaders]
        self._ahead: list[tuple[int, Batch]] = []
        """The first batches, which were read before the first pass."""

        self._rest: Iterator[tuple[int, Batch]] | None = None
        """The iterator over the remaining batches; None if no pass has started."""

        self._known = known or ()
        self._first: Identity | None = None
        """The examples of the first pass, until another pass has seen others."""

        self._restored = False
        """Whether the first pass was made by an earlier run, whose data are not compared yet."""

        self._num_read = 0
        self._num_steps: int | None = None
        """Batches that were read in this pass; and in the last one."""

        self.kept: Kept | None = None
        """All batches, if a quarter of the memory holds them: those of a list from the first pass
        on, others once two passes were the same."""

        self.keep = True
        """Whether batches may be kept."""

        self.merge_rows = 0
        """Size up to which batches are joined, if examples do not depend on each other; 0: never."""

        self.mask: Mask = lambda targets: None
        """Returns which targets count, if the likelihood ignores some."""

        self.num_rows: int | None = None
        """N, known after the first pass."""

        self.num_targets = self.num_labelled = 0
        """Entries of all targets, N C where every output has one; and examples that have a label."""

        self.num_outputs = 0
        """Entries of all outputs, N C: set by the first pass that calls the network."""

        self.num_passes = 0
        self.parts: list[Identity] = []
        """The examples of every loader."""

    def first(self, least: int = 1) -> Batch:
        """Return the first batch of at least so many examples, or the first batches joined to them.

        The next pass continues after these batches, so the loader is started only once.
        """
        few = islice(self._looked_at(), 1 if least == 1 else _BATCHES_AHEAD)
        found = [(part, batch) for part, batch in few]
        if not found:
            raise ValueError(
                _EMPTY if self.num_rows is None else _OTHER_COUNT.format(0, self.num_rows)
            )
        every = chain(found, joined(found, least))
        batch = next((b for _, b in every if len(b.rows) >= least), found[0][1])
        return batch.on(self._device)[0]

    def batches(self, in_step: bool = False) -> Iterator[Batch]:
        """Yield this rank's batches of one pass.

        ``in_step``: as the loader yields them, and as many on every rank; the last of them are empty
        where one has fewer.
        """
        if self.kept is not None and not self.kept.is_whole():
            self.kept = None
        if self.kept is None or in_step:
            yield from self._over(in_step)
        else:
            yield from self.kept
            self.num_passes += 1

    __iter__ = batches

    def num_batches(self) -> int | None:
        """Return the number of batches of a pass over all ranks, if it is known without one."""
        counts = [source.num_batches() for source in self._sources]
        return None if None in counts else sum(counts)

    def num_steps(self) -> int | None:
        """Return the steps of the last pass that went batch by batch."""
        return self._num_steps

    def facts(self) -> dict[str, Any]:
        """Return the counts of the passes as plain numbers, for ``restore``."""
        known = {name: getattr(self, name) for name in _FACTS}
        return {**known, "first": None if self._first is None else self._first.state()}

    def restore(self, facts: dict[str, Any]) -> None:
        """Restore the counts of an earlier run; the data must be the same."""
        for name in _FACTS:
            setattr(self, name, facts[name])
        self._first = None if facts["first"] is None else Identity.from_state(facts["first"])
        self._restored = self.num_passes > 0

    def confirm(self) -> None:
        """Read the data once if only an earlier run has read them, to refuse other data."""
        if self._restored:
            self.keep = False
            for _ in self:
                pass
            self.num_passes -= 1

    @property
    def _changes(self) -> bool:
        """Whether examples have changed from pass to pass."""
        return self._first is None and self.num_passes > 0

    def _looked_at(self) -> Iterator[tuple[int, Batch]]:
        """Yield the first batches; the next pass of a single process continues after them."""
        yield from self._ahead
        if self._rest is None:
            if self._ahead:
                return
            self._rest = self._read(0, 1)
        for part, batch in self._rest:
            if not self._sources[part].is_list:  # the loader may write to the same memory again
                batch = batch.copied()
            self._ahead.append((part, batch))
            yield part, batch

    def _begun(self, in_step: bool) -> Iterable[tuple[int, Batch]]:
        """Return the batches of a pass, of which the first may have been looked at."""
        seed, rest, self._rest = self.num_passes if in_step else None, self._rest, None
        if self.group.size == 1 and rest is not None:
            return chain(tuple(self._ahead), rest)
        # ranks with different data see another sum of hashes, once each reads what another read
        share = (self.group.rank + (self.num_passes > 0)) % self.group.size
        return self._read(share, self.group.size, seed)

    def _read(self, first: int, step: int, seed: int | None = None) -> Iterator[tuple[int, Batch]]:
        """Yield every ``step``-th batch of the loaders, each with the number of its loader."""
        self._num_read = start = 0
        for part, source in enumerate(self._sources):
            seen, several = 0, source.num_workers > 1 and self.num_passes == 0
            workers = [Identity() for _ in range(source.num_workers * several)]
            for place, numbers, raw in source.batches(first, step, self._count, seed):
                inputs, targets = split(raw, self._target_fn, self._device)
                size = check_rows(inputs, targets, place)
                if not size:
                    continue
                if numbers is None or isinstance(numbers, int):
                    begin = seen if numbers is None else numbers
                    numbers = torch.arange(begin, begin + size, device="cpu")
                elif len(numbers) != size:
                    raise ValueError(_OTHER_SIZE.format(place, size, len(numbers)))
                seen, self._num_read = seen + size, self._num_read + 1
                if workers:
                    workers[place % len(workers)].add((targets, inputs))
                yield part, Batch(place, start + numbers, inputs, targets)
            if workers and all(own.num_rows and own.agrees(workers[0]) for own in workers):
                raise ValueError(_REPEATED.format(len(workers)))
            start += source.num_rows or seen

    def _count(self, raw: Any) -> int:
        """Return the number of examples of a batch that another rank takes."""
        return len((self._target_fn or default_targets)(raw))

    def _over(self, in_step: bool) -> Iterator[Batch]:
        """Yield this rank's batches from the loader, joined, counted and perhaps kept."""
        labelled = targets = 0
        parts = [
            Identity(source.keeps_order and not (in_step and source.shuffles))
            for source in self._sources
        ]
        candidate = Kept(self._room(in_step))
        for part, batch in joined(self._begun(in_step), 0 if in_step else self.merge_rows):
            targets += batch.targets.numel()
            labelled += self._labelled(batch.targets) if self.num_passes == 0 else 0
            parts[part].add((batch.targets, batch.inputs), counts_only=self._changes)
            batch, wait = batch.on(self._device)
            candidate.add(batch)
            batch = batch._replace(kept=candidate if candidate.has_room else None)
            yield self._in_step(batch) if in_step else batch
            wait()
        nothing = torch.zeros(0, device="cpu")
        while (
            in_step and (last := self._in_step(Batch(-1, nothing.long(), None, nothing))).step_rows
        ):
            self._num_read += 1
            yield last
        if in_step or self.group.size == 1:
            self._num_steps = self._num_read
        own = Count(labelled, targets, self.num_outputs, [Identity.of([part]) for part in parts])
        self._end(self.group.meet(own, Count.together))
        if not self._changes and self.keep and candidate.is_whole():
            self.kept = candidate

    def _room(self, in_step: bool) -> float:
        """Return the number of bytes that the batches of a pass may take to be kept."""
        repeats = self.num_passes > 0 or all(source.is_list for source in self._sources)
        keeps = self.keep and self.kept is None and repeats and not self._changes
        keeps = keeps and not (in_step and self.merge_rows)
        return free_memory(self._device) / 4 if keeps and self.group.size == 1 else 0.0

    def _in_step(self, batch: Batch) -> Batch:
        """Return the batch with the number of examples that all ranks have in this step."""
        return batch._replace(step_rows=self.group.meet(len(batch.rows), sum))

    def _labelled(self, targets: Tensor) -> int:
        """Return how many examples have a target that is not ignored."""
        kept = self.mask(targets)
        if kept is None or not kept.dim():
            return len(targets)
        return int(kept.reshape(len(kept), -1).any(1).sum())

    def _end(self, found: Count) -> None:
        """Store the counts of all ranks; refuse other data, and warn if the data change."""
        identity, changed = Identity.of(found.parts), self._changes
        if not changed:
            self._refuse_others(found.parts, identity)
        if self.num_passes == 0:
            self.num_labelled, self.num_outputs = found.labelled, found.outputs
        self.num_targets, self._restored = found.targets, False
        self.num_passes += 1
        if self.num_rows is None:
            if identity.num_rows == 0:
                raise ValueError(_EMPTY)
            self.num_rows, self._first = identity.num_rows, identity
        elif not changed and self.group.size > 1 and not identity.agrees(self._first):
            raise ValueError(_OTHER_RANKS)
        elif identity.num_rows != self.num_rows:
            raise ValueError(_OTHER_COUNT.format(identity.num_rows, self.num_rows))
        elif not changed and not identity.agrees(self._first):
            warnings.warn(_CHANGED, stacklevel=2)
            self._first, self.kept, self.parts = None, None, []

    def _refuse_others(self, parts: list[Identity], identity: Identity) -> None:
        """Raise an error if the data are not those of an earlier fit, or of a checkpoint."""
        for now, before in zip(parts, self._known):
            if not now.agrees(before):
                raise ValueError(
                    f"The data of an earlier fit have changed: that fit read {before.num_rows} "
                    f"examples, and the same loader now yields {now.num_rows} examples with other "
                    "content. With override=False the earlier data are read again, so do not "
                    "modify their list or tensors. Or call fit once with one loader of all data."
                )
        self.parts, self._known = parts, ()
        if self._restored and not identity.agrees(self._first):
            raise ValueError(
                f"The checkpoint belongs to other data: its fit read {self._first.num_rows} "
                f"examples, and this loader yields {identity.num_rows} examples with other "
                f"content. Delete its folder, or pass another one."
            )
