"""Each rank's share of a loader: which batches it takes, and which rows of the data they are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torch.utils.data.distributed import DistributedSampler

from torch_lla_em.runtime import Group

Describe = Callable[[Any], dict[str, Any]]
Agrees = Callable[[dict[str, Any], dict[str, Any]], bool]

# what a loader was built with and keeps under the same name
_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
)


class Turn(NamedTuple):
    """What comes next in a pass: a batch of this rank, or rows that others take."""

    batch: Any = None
    """None where it is not this rank's, or where it need not be read at all."""

    taken: bool = True
    """Whether it is this rank's."""

    rows: Tensor | None = None
    """Row numbers within the loader, where they are not consecutive."""

    size: int | None = None
    """Rows, where they are known before the batch is read."""


class Marks(NamedTuple):
    """How to tell whether two ranks see the same data."""

    describe: Describe
    """A batch -> plain numbers."""

    agrees: Agrees


class Share:
    """One rank's turns at a loader, pass after pass.

    Of a plain loader, rank r of R takes the batches r, r + R, ...; where its rows can be
    listed beforehand, others are not loaded. A ``DistributedSampler`` has shared them out
    already: its rows are those of the dataset, and what it repeats to fill up is left out.
    """

    def __init__(self, loader: Iterable[Any], group: Group, marks: Marks):
        self._loader, self._group, self._marks = loader, group, marks
        self._checked = False
        self._lists: list[list[Any]] | None = None
        self._own: DataLoader | None = None
        sampler = _sampler(loader)
        self.is_shared_out = group.size > 1 and isinstance(sampler, DistributedSampler)
        """Whether a sampler has given every rank its share already."""

        if self.is_shared_out:
            _check_sampler(loader, sampler, group)
        if group.size > 1 and _lists_rows(loader):
            self._lists = []
            kept = {name: getattr(loader, name) for name in _KEPT if getattr(loader, name, None)}
            self._own = DataLoader(loader.dataset, batch_sampler=self._lists, **kept)

    @property
    def keeps_order(self) -> bool:
        """Whether batches come in the order of a list, or of the dataset."""
        if not _lists_rows(self._loader) or type(self._loader.batch_sampler) is not BatchSampler:
            return type(self._loader) in (list, tuple)
        return type(_sampler(self._loader)) is SequentialSampler

    def turns(self, whole: bool) -> Iterator[Turn]:
        """Yield the turns of one pass; ``whole``: this rank takes every batch."""
        if self._group.size == 1:
            yield from map(Turn, self._loader)
        elif self._lists is None:
            yield from self._by_reading(whole)
        elif self.is_shared_out:
            yield from self._shared_out()
        else:
            yield from self._by_listing(whole)

    def num_batches(self) -> int | None:
        """Return the batches of a pass over all ranks, if that is known without one."""
        try:
            return len(self._loader) * (self._group.size if self.is_shared_out else 1)
        except TypeError:
            return None

    def num_steps(self) -> int | None:
        """Return the batches of this process alone, where the loader cannot be wrong about them."""
        if self._group.size > 1:
            return None
        if not isinstance(self._loader, (list, tuple)):
            plain = _lists_rows(self._loader) and type(self._loader.batch_sampler) is BatchSampler
            if not plain or type(_sampler(self._loader)) not in (SequentialSampler, RandomSampler):
                return None
        return len(self._loader)

    def _by_reading(self, whole: bool) -> Iterator[Turn]:
        """Every rank reads everything and passes on what is not its own."""
        rank, size = self._group.rank, self._group.size
        for index, batch in enumerate(self._loader):
            if index == 0:
                self._compare(batch)
            yield Turn(batch, whole or index % size == rank)

    def _by_listing(self, whole: bool) -> Iterator[Turn]:
        rank, size = self._group.rank, self._group.size
        lists = self._listed()
        taken = [whole or index % size == rank for index in range(len(lists))]
        self._lists[:] = [rows for rows, own in zip(lists, taken) if own]
        batches = iter(self._own)
        for rows, own in zip(lists, taken):
            yield Turn(next(batches) if own else None, own, size=len(rows))

    def _shared_out(self) -> Iterator[Turn]:
        lists = list(self._loader.batch_sampler)
        self._compare_rows(lists[0] if lists else [])
        repeated = self._group.meet("the sampler's rows", lists, _repeated)[self._group.rank]
        places = count()
        kept = [[row for row in rows if next(places) not in repeated] for rows in lists]
        self._lists[:] = [rows for rows in kept if rows]
        for rows, batch in zip(list(self._lists), self._own):
            yield Turn(batch, rows=torch.tensor(rows), size=len(rows))
        yield Turn(taken=False, size=len(self._loader.dataset) - sum(map(len, self._lists)))

    def _listed(self) -> list[list[Any]]:
        """Return every batch's rows, as rank 0 draws them."""
        batch_sampler = self._loader.batch_sampler
        # a loader draws a seed for its workers first, so that one process has this order too
        torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
        lists = list(batch_sampler)
        order = type(_sampler(self._loader)) if type(batch_sampler) is BatchSampler else None
        if order is not SequentialSampler:
            same = None if order is RandomSampler or self._checked else _digest(lists)
            told = None if self._group.rank else lists, same
            lists = self._group.meet("the order of rows", told, _first_order)
        self._compare_rows(lists[0] if lists else [])
        return lists

    def _compare_rows(self, rows: list[Any]) -> None:
        """Compare the datasets of all ranks by their lengths and one batch of rank 0's."""
        if self._checked:
            return
        dataset = self._loader.dataset
        rows = self._group.meet("data", (len(dataset), rows), _first_rows)
        if rows:
            self._compare(self._loader.collate_fn([dataset[row] for row in rows]))

    def _compare(self, batch: Any) -> None:
        """Refuse ranks whose first batch is not rank 0's."""
        if self._checked:
            return
        self._checked = True

        def merge(values: list[Any]) -> None:
            for rank, value in enumerate(values):
                if not self._marks.agrees(value, values[0]):
                    raise ValueError(_other_data(rank, "one first batch", "another"))

        self._group.meet("the first batch", self._marks.describe(batch), merge)


