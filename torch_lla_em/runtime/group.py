"""Collectives of the ranks of a fit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

Own = TypeVar("Own")
Merged = TypeVar("Merged")


class Fault(NamedTuple):
    """The message that a failed rank sends instead of a value."""

    words: str


class Group:
    """The default process group of ``torch.distributed``, or this process alone.

    Alone, every collective returns what it was given.
    """

    rank, size = 0, 1
    _is_shared = False

    def __init__(self, is_shared: bool = False) -> None:
        if is_shared:
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self._is_shared = True

    def meet(self, value: Own, merge: Callable[[list[Own]], Merged]) -> Merged:
        """Gather a picklable value of every rank and return ``merge`` of their list. An error in
        ``merge`` is raised on all ranks."""
        every = [value] * self.size
        if self._is_shared:
            dist.all_gather_object(every, value)
        for rank, one in enumerate(every):
            if isinstance(one, Fault):
                raise RuntimeError(
                    f"Rank {rank} failed, so the other ranks cannot continue. {one.words}"
                )
        return merge(every)

    def agree(self, act: Callable[[], Own]) -> Own:
        """Return this rank's ``act()``; an error on one rank is raised on all of them."""
        try:
            value = act()
        except Exception as error:
            self.fail(error)
            raise
        self.meet(None, len)
        return value

    def fail(self, error: Exception) -> None:
        """Make the other ranks raise an error at their next collective, because this rank has
        failed."""
        fault = Fault(f"{type(error).__name__}: {error}")
        with suppress(RuntimeError):  # others may have died, but this rank's own error is raised
            if self._is_shared:
                every: list[Any] = [None] * self.size
                dist.all_gather_object(every, fault)

    def sum(self, total: Tensor) -> Tensor:
        """Return the sum over ranks, in place and bitwise the same on every rank."""
        if self._is_shared:
            total = total.contiguous()
            dist.all_reduce(total)
        return total

    def gather(self, rows: Tensor) -> Tensor:
        """Concatenate the rows (m, ...) of all ranks in order, (Σ m, ...). A rank without rows may
        pass any shape and dtype."""
        if not self._is_shared:
            return rows
        forms = self.meet((len(rows), rows.shape[1:], rows.dtype), list)
        counts = [count for count, *_ in forms]
        _, rest, dtype = next((form for form in forms if form[0]), forms[0])
        padded = rows.new_zeros(max(counts), *rest, dtype=dtype)
        padded[: len(rows)] = rows.view(len(rows), *rest)
        every = padded.new_empty(self.size * len(padded), *rest)
        dist.all_gather_into_tensor(every, padded)
        if min(counts) == max(counts):
            return every
        return torch.cat(
            [part[:n] for part, n in zip(every.split(len(padded)), counts, strict=True)]
        )

    def from_first(self, tensor: Tensor) -> Tensor:
        """Return rank 0's tensor, of the same shape on every rank."""
        if self._is_shared:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
            dist.broadcast(tensor, 0)
        return tensor


def group_of(shard: str | None = "data") -> Group:
    """Return the initialised process group, after a barrier, or this process alone if there is no
    group or ``shard`` is None."""
    if shard is None or not dist.is_available() or not dist.is_initialized():
        return Group()
    is_shared = dist.get_world_size() > 1
    if is_shared and dist.get_backend() == "gloo":
        # its error names a missing rank; without a timeout it would use that of gloo, not of the
        # group
        world: Any = dist.group.WORLD
        timeout = world._get_backend(torch.device("cpu")).options._timeout
        dist.monitored_barrier(timeout=timeout)
    return Group(is_shared)


def first(values: list[Own]) -> Own:
    """Return rank 0's value."""
    return values[0]
