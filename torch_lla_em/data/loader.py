"""Batches of a loader in a fixed order, with a check that every pass sees the same examples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain, islice, repeat
from operator import length_hint
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from torch_lla_em.data.batch import (
    Batch,
    Tally,
    TargetFn,
    as_targets,
    default_targets,
    form_of,
    inputs_of,
    joined,
)
from torch_lla_em.data.forms import (
    Weights,
    are_batches,
    as_loader,
    checked_weights,
    order_of,
    without_weights,
)
from torch_lla_em.data.identity import Identity
from torch_lla_em.data.trees import as_tensors, is_opaque, leaves_of, tensors_in, to_device
from torch_lla_em.runtime import Group

_OTHER_COUNT = (
    "The loader yielded {} examples in this pass but {} in the first. Every pass must see the same "
    "data: make the loader re-iterable and finite, or pass a list of its batches."
)
_CHANGED = (
    "Two passes over the loader returned different data, for example because of random augmentation, noise, or a "
    "sampler that draws other examples. The posterior needs the same data in every pass: pass a loader of the training "
    "data with the transforms of your test data, DataLoader(dataset_without_augmentation, batch_size=256). To let some "
    "examples count more than others, call fit(..., weights=...)."
)
_OTHER_RANKS = (
    "A rank has other data than rank 0, or the data change from pass to pass. Pass the same loader on every rank, in the "
    "same order and without random augmentation: fit distributes its batches. A DistributedSampler is allowed."
)
_OTHER_THAN_SAVED = (
    "The checkpoint belongs to other data: its fit read {} examples, and this loader yields {} "
    "examples with other content. Delete its folder, or pass another one."
)
# arguments of a DataLoader that it stores as attributes of the same name
_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "prefetch_factor", "persistent_workers", "pin_memory_device"),
)


def inputs_in_order(data: Any) -> Any:
    """Return a loader of batches that may have no targets; one that shuffles is read in the order of its dataset.

    Two arrays of one form in a list are two batches; otherwise a pair of arrays is (X, y).
    """
    return data if are_batches(data) else Data(data, torch.device("cpu")).loader


class Data:
    """A loader whose passes see the same examples in a fixed order, each numbered by its place in it.

    Batches are (inputs, targets), longer tuples that end with the targets, mappings with "labels", or anything that
    ``target_fn`` takes targets from. A ``DataLoader`` that shuffles is read in the order of its dataset. Each of R ranks
    takes every R-th batch; of a list of fewer batches, such as the tensors of ``fit(x, y)``, every R-th example.
    """

    def __init__(
        self,
        loader: Any,
        device: torch.device,
        target_fn: TargetFn | None = None,
        group: Group = Group(),
        weights: Weights | None = None,
    ):
        self.loader = loader = as_loader(loader, target_fn)
        self.group, self._device = group, device
        self._target_fn, self._weights, self.is_weighted = target_fn, weights, weights is not None
        self._is_list = type(loader) in (list, tuple)
        self._by_examples = self._is_list and len(loader) < group.size
        """Whether ranks share the examples of each batch, and not the batches."""

        self._order, self._shuffles = order_of(loader, group.size)
        """The examples of a dataset in the order of every pass, and whether SGD gets minibatches of them at random."""

        if self._order is not None:
            self._size, count = loader.batch_size or 1, len(self._order)
            self._num_rows = count - (count % self._size if loader.drop_last else 0)
            self._chosen: list[list[Any]] = []  # the batches of a pass
            options = {name: getattr(loader, name, None) for name in _OPTIONS}
            self.loader = DataLoader(
                loader.dataset,
                batch_sampler=self._chosen,
                generator=torch.Generator(device="cpu"),
                **{name: value for name, value in options.items() if value},
            )
            self._choose(0, 1)
        self.facts, self._is_restored, self.num_passes = Identity(), False, 0
        """What the first pass has found about the data of all ranks, and whether only an earlier run has read them."""

        self.keeps_order = True
        """Whether every pass so far had the same order."""

        self.num_steps: int | None = None
        """Number of batches per rank of the last pass in steps."""

        self._first: Batch | None = None
        self.room, self.merge_rows = 0.0, 0
        """Bytes in which batches may be kept, and the size up to which small ones are joined; 0: never."""

        self.cache: list[Batch] | None = None
        """All batches, once a pass has kept them."""

        self._may_keep = self._others_wait = False
        """Whether this pass keeps its batches: those of a list, or that are the same when they are read again; and
        whether the other ranks wait for this one at its end."""

    def store(self, room: float, merge_rows: int) -> None:
        """Set the bytes that batches may take to be kept, and the size up to which they are joined."""
        self.room, self.merge_rows = room, merge_rows

    def first(self) -> Batch:
        """Return the first batch, or small ones joined to it, with two examples if there are two."""
        if self._first is None:
            for batch in islice(joined(self._read(0, 1), 2), 32):
                if self._first is None or len(batch.rows) > 1:
                    # others may write to the same memory again
                    self._first = batch if self._is_list else batch.copied()
                if len(batch.rows) > 1:
                    break
        if self._first is None:
            raise ValueError("The loader is empty: it yielded no examples.")
        return self._first.on(self._device)

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
        own, kept = Identity(), list[Batch]()
        tally: Tally | None = None if self.num_passes else {}
        self._others_wait = not in_step
        read = self._compared(self._read(share, self.group.size, self.num_passes * in_step), own)
        try:
            if in_step:
                yield from self._in_step(batch.on(self._device) for batch in read)
            else:
                self._may_keep = self.group.size == 1 and (self._is_list or self.facts.num_rows > 0)
                yield from self._kept(joined(read, self.merge_rows), kept, tally)
        except Exception as error:
            self.fail(error)
            raise
        self._others_wait = False
        if tally:
            own.num_outputs, own.num_labelled = (int(sum(each)) for each in zip(*tally.values()))
        self._end(self.group.meet(own, Identity.of), tally is not None)
        if self._may_keep and not in_step:
            self.cache = kept

    __iter__ = batches

    def fail(self, error: Exception) -> None:
        """End a pass in which this rank has failed on the other ranks, too."""
        if self._others_wait:
            self._others_wait = False
            self.group.fail(error)

    def num_batches(self) -> int:
        """Return the number of batches of a pass over all ranks; 0 if it is not known without one."""
        return length_hint(self.loader) if self._order is None else -(-self._num_rows // self._size)

    @property
    def largest_share(self) -> float:
        """The largest share of the batches that a rank has."""
        batches, size = self.num_batches(), self.group.size
        return 1 / size if self._by_examples or not batches else -(-batches // size) / batches

    def state(self) -> dict[str, Any]:
        """Return what the passes have found as plain numbers, for ``restore``."""
        return {**asdict(self.facts), "num_passes": self.num_passes}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what an earlier run has found; the data must be the same."""
        found = dict(state)
        self.num_passes = found.pop("num_passes")
        self.facts, self._is_restored = Identity(**found), self.num_passes > 0

    def confirm(self) -> None:
        """Read the data once if only an earlier run has read them, to refuse other data."""
        if self._is_restored:
            self.read()

    def read(self) -> Identity:
        """Read all examples once, of several ranks another share than before; return their identity."""
        for _ in self:
            pass
        return self.facts

    def _read(self, first: int, step: int, seed: int = 0) -> Iterator[Batch]:
        """Yield every ``step``-th batch of the loader, with its examples' numbers."""
        seen, parts = 0, self._choose(first, step, seed)
        for count, raw in enumerate(self.loader):
            place = count if parts is None else first + count * step
            is_others = parts is None and count % step != first  # another rank's
            if is_others and not self._by_examples:
                if self._weights == "last":
                    raw, _ = without_weights(raw)
                seen += len((self._target_fn or default_targets)(raw))
                continue
            inputs, targets, weights = self._split(raw)
            if not targets.dim():
                raise TypeError(
                    f"Batch {place} of the loader is a single example: its targets are one number. Loaders yield batches: pass "
                    "DataLoader(dataset, batch_size=256), of a list of examples too, or tensors, fit(x, y)."
                )
            if isinstance(inputs, Tensor) and inputs.dim() and len(inputs) != len(targets):
                raise ValueError(
                    f"Batch {place} has {len(inputs)} inputs but {len(targets)} targets: every example needs one of each."
                )
            numbers = torch.arange(seen, seen + len(targets), device="cpu")
            seen += len(targets)
            if parts is not None and len(parts[count]) != len(numbers):
                raise ValueError(
                    f"Batch {place} has {len(numbers)} examples, but was collated from {len(parts[count])} of the "
                    "dataset: its collate_fn must keep their number. Pass a list of batches instead."
                )
            numbers = numbers if parts is None else parts[count]
            batch = Batch(place, numbers, inputs, targets, weights=weights)
            if self._by_examples and step > 1:
                can_be_cut = form_of(batch) is not None
                if not can_be_cut and is_others:
                    continue
                batch = batch.part(slice(first, None, step)) if can_be_cut else batch
            if len(batch.rows):
                yield batch

    def _choose(self, first: int, step: int, seed: int = 0) -> Sequence[Tensor] | None:
        """Choose every ``step``-th batch of a dataset from ``first`` on; return their examples' numbers.

        ``seed`` selects another order, if the loader shuffles. None: all examples of the loader in its order.
        """
        if self._order is None:
            return None
        numbers = torch.arange(self._num_rows, device="cpu")
        moved = bool(seed) and self._shuffles
        if moved:
            generator = torch.Generator(device="cpu").manual_seed(seed)
            numbers = torch.randperm(self._num_rows, generator=generator, device="cpu")
        parts = numbers.split(self._size)[first::step] if self._num_rows else ()
        self._chosen[:] = [[self._order[number] for number in part.tolist()] for part in parts]
        return parts if step > 1 or moved else None

    def _split(self, batch: Any) -> tuple[Any, Tensor, Tensor | None]:
        """Return inputs, targets and weights; moved to the device only if a ``target_fn`` is called."""
        given = weights = None
        if self._weights == "last":
            batch, weights = without_weights(batch)
        if self._target_fn is None:
            batch = as_tensors(batch)
            targets = as_targets(default_targets(batch))
        else:
            batch = to_device(batch, self._device)
            given = self._target_fn(batch)
            targets = as_targets(given)
        if callable(self._weights):  # which may index a tensor on the CPU
            weights = self._weights(targets if given is None else targets.cpu())
        inputs = inputs_of(batch, given)
        return inputs, targets, None if weights is None else checked_weights(weights, targets)

    def _compared(self, batches: Iterable[Batch], own: Identity) -> Iterator[Batch]:
        """Yield batches, and add them to an identity; in the first pass, compare the first with that of ``first``."""
        for batch in batches:
            own.add(batch)
            known = self._first
            if known is not None and not self.num_passes and batch.index == known.index == 0:
                first = Identity()
                first.add(known)
                is_same = first.total == own.total  # which has this batch alone yet
                if self._order is not None and not is_same:
                    raise ValueError(_CHANGED)
                self._may_keep = self.group.size == 1 and is_same
            yield batch

    def _kept(
        self, batches: Iterable[Batch], kept: list[Batch], tally: Tally | None
    ) -> Iterator[Batch]:
        """Yield batches on the device, and store them as long as they may be kept."""
        left = self.room
        for batch in batches:
            batch = batch.on(self._device)
            left -= sum(t.numel() * t.element_size() for t in tensors_in(batch.tensors()))
            has_objects = any(map(is_opaque, leaves_of(batch.tensors())))  # of unknown size
            self._may_keep = self._may_keep and left > 0 and not has_objects
            if self._may_keep:
                # a loader may write the next batch to the same memory
                batch = (batch if self._is_list else batch.copied())._replace(is_kept=True)
                kept.append(batch)
            else:
                kept.clear()
            yield batch._replace(tally=tally)

    def _in_step(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield as many batches on every rank, with the number of examples of all ranks."""
        nothing, steps = torch.zeros(0, device="cpu"), 0
        for batch in chain(batches, repeat(Batch(-1, nothing.long(), None, nothing))):
            step_rows = self.group.meet(len(batch.rows), sum)
            if not step_rows:
                break
            yield batch._replace(step_rows=step_rows)
            steps += 1
        self.num_steps = steps

    def _end(self, whole: Identity, is_first: bool) -> None:
        """Note what the first pass has found; refuse other data, and data that change."""
        known, fault = self.facts, None
        differ = self.num_passes > 0 and not known.agrees(whole)
        if differ and self._is_restored:
            fault = _OTHER_THAN_SAVED.format(known.num_rows, whole.num_rows)
        elif differ and self.group.size > 1:
            fault = _OTHER_RANKS
        elif not whole.num_rows or whole.num_rows != (known.num_rows or whole.num_rows):
            fault = _OTHER_COUNT.format(whole.num_rows, known.num_rows or "more")
        elif differ:
            fault = _CHANGED
        if fault is not None:
            raise ValueError(fault)
        self.keeps_order &= not self.num_passes or known.ordered == whole.ordered
        if self._is_restored:
            outputs, labelled = known.num_outputs, known.num_labelled
            self.facts = replace(whole, num_outputs=outputs, num_labelled=labelled)
            self._is_restored = False
        elif is_first:
            self.facts = whole
        self.num_passes += 1
