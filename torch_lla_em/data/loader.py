"""Data: passes over a loader, which must see the same rows every time."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from torch_lla_em.data import sources
from torch_lla_em.data.batch import Batch, TargetFn
from torch_lla_em.data.buffers import Kept, joined
from torch_lla_em.data.identity import Identity
from torch_lla_em.data.reading import (
    Mask,
    Reading,
    refuse_changed,
    refuse_other,
    together,
    whole,
)
from torch_lla_em.data.shares import Share
from torch_lla_em.data.sources import Chain, as_loader
from torch_lla_em.runtime import Group, free_memory

# where a batch of several rows is looked for
_BATCHES_AHEAD = 32

_FACTS = "num_rows", "num_targets", "num_outputs", "num_passes"


class Data:
    """A re-iterable loader; every pass must see the same rows, in any order.

    Batches are (inputs, targets), longer tuples that end with the targets, mappings with
    "labels", or anything that ``target_fn`` takes targets from. Of several ranks each sees
    its share; counts are of all of them. ``known`` are the rows of the first loaders when an
    earlier fit read them.
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
        self._loaders = Chain([as_loader(part, target_fn) for part in given])
        self.group, self._device, self._target_fn = group, device, target_fn
        self._shares = [Share(part, group) for part in self._loaders.loaders]
        self._next: Reading | None = None
        """The next pass, where its first batches were looked at."""

        self._known = known or ()
        self._first: Identity | None = None
        """The rows of the first pass, until another one has seen others."""

        self._read = self._restored = False
        """Whether this process has read all data, and whether an earlier run alone has."""

        self._steps: set[int] = set()
        self._kept_in: list[str] = []
        """Where the generators were when the pass that is kept began."""

        self.kept: Kept | None = None
        """All batches, if a quarter of the memory holds them: those of a list from the first pass
        on, others once three passes were the same."""

        self.keep = True
        """Whether batches may be kept."""

        self.merge_rows = 0
        """Rows up to which batches are joined, where theirs go one to one; 0: none are."""

        self.mask: Mask = lambda targets: None
        """Which targets are labels, where some are to be ignored."""

        self.num_rows: int | None = None
        """N, known after the first pass."""

        self.num_targets = self.num_labelled = 0
        """Entries of all targets, N C where every output has one; and rows that have a label."""

        self.num_outputs = 0
        """Entries of all outputs, N C: set by whoever sees them first."""

        self.num_passes = self.num_reads = 0
        """Passes over the data so far, and how often the loader itself was read."""

        self.parts: list[Identity] = []
        """The rows of every loader."""

    def first(self) -> Batch:
        """Return the first batch."""
        return self.ahead()

    def ahead(self, rows: int = 0, least: int = 1) -> Batch:
        """Return the first batch, or up to so many rows of several; the next pass begins with them.

        ``least``: the first batch of so many rows, if there is one.
        """
        if self.kept is not None and self.kept.serves():
            return next(iter(self.kept))
        drawn = sources.states(self._loaders)
        reading = self._begin() if self.group.size == 1 else self._alone()
        first = None
        for batch in islice(joined(reading.ahead(), rows), _BATCHES_AHEAD):
            first = batch[1] if first is None or len(first.rows) < least else first
            if len(first.rows) >= least:
                break
        if self.group.size > 1 or self._read:  # nothing goes on from here
            sources.restore(self._loaders, drawn)
        if first is None:
            empty = sources.OTHER_COUNT.format(0, self.num_rows)
            raise ValueError(empty if self._read else sources.EMPTY)
        return first.on(self._device)[0]

    def batches(self, in_step: bool = False) -> Iterator[Batch]:
        """Yield this rank's batches of one pass.

        ``in_step``: as the loader gives them, and as many on every rank, the last of them empty
        where one has fewer.
        """
        if self.kept is not None and not self.kept.serves():
            self.kept = None
        if self.kept is None or in_step:
            yield from self._over(in_step)
        else:
            yield from self.kept
            self.num_passes += 1

    __iter__ = batches

    def num_batches(self) -> int | None:
        """Return the batches of a pass over all ranks, if that is known without one."""
        counts = [share.num_batches() for share in self._shares]
        return None if None in counts else sum(counts)

    def num_steps(self) -> int | None:
        """Return the steps of a pass that goes batch by batch, if they were as many each time."""
        return next(iter(self._steps)) if len(self._steps) == 1 else None

    def facts(self) -> dict[str, Any]:
        """Return what passes have found out, as plain numbers that ``restore`` takes."""
        return {
            **{name: getattr(self, name) for name in _FACTS},
            "first": None if self._first is None else self._first.state(),
            "steps": sorted(self._steps),
            "kept_in": self._kept_in,
            "orders": self._orders(),
        }

    def restore(self, facts: dict[str, Any]) -> None:
        """Take over what passes of an earlier run have found out; its data must be these."""
        sources.restore(self._loaders, facts["orders"])
        if self._read:
            return
        for name in _FACTS:
            setattr(self, name, facts[name])
        self._first = None if facts["first"] is None else Identity.of(facts["first"])
        if self._first and self._is_shared_out:  # batches, and so their padding, go by the ranks
            self._first.repeated = False
        self._steps, self._kept_in, self._next = set(facts["steps"]), facts["kept_in"], None
        self._restored = True

    def confirm(self) -> None:
        """Read the data once where an earlier run alone has, so that others are refused.

        What is known of them, and the order that comes next, stay as they are.
        """
        if not self._restored:
            return
        self.keep, known = False, self.facts()
        for _ in self:
            pass
        self.num_passes = known["num_passes"]
        self.restore(known)

    @property
    def tells_inputs(self) -> bool:
        """Whether other inputs would be noticed, as far as two passes have shown."""
        first = self._first
        if first is None or self.num_passes < 2:
            return True
        return first.tells_inputs

    @property
    def _is_shared_out(self) -> bool:
        return any(share.is_shared_out for share in self._shares)

    @property
    def _changes(self) -> bool:
        """Whether rows have changed from pass to pass."""
        return self._first is None and self.num_passes > 0

    def _orders(self) -> list[str]:
        """Return what the next pass draws its order from; of several ranks nothing is put back."""
        return sources.states(self._loaders) if self.group.size == 1 else []

    def _begin(self, in_step: bool = False) -> Reading:
        """Return the next pass, whose first batches may have been looked at."""
        if self._next is None:
            reading = self._next = Reading(self._shares, self._device, self._target_fn)
            reading.drawn = self._orders()
            reading.again = [] if in_step or self.kept else self._kept_in
            sources.restore(self._loaders, reading.again)  # as an unbroken run goes over them
            reading.begin(is_first=not self._read, group=self.group)
            self.num_reads += 1
        return self._next

    def _alone(self) -> Reading:
        """Return a pass over all that the loaders yield, of this rank alone."""
        shares = [Share(loader, Group()) for loader in self._loaders.loaders]
        reading = Reading(shares, self._device, self._target_fn)
        reading.begin(is_first=False, group=Group())
        self.num_reads += 1
        return reading

    def _over(self, in_step: bool) -> Iterator[Batch]:
        """Yield this rank's batches from the loader, joined, counted and perhaps kept."""
        reading, self._next = self._begin(in_step), None
        candidate = Kept(self._room(in_step))
        for part, batch in joined(reading, 0 if in_step else self.merge_rows):
            if not self._read:
                reading.count_labels(batch.targets, self.mask)
            batch, wait = batch.on(self._device)
            reading.count(part, batch, not self._changes)
            candidate.see(batch)
            batch = batch._replace(kept=candidate if candidate.has_room else None)
            yield self._stepped(batch) if in_step else batch
            wait()
        nothing = torch.zeros(0, device="cpu")
        while (
            in_step and (last := self._stepped(Batch(-1, nothing.long(), None, nothing))).step_rows
        ):
            reading.batches += 1
            yield last
        sources.restore(self._loaders, reading.drawn if reading.again else [])
        if in_step or self.group.size == 1:
            self._steps.add(reading.batches)
        self._end(reading)
        if not self._changes and self.keep and candidate.serves():
            self.kept, self._kept_in = candidate, reading.again or reading.drawn

    def _room(self, in_step: bool) -> float:
        """Return the bytes that the batches of a pass may take to be kept."""
        repeats = self.num_passes > 1 or all(share.is_list for share in self._shares)
        keeps = self.keep and self.kept is None and repeats and not self._changes
        keeps = keeps and not (in_step and self.merge_rows)
        return free_memory(self._device) / 4 if keeps and self.group.size == 1 else 0.0

    def _stepped(self, batch: Batch) -> Batch:
        """Return a batch that knows the rows of all ranks' batches in this step."""
        return batch._replace(step_rows=self.group.meet("a step", len(batch.rows), sum))

    def _end(self, reading: Reading) -> None:
        """Take note of what all ranks have counted, and refuse or tell of other rows than before."""
        reading.outputs = self.num_outputs
        every = self.group.meet("the end of a pass", reading.tally(), together)
        changes, parts = self._changes, every["parts"]
        rows, identity = every["rows"], whole(parts)
        if not changes:
            refuse_changed(parts, self._known)
            self.parts, self._known = parts, ()
            if self._restored:
                refuse_other(identity, self._first)
        self.num_targets, self._restored = every["targets"], False
        if not self._read:
            self.num_labelled, self._read = every["labelled"], True
        if self.num_passes == 0:
            self.num_outputs = every["outputs"]
        self.num_passes += 1
        if self.num_rows is None:
            if rows == 0:
                raise ValueError(sources.EMPTY)
            self.num_rows, self._first = rows, identity
        elif rows != self.num_rows:
            raise ValueError(sources.OTHER_COUNT.format(rows, self.num_rows))
        elif not changes and not identity.agrees(self._first):
            warnings.warn(sources.changes_of(self._loaders), stacklevel=2)
            self._first = self.kept = None
            self.parts = []
        elif not changes and self.num_passes == 2 and not self._is_shared_out:
            self._first.learn(identity)
