"""Passes over the data, with a check that every pass sees the same examples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from itertools import chain, islice, repeat
from typing import Any

import torch

from torch_lla_em.data.batch import Batch, Tally, TargetFn, joined
from torch_lla_em.data.forms import Inputs, Loader, Weights
from torch_lla_em.data.identity import Identity
from torch_lla_em.data.source import Source
from torch_lla_em.data.trees import is_opaque, leaves_of, tensors_in
from torch_lla_em.runtime import Group

_OTHER_COUNT = (
    "The loader yielded {} examples in this pass but {} in the first. Every pass must see the same "
    "data: make the loader re-iterable and finite, or pass a list of its batches."
)
_CHANGED = (
    "Two passes over the loader returned different data, for example because of random "
    "augmentation, noise, or a sampler that draws other examples. The posterior needs the same "
    "data in every pass: pass a loader of the training data with the transforms of your test data, "
    "DataLoader(dataset_without_augmentation, batch_size=256). To let some examples count more "
    "than others, call fit(..., weights=...)."
)
_OTHER_RANKS = (
    "A rank has other data than rank 0, or the data change from pass to pass. Pass the same loader "
    "on every rank, in the same order and without random augmentation: fit distributes its "
    "batches. A DistributedSampler is allowed."
)
_OTHER_THAN_SAVED = (
    "The checkpoint belongs to other data: its fit read {} examples, and this loader yields {} "
    "examples with other content. Delete its folder, or pass another one."
)


class Data:
    """A loader whose passes see the same examples in a fixed order, each numbered by its place in
    it.

    Batches are (inputs, targets), longer tuples that end with the targets, mappings with "labels",
    or objects from which ``target_fn`` returns the targets. A ``DataLoader`` that shuffles is read
    in the order of its dataset. Each of R ranks takes every R-th batch. If a list has fewer than R
    batches, such as the tensors of ``fit(x, y)``, each rank takes every R-th example instead.
    """

    def __init__(
        self,
        loader: Inputs | Loader,
        device: torch.device,
        target_fn: TargetFn | None = None,
        group: Group = Group(),
        weights: Weights | None = None,
    ):
        self.source = Source(loader, device, target_fn, weights, group.size)
        self.group, self._device, self.is_weighted = group, device, weights is not None
        self.facts, self._is_restored, self.num_passes = Identity(), False, 0
        """Facts about the data of all ranks from the first pass; whether they were read by an
        earlier run only; and the number of passes."""

        self.keeps_order = True
        """Whether every pass so far had the same order."""

        self.num_steps: int | None = None
        """Number of batches per rank of the last pass in steps."""

        self._first: Batch | None = None
        self._others_wait = False
        """Whether the other ranks wait for this one at the end of the pass."""

        self.store(0.0, 0)

    def store(self, room: float, merge_rows: int) -> None:
        """Set how many bytes of batches are kept, and up to which size small batches are joined; 0
        switches either off."""
        self.room, self.merge_rows, self._may_keep = room, merge_rows, False
        self.kept: list[Batch] | None = None
        """All batches, once a pass has kept them on the device: they fit, and are the same in every
        pass."""

    def first(self) -> Batch:
        """Return the first batch, or small ones joined to it, with two examples if there are
        two."""
        if self._first is None:
            for batch in islice(joined(self.source.read(0, 1), 2), 32):
                if self._first is None or len(batch.rows) > 1:
                    # others may write to the same memory again
                    self._first = batch if self.source.is_list else batch.copied()
                if len(batch.rows) > 1:
                    break
        if self._first is None:
            raise ValueError("The loader is empty: it yielded no examples.")
        return self._first.on(self._device)

    def batches(self, in_step: bool = False) -> Iterator[Batch]:
        """Yield this rank's batches of one pass.

        With ``in_step`` the batches of the loader are not joined, and every rank yields the same
        number of them: a rank with fewer batches yields empty ones at the end.
        """
        if self.kept is not None and not in_step:
            yield from self.kept
            self.num_passes += 1
            return
        # after the first pass each rank reads the share of another rank: if ranks have different
        # data, the sum of hashes changes
        share = (self.group.rank + (self.num_passes > 0)) % self.group.size
        whole, order = Identity(), self.num_passes if in_step else 0
        tally: Tally | None = None if self.num_passes else {}
        self._others_wait, kept = not in_step, list[Batch]()
        read = self._compared(self.source.read(share, self.group.size, order), whole)
        try:
            if in_step:
                yield from self._in_step(batch.on(self._device) for batch in read)
            else:
                for batch in self._keeping(joined(read, self.merge_rows), kept):
                    yield batch._replace(tally=tally)
        except Exception as error:
            self.fail(error)
            raise
        self._others_wait = False
        if tally:
            counts = zip(*tally.values(), strict=True)
            whole.num_outputs, whole.num_labelled = (int(sum(each)) for each in counts)
        self._end(self.group.meet(whole, Identity.of), tally is not None)
        if self._may_keep and not in_step:
            self.kept = kept

    __iter__ = batches

    def fail(self, error: Exception) -> None:
        """End the pass on the other ranks too, because this rank has failed."""
        if self._others_wait:
            self._others_wait = False
            self.group.fail(error)

    @property
    def largest_share(self) -> float:
        """The largest share of the examples that a rank has."""
        batches, size = self.source.num_batches(), self.group.size
        equal = self.source.by_examples or not batches
        return 1 / size if equal else -(-batches // size) / batches

    def state(self) -> dict[str, Any]:
        """Return the facts about the data as plain numbers, for ``restore``."""
        return {**asdict(self.facts), "num_passes": self.num_passes}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the facts of an earlier run; the data must be the same."""
        facts = dict(state)
        self.num_passes = facts.pop("num_passes")
        self.facts, self._is_restored = Identity(**facts), self.num_passes > 0

    def confirm(self) -> None:
        """Read the data once if only an earlier run has read them, to check that they are the
        same."""
        if self._is_restored:
            self.read()

    def read(self) -> Identity:
        """Read all examples once and return their identity. With several ranks, each reads another
        share than before."""
        for _ in self:
            pass
        return self.facts

    def _compared(self, batches: Iterable[Batch], whole: Identity) -> Iterator[Batch]:
        """Yield batches and add them to an identity. In the first pass, the first batch is compared
        with what ``first`` returned."""
        for batch in batches:
            whole.add(batch)
            begun = self._first
            if begun is not None and not self.num_passes and batch.index == begun.index == 0:
                first = Identity()
                first.add(begun)
                is_same = first.total == whole.total  # so far ``whole`` has only this batch
                if self.source.is_ordered and not is_same:
                    raise ValueError(_CHANGED)
                self._may_keep = self.group.size == 1 and is_same
            yield batch

    def _keeping(self, batches: Iterable[Batch], kept: list[Batch]) -> Iterator[Batch]:
        """Yield batches on the device, and add them to a list, which is empty once there is no room
        for all."""
        is_same = self.source.is_list or self.facts.num_rows > 0
        self._may_keep, left = self.group.size == 1 and is_same, self.room
        for batch in batches:
            batch = batch.on(self._device)
            tensors = batch.tensors()
            left -= sum(t.numel() * t.element_size() for t in tensors_in(tensors))
            has_objects = any(map(is_opaque, leaves_of(tensors)))  # their size is not known
            self._may_keep = self._may_keep and left > 0 and not has_objects
            if self._may_keep:  # others may write to the same memory again
                batch = batch if self.source.is_list else batch.copied()
                batch = batch._replace(is_kept=True)
                kept.append(batch)
            else:
                kept.clear()
            yield batch

    def _in_step(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the same number of batches on every rank, each with the number of examples of all
        ranks."""
        nothing, steps = torch.zeros(0, device="cpu"), 0
        for batch in chain(batches, repeat(Batch(-1, nothing.long(), None, nothing))):
            step_rows = self.group.meet(len(batch.rows), sum)
            if not step_rows:
                break
            yield batch._replace(step_rows=step_rows)
            steps += 1
        self.num_steps = steps

    def _end(self, whole: Identity, is_first: bool) -> None:
        """Store the facts of the first pass. Raise an error if the data differ from those of an
        earlier run or pass."""
        facts, fault = self.facts, None
        differ = self.num_passes > 0 and not facts.agrees(whole)
        if differ and self._is_restored:
            fault = _OTHER_THAN_SAVED.format(facts.num_rows, whole.num_rows)
        elif differ and self.group.size > 1:
            fault = _OTHER_RANKS
        elif not whole.num_rows or whole.num_rows != (facts.num_rows or whole.num_rows):
            fault = _OTHER_COUNT.format(whole.num_rows, facts.num_rows or "more")
        elif differ:
            fault = _CHANGED
        if fault is not None:
            raise ValueError(fault)
        self.keeps_order &= not self.num_passes or facts.ordered == whole.ordered
        if self._is_restored:
            outputs, labelled = facts.num_outputs, facts.num_labelled
            self.facts = replace(whole, num_outputs=outputs, num_labelled=labelled)
            self._is_restored = False
        elif is_first:
            self.facts = whole
        self.num_passes += 1
