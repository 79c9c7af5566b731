"""Each rank's share of a loader: which batches it takes, which rows they are, in what order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import chain, count
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
    """None where it need not be read."""

    taken: bool = True
    """Whether it is this rank's."""

    beside: bool = False
    """Whether it is read to be compared with what the rank before this one reads."""

    rows: Tensor | None = None
    """Row numbers within the loader, where they are not consecutive."""

    size: int | None = None
    """Rows, where they are known before the batch is read."""


class Share:
    """One rank's turns at a loader, pass after pass.

    Of a plain loader, rank r of R takes the batches r, r + R, ...; where its rows can be
    listed beforehand, others are not loaded. A ``DistributedSampler`` has shared them out
    already: its rows are those of the dataset, and what it repeats to fill up is left out.
    Where ranks are compared, each batch is read by the next rank too.
    """

    def __init__(self, loader: Any, group: Group):
        self._loader, self._group = loader, group
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
            return self.is_list
        return type(_sampler(self._loader)) is SequentialSampler

    @property
    def is_list(self) -> bool:
        """Whether all batches are in memory."""
        return type(self._loader) in (list, tuple)

    @property
    def num_workers(self) -> int:
        """Return how many workers each go over a dataset of their own, as far as torch knows."""
        own = isinstance(self._loader, DataLoader)
        return self._loader.num_workers if own and not _has_rows(self._loader) else 0

    def turns(self, compared: bool) -> Iterator[Turn]:
        """Yield the turns of one pass; ``compared``: with what is to be compared between ranks."""
        if self._group.size == 1:
            yield from map(Turn, self._loader)
        elif self.is_shared_out:
            yield from self._shared_out(compared)
        elif self._lists is not None:
            yield from self._by_listing(compared)
        else:  # every rank reads everything and passes on what is not its own
            for index, batch in enumerate(self._loader):
                yield self._turn(index % self._group.size, compared)._replace(batch=batch)

    def num_batches(self) -> int | None:
        """Return the batches of a pass over all ranks, if that is known without one."""
        try:
            return len(self._loader) * (self._group.size if self.is_shared_out else 1)
        except TypeError:
            return None

    def _turn(self, owner: int, compared: bool) -> Turn:
        """Return this rank's part in a batch of some rank."""
        rank, size = self._group.rank, self._group.size
        return Turn(taken=rank == owner, beside=compared and rank == (owner + 1) % size)

    def _by_listing(self, compared: bool) -> Iterator[Turn]:
        lists = self._listed(compared)
        turns = [self._turn(i % self._group.size, compared) for i in range(len(lists))]
        yield from self._loaded(turns, lists)

    def _shared_out(self, compared: bool) -> Iterator[Turn]:
        lists = [list(rows) for rows in self._loader.batch_sampler]
        total = len(self._loader.dataset)
        every = self._group.meet("the sampler's rows", [total, lists], _kept_once)
        turns = [self._turn(owner, compared) for owner, own in enumerate(every) for _ in own]
        read = list(chain.from_iterable(every))
        for turn, rows in zip(self._loaded(turns, read), read):
            yield turn._replace(rows=torch.tensor(rows, device="cpu"))
        yield Turn(taken=False, size=total - sum(map(len, read)))

    def _loaded(self, turns: list[Turn], lists: list[list[Any]]) -> Iterator[Turn]:
        """Yield these turns at batches of these rows, with those that this rank reads."""
        read = [turn.taken or turn.beside for turn in turns]
        self._lists[:] = [rows for rows, needed in zip(lists, read) if needed]
        batches = iter(self._own)
        for turn, rows, needed in zip(turns, lists, read):
            yield turn._replace(batch=next(batches) if needed else None, size=len(rows))

    def _listed(self, compared: bool) -> list[list[Any]]:
        """Return every batch's rows, as rank 0 draws them."""
        batch_sampler = self._loader.batch_sampler
        # a loader draws a seed for its workers first, so that one process has this order too
        own = self._loader.generator
        device = torch.get_default_device() if own is None else own.device
        torch.empty((), dtype=torch.int64, device=device).random_(generator=own)
        lists = [list(rows) for rows in batch_sampler]
        order = type(_sampler(self._loader)) if type(batch_sampler) is BatchSampler else None
        if order is SequentialSampler and not compared:
            return lists
        drawn = order in (SequentialSampler, RandomSampler)
        same = None if drawn or not compared else _digest(lists)
        told = [len(self._loader.dataset), same, [] if self._group.rank else lists]
        return self._group.meet("the order of rows", told, _first_order)


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
        and _has_rows(loader)
    )


def _has_rows(loader: DataLoader) -> bool:
    return not isinstance(loader.dataset, IterableDataset)


def _first_order(values: list[list[Any]]) -> list[list[Any]]:
    for rank, (length, digest, _) in enumerate(values):
        _same_length(rank, length, values[0][0])
        if digest != values[0][1]:
            raise ValueError(
                f"The loader gives rank {rank} other rows than rank 0, and not by a "
                "DistributedSampler: pass every rank the same loader, or one with a "
                "torch.utils.data.DistributedSampler."
            )
    return values[0][2]


def _same_length(rank: int, own: int, first: int) -> None:
    if own != first:
        raise other_data(rank, 0, f"{own} rows against {first}")


def _kept_once(values: list[list[Any]]) -> list[list[list[int]]]:
    """Return each rank's batches, without rows that another has taken before in its order."""
    for rank, (length, _) in enumerate(values):
        _same_length(rank, length, values[0][0])
    takers: dict[int, tuple[int, int]] = {}
    for rank, (_, lists) in enumerate(values):
        for place, row in enumerate(chain.from_iterable(lists)):
            takers[row] = min(takers.get(row, (place, rank)), (place, rank))
    every = []
    for rank, (_, lists) in enumerate(values):
        places = count()
        kept = [[row for row in rows if takers[row] == (next(places), rank)] for rows in lists]
        every.append([rows for rows in kept if rows])
    return every


def other_data(rank: int, first: int, what: str) -> ValueError:
    """Return the error of a rank that reads other data than another."""
    return ValueError(
        f"Rank {rank} sees other data than rank {first}: {what}. Pass every rank the same loader, "
        "in the same order and without random augmentation: fit shares it out. Or give it a "
        "DistributedSampler."
    )


def _digest(lists: list[list[Any]]) -> str:
    """Return a mark of which rows there are, in whatever order."""
    rows = sorted(str(row) for batch in lists for row in batch)
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()
