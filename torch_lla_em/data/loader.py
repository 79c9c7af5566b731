"""Passes over a loader: batches on the right device, with rows counted and compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.data import sources
from torch_lla_em.data.batch import Batch, TargetFn, check_rows, num_rows, split
from torch_lla_em.data.buffers import Joined, Kept
from torch_lla_em.data.identity import Identity
from torch_lla_em.data.shares import Share
from torch_lla_em.data.sources import Chain, as_loader
from torch_lla_em.data.tally import (
    Tally,
    labelled,
    refuse_changed,
    refuse_other_checkpoint,
    same,
    together,
)
from torch_lla_em.runtime import Group, free_memory

# where a batch of several rows is looked for
_BATCHES_AHEAD = 32


class Data:
    """A re-iterable loader; every pass must see the same rows, in any order.

    Batches are (inputs, targets), longer tuples that end with the targets, mappings with
    "labels", or anything that ``target_fn`` takes targets from. Of several ranks each sees
    its share; counts are of all of them.
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
        parts = [as_loader(part, target_fn) for part in given]
        self.group = group
        self._loader = Chain(parts) if isinstance(loader, Chain) else parts[0]
        self._shares = [Share(part, group) for part in parts]
        self._is_list = all(type(part) in (list, tuple) for part in parts)
        self._device = device
        self._target_fn = target_fn
        self._first: Identity | None = None
        self._known = known
        """Rows of the first loaders when an earlier fit read them."""

        self.parts: list[Identity] = []
        """The rows of every loader, as the last complete pass over them saw them."""

        self._read = self._restored = self._in_step = False
        self._steps: set[int] = set()
        self._peeked: Batch | None = None
        self._kept_in: list[str] = []
        """Where the generators were when the pass that is kept began."""
        self.keep = True  # batches, as far as they fit
        self.kept: Kept | None = None
        """All batches, if a quarter of the memory holds them: those of a list from the first pass
        on, others once three passes were the same."""

        self.merge_rows = 0
        """Rows up to which batches are joined, where theirs go one to one; 0: none are."""

        self.num_rows: int | None = None
        self.num_targets = 0
        """N, known after the first pass; and entries of all targets, N C where outputs have one each."""

        self.mask: Callable[[Tensor], Tensor | None] = lambda targets: None
        """Which targets are labels, where some are to be ignored."""

        self.num_labelled = 0  # rows that have one
        self.num_outputs = 0
        """Entries of all outputs, N C: set by whoever sees them first."""

        self.num_passes, self.num_reads = 0, 0
        """Passes over the data so far, and how often the loader itself was gone over."""

        self.rows_seen = 0
        """Rows of this pass so far."""

        self.fingerprint: Identity | None = None
        """Of the rows of this pass so far, while passes are compared."""

    def first(self) -> Batch:
        """Return the first batch: what is kept, or the loader's, read once before the next pass."""
        if self.kept is not None and self.kept.serves():
            return next(iter(self.kept))[0]
        self._peeked = self._peeked or self.ahead()
        return self._peeked

    def ahead(self, rows: int = 0, least: int = 1) -> Batch:
        """Return the loader's first rows: one batch, or up to so many rows of several.

        ``least``: the first batch of so many rows, if there is one. The loader is read for it, once more, and its order put back.
        """
        alone = Data(self._loader, self._device, self._target_fn)
        alone.merge_rows, self.num_reads = rows, self.num_reads + 1
        drawn = sources.states(self._loader)
        first = None
        for batch in islice(alone, _BATCHES_AHEAD):
            first = first or batch
            if len(batch.rows) >= least:
                first = batch
                break
        sources.restore(self._loader, drawn)
        return first

    def batches(self, whole: bool = False, in_step: bool = False) -> Iterator[Batch]:
        """Yield this rank's batches of one pass, or all of them.

        ``in_step``: as the loader gives them, and as many on every rank, the last of them empty
        where one has fewer.
        """
        self._peeked, self._in_step = None, in_step
        if self.kept is not None and not self.kept.serves():
            self.kept = None
        self.rows_seen = 0
        held = None if in_step else self.kept
        yield from self._over(whole, in_step) if held is None else self._again(held)

    def _again(self, held: Kept) -> Iterator[Batch]:
        """Yield what is kept, of which everything is known."""
        for batch, self.fingerprint in held:
            self.rows_seen = int(batch.rows[-1]) + 1
            yield batch
        self.num_passes += 1

    def _over(self, whole: bool, in_step: bool) -> Iterator[Batch]:
        """Yield this rank's batches from the loader, joined, counted and perhaps kept."""
        own = Tally()
        own.identity.in_order = all(share.keeps_order for share in self._shares)
        compared = self.num_passes == 0 or self._first is not None
        self.fingerprint = own.identity if compared else None
        the_same = self.num_passes > 1 or self._is_list
        keeps = compared and the_same and self.kept is None and not (in_step and self.merge_rows)
        keeps = keeps and self.keep and self.group.size == 1  # whose passes are all alike
        candidate, drawn = Kept(free_memory(self._device) / 4 if keeps else 0.0), self._orders()
        again = [] if in_step or self.kept else self._kept_in  # as an unbroken run goes over them
        sources.restore(self._loader, again)
        self.num_reads += 1
        for part, batch in self._by_part(whole, own):
            own.labelled += 0 if self._read else labelled(batch.targets, self.mask)
            batch, wait = batch.on(self._device)
            own.rows += len(batch.rows)
            own.targets += batch.targets.numel()
            self.rows_seen = int(batch.rows[-1]) + 1
            if self.fingerprint is not None:
                self.fingerprint.add((batch.targets, batch.inputs), batch.rows)
                if len(own.parts) > 1:
                    own.parts[part].add((batch.targets, batch.inputs), batch.rows)
                candidate.see(batch, self.fingerprint)
            batch = batch._replace(kept=candidate if candidate.has_room else None)
            yield (
                batch._replace(step_rows=self.group.meet("a step", len(batch.rows), sum))
                if in_step
                else batch
            )
            wait()
        while in_step and (rows := self.group.meet("a step", 0, sum)):
            nothing, own.batches = torch.zeros(0, device="cpu"), own.batches + 1
            yield Batch(-1, nothing.long(), None, nothing, rows)
        sources.restore(self._loader, drawn if again else [])
        if in_step or self.group.size == 1:
            self._steps.add(own.batches)
        own.outputs = self.num_outputs
        every = self.group.meet("the end of a pass", own.state(), same if whole else together)
        self.num_targets = every["targets"]
        if not self._read:
            self.num_labelled = every["labelled"]
        if self.num_passes == 0:
            self.num_outputs = every["outputs"]
        whole_identity = Identity.of(every["identity"])
        if compared:
            self.parts = list(map(Identity.of, every["parts"])) or [whole_identity]
            refuse_changed(self.parts, self._known or ())
            self._known = None
        self._finish_pass(every["rows"], whole_identity)
        if self._first is not None and self.keep and candidate.serves():
            self.kept, self._kept_in = candidate, self._kept_in if again else drawn

    def _by_part(self, whole: bool, own: Tally) -> Iterator[tuple[int, Batch]]:
        """Yield this rank's batches, each with the number of the loader that it is from."""
        if len(self._shares) > 1:
            own.parts = [Identity() for _ in self._shares]
        for part, share in enumerate(self._shares):
            for batch in self._joined(share, whole, own):
                yield part, batch

    def _joined(self, share: Share, whole: bool, own: Tally) -> Iterator[Batch]:
        """Yield batches joined as far as wanted by now, none of them of two loaders."""
        joined = Joined()
        for batch in self._taken(share, whole, own):
            yield from joined.take(batch, 0 if self._in_step else self.merge_rows)
        yield from joined.rest()

    def _taken(self, share: Share, whole: bool, own: Tally) -> Iterator[Batch]:
        """Yield this rank's batches as they are; note those that another rank reads too."""
        start, compared = own.reached, self.group.size > 1 and not self._read
        for turn in share.turns(whole, compared):
            own.turns += 1
            if not turn.taken and turn.peer is None:
                size = turn.size
                own.reached += num_rows(turn.batch, self._target_fn) if size is None else size
                continue
            inputs, targets = split(turn.batch, self._target_fn, self._device)
            size = check_rows(inputs, targets, own.turns - 1, turn.size)
            here = torch.arange(own.reached, own.reached + size, device="cpu")
            rows = here if turn.rows is None else start + turn.rows
            own.reached += size
            if size and turn.peer is not None:
                pair = (self.group.rank, turn.peer)
                own.note(*(pair if turn.taken else pair[::-1]), (targets, inputs), rows)
            if size and turn.taken:
                own.batches += 1
                yield Batch(own.turns - 1, rows, inputs, targets)

    def _orders(self) -> list[str]:
        """Return what the next pass draws its order from; of several ranks nothing is put back."""
        return sources.states(self._loader) if self.group.size == 1 else []

    def num_batches(self) -> int | None:
        """Return the batches of a pass over all ranks, if that is known without one."""
        counts = [share.num_batches() for share in self._shares]
        return None if None in counts else sum(counts)

    def num_steps(self) -> int | None:
        """Return the steps of a pass that goes batch by batch, if they are known to be as many each time."""
        if self._steps:
            return next(iter(self._steps)) if len(self._steps) == 1 else None
        counts = [share.num_steps() for share in self._shares]
        return None if None in counts else sum(counts)

    __iter__ = batches

    @property
    def tells_inputs(self) -> bool:
        """Whether other inputs would be noticed, as far as two passes have shown."""
        if self._first is None or self.num_passes < 2:
            return True
        return bool(self._first.compared() - {0})  # targets come first

    @property
    def is_shared_out(self) -> bool:
        """Whether a sampler has given every rank its share already."""
        return any(share.is_shared_out for share in self._shares)

    def facts(self) -> dict[str, Any]:
        """Return what passes have found out, as plain numbers that ``restore`` takes."""
        return {
            "num_rows": self.num_rows,
            "num_targets": self.num_targets,
            "num_outputs": self.num_outputs,
            "num_passes": self.num_passes,
            "first": None if self._first is None else self._first.state(),
            "steps": sorted(self._steps),
            "kept_in": self._kept_in,
            "orders": self._orders(),
        }

    def restore(self, facts: dict[str, Any]) -> None:
        """Take over what passes of an earlier run have found out; its data must be these."""
        sources.restore(self._loader, facts["orders"])
        if self._read:
            return
        self.num_rows, self.num_targets = facts["num_rows"], facts["num_targets"]
        self.num_outputs, self.num_passes = facts["num_outputs"], facts["num_passes"]
        self._first = None if facts["first"] is None else Identity.of(facts["first"])
        if self._first and self.is_shared_out:  # batches, and so their padding, go by the ranks
            self._first.trust(rows=False)
        self._steps, self._kept_in = set(facts["steps"]), facts["kept_in"]
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

    def _finish_pass(self, rows: int, identity: Identity) -> None:
        self.num_passes += 1
        self._read = True
        if self._restored:
            refuse_other_checkpoint(rows, identity, self.num_rows, self._first)
            self._restored = False
        if self.num_rows is None:
            if rows == 0:
                raise ValueError(sources.EMPTY)
            self.num_rows, self._first = rows, identity
            if identity.in_order:
                identity.trust(rows=True)
        elif rows != self.num_rows:
            raise ValueError(
                f"The loader yielded {rows} rows in this pass but {self.num_rows} in the first. "
                "Every pass must see the same data: make the loader re-iterable and finite."
            )
        elif self._first is not None and not identity.agrees(self._first):
            warnings.warn(sources.changes_of(self._loader), stacklevel=2)
            self._first = self.kept = None
        elif self._first is not None and not self.is_shared_out:
            self._first.learn(identity, is_next=self.num_passes == 2)
