"""Reads a loader as batches with numbered examples, and joins small batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.data.batch import (
    Batch,
    TargetFn,
    as_targets,
    check_rows,
    default_targets,
    inputs_of,
)
from torch_lla_em.data.identity import Identity
from torch_lla_em.data.sources import Source, as_loader
from torch_lla_em.data.trees import map_tensors, row_form, tensors_in, to_device
from torch_lla_em.data.weights import Weights, checked_weights, without_weights

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
# number of batches that are read to find one with two examples or more
_BATCHES_AHEAD = 32


class Reader:
    """Batches of a loader with numbered examples; each of several ranks reads its share."""

    def __init__(
        self,
        loader: Any,
        device: torch.device,
        target_fn: TargetFn | None = None,
        num_ranks: int = 1,
        weights: Weights | None = None,
    ):
        self._weights = weights
        self.source = Source(as_loader(loader, target_fn), num_ranks)
        self._device, self._target_fn, self._num_ranks = device, target_fn, num_ranks
        self._ahead: list[Batch] = []
        """The first batches, if they have been looked at before a pass."""

        self._rest: Iterator[Batch] | None = None
        """The batches after them, with which the next pass continues."""

        self.num_read = 0
        """Number of batches that were read in the last pass."""

    def first(self) -> Batch | None:
        """Return the first batch of two examples or more, or small batches joined to one.

        The next pass of a single process continues after these batches, so that the loader and its
        workers are started only once.
        """
        if not self._ahead:
            self._rest = self.batches(0, 1)
            for batch in islice(self._rest, _BATCHES_AHEAD):
                # others may write to the same memory again
                self._ahead.append(batch if self.source.is_list else batch.copied())
                if len(batch.rows) > 1:
                    break
        several = (batch for batch in joined(self._ahead, 2) if len(batch.rows) > 1)
        return next(several, self._ahead[0] if self._ahead else None)

    def changes(self) -> bool:
        """Whether the first batch has other content when it is read again, although its order is fixed."""
        if self.source.is_list or not self.source.keeps_order or not self._ahead:
            return False
        if getattr(self.source.loader, "persistent_workers", False):
            self._rest = None  # it would go on with the workers that start anew here
        each = [Identity(same_batches=True) for _ in range(2)]
        for identity, batch in zip(each, (self._ahead[0], next(self.batches(0, 1)))):
            identity.add(tuple(batch.tensors().values()))
        return not each[0].agrees(each[1])

    def begin(self, share: int, seed: int | None) -> Iterable[Batch]:
        """Return the batches of a pass, of which the first may have been looked at."""
        rest, self._rest = self._rest, None
        if self._num_ranks == 1 and rest is not None:
            return chain(tuple(self._ahead), rest)
        return self.batches(share, self._num_ranks, seed)

    def batches(self, first: int, step: int, seed: int | None = None) -> Iterator[Batch]:
        """Yield every ``step``-th batch of the loader; ``seed`` selects another order of examples."""
        self.num_read = seen = 0
        workers = [Identity() for _ in range(self.source.num_workers)]
        for place, numbers, raw in self.source.batches(first, step, seed):
            is_others = numbers is None and place % step != first  # another rank's
            if is_others and not self.source.by_examples:
                raw, _ = without_weights(raw, self._weights)
                seen += len((self._target_fn or default_targets)(raw))
                continue
            inputs, targets, weights = self._split(raw)
            size = check_rows(inputs, targets, place)
            if not size:
                continue
            if numbers is None:
                numbers = torch.arange(seen, seen + size, device="cpu")
            elif len(numbers) != size:
                raise ValueError(_OTHER_SIZE.format(place, size, len(numbers)))
            seen, self.num_read = seen + size, self.num_read + 1
            if len(workers) > 1:
                workers[place % len(workers)].add((targets, inputs))
            batch = Batch(place, numbers, inputs, targets, weights=weights)
            if self.source.by_examples and step > 1:
                can_be_cut = row_form(batch.tensors(), size) is not None
                if not can_be_cut and is_others:
                    continue
                batch = batch.part(slice(first, None, step)) if can_be_cut else batch
            if len(batch.rows):
                yield batch
        if len(workers) > 1 and all(w.num_rows and w.agrees(workers[0]) for w in workers):
            raise ValueError(_REPEATED.format(len(workers)))

    def _split(self, batch: Any) -> tuple[Any, Tensor, Tensor | None]:
        """Return inputs, targets and weights; moved to the device only if a ``target_fn`` is called."""
        batch, weights = without_weights(batch, self._weights)
        given = None
        if self._target_fn is None:
            batch = map_tensors(lambda tensor: tensor, batch)
            targets = as_targets(default_targets(batch))
        else:
            batch = to_device(batch, self._device)
            given = self._target_fn(batch)
            targets = as_targets(given)
        if callable(self._weights):  # which may index a tensor on the CPU
            weights = self._weights(targets if given is None else targets.cpu())
        inputs = inputs_of(batch, given)
        return inputs, targets, None if weights is None else checked_weights(weights, targets)


def joined(batches: Iterable[Batch], size: int) -> Iterator[Batch]:
    """Join small batches into batches of up to ``size`` examples.

    Only batches in which every tensor has a row for every example are joined.
    """
    waiting: list[Batch] = []
    key: Any = None
    for batch in batches:
        form = row_form(batch.tensors(), len(batch.rows))
        alone = form is None or len(batch.rows) >= size
        rows = sum(len(other.rows) for other in waiting) + len(batch.rows)
        if waiting and (alone or form != key or rows > size):
            yield _concatenated(waiting)
            waiting = []
        if alone:
            yield batch
            continue
        key = form
        # a loader may overwrite the memory of a batch before the batch is used
        waiting.append(batch.copied())
    if waiting:
        yield _concatenated(waiting)


def _concatenated(batches: list[Batch]) -> Batch:
    """Concatenate batches of the same format."""
    first, last = batches[0], batches[-1]
    if first is last:
        return first
    columns = [tensors_in(batch.tensors()) for batch in batches]
    whole = iter([torch.cat(column) for column in zip(*columns)])
    tensors = map_tensors(lambda _: next(whole), first.tensors())
    rows = torch.cat([batch.rows for batch in batches])
    return Batch(f"{first.index} to {last.index}", rows, **tensors)