def _other_data(rank: int, own: str, others: str) -> str:
    return (
        f"Rank {rank} sees other data than rank 0 ({own} against {others}). Pass every rank the "
        "same loader, in the same order and without random augmentation: fit shares it out. Or "
        "give it a DistributedSampler."
    )


def _sampler(loader: Any) -> Any:
    """Return the sampler below a loader's batches."""
    if not isinstance(loader, DataLoader):
        return None
    if loader.batch_sampler is None:
        return loader.sampler
    return getattr(loader.batch_sampler, "sampler", None)


def _check_sampler(loader: DataLoader, sampler: DistributedSampler, group: Group) -> None:
    if not _lists_rows(loader):
        raise ValueError(
            "The loader has a DistributedSampler, but makes its batches in its own way, so that "
            "rows which the sampler repeats cannot be left out: pass a DataLoader of rows with a "
            "batch_size, or one without a DistributedSampler."
        )
    if (sampler.num_replicas, sampler.rank) != (group.size, group.rank):
        raise ValueError(
            f"The DistributedSampler is of rank {sampler.rank} of {sampler.num_replicas}, but this "
            f"is rank {group.rank} of {group.size}: build it after init_process_group, without "
            "num_replicas and rank."
        )


def _lists_rows(loader: Any) -> bool:
    """Whether a loader's batches can be listed, and some of them loaded without the others."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
    )


def _first_order(values: list[tuple[list[list[Any]], str | None]]) -> list[list[Any]]:
    for rank, (_, digest) in enumerate(values):
        if digest != values[0][1]:
            raise ValueError(
                f"The loader gives rank {rank} other rows than rank 0, and not by a "
                "DistributedSampler: pass every rank the same loader, or one with a "
                "torch.utils.data.DistributedSampler."
            )
    return values[0][0]


def _first_rows(values: list[tuple[int, list[Any]]]) -> list[Any]:
    for rank, (length, _) in enumerate(values):
        if length != values[0][0]:
            raise ValueError(_other_data(rank, f"{length} rows", str(values[0][0])))
    return values[0][1]


def _repeated(every: list[list[list[int]]]) -> list[set[int]]:
    """Return, for each rank, the places in its order that repeat a row taken before."""
    orders = [[row for batch in lists for row in batch] for lists in every]
    seen: set[int] = set()
    repeated: list[set[int]] = [set() for _ in orders]
    for place in range(max(map(len, orders))):
        for rank, order in enumerate(orders):
            if place < len(order):
                if order[place] in seen:
                    repeated[rank].add(place)
                seen.add(order[place])
    return repeated


def _digest(lists: list[list[Any]]) -> str:
    """Return a mark of which rows there are, in whatever order."""
    rows = sorted(str(row) for batch in lists for row in batch)
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()
