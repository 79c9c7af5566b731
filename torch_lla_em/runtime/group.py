"""The ranks of a process group: sums over them, and an end for all where one fails.

Tensors go through ``torch.distributed`` as it is. Beside it, ranks meet: each tells rank 0
where it is and how it fares, in JSON, and rank 0 tells all. Every collective begins with a
meeting, so that a rank that raises, dies or has gone another way is named by all.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

Merge = Callable[[list[Any]], Any]

_DEFAULT_TIMEOUT = timedelta(minutes=30)
_HEAD = 1024


class RankError(RuntimeError):
    """A rank has failed, died, or gone another way than the others: the fit ends on all."""


class _Channels(NamedTuple):
    """Process groups for small messages; a broken one does not take the other with it."""

    up: Any
    down: Any
    timeout: timedelta


class Group:
    """This process alone; every collective returns what it was given."""

    rank, size = 0, 1

    def meet(self, subject: str, value: Any, merge: Merge) -> Any:
        """Return ``merge`` of the values of all ranks, which are what JSON holds.

        Every rank merges the same values, so what it raises, all raise.
        """
        return merge([value])

    def sum(self, total: Tensor) -> Tensor:
        """Return the sum over ranks, in place and with the same bits on every rank."""
        return total

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows (m, ...) of all ranks, in their order, shape (Σ m, ...)."""
        return rows

    def scatter_sum(self, total: Tensor) -> Tensor:
        """Return this rank's part (1, ...) of the sum of (R, ...) over ranks."""
        return total

    def from_first(self, tensor: Tensor) -> Tensor:
        """Return rank 0's tensor, of the same shape on every rank."""
        return tensor

    @contextmanager
    def joined(self) -> Iterator[Group]:
        """Tell the others of any error inside, so that all end."""
        yield self


class ProcessGroup(Group):
    """The default group of ``torch.distributed``."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._channels = _open_channels(dist.group.WORLD)

    def meet(self, subject: str, value: Any, merge: Merge) -> Any:
        """Return ``merge`` of the values of all ranks."""
        words = self._meet(["well", subject, value])
        try:
            return merge([value for _, _, value in words])
        except ValueError:
            raise
        except Exception as error:  # of rank 0's, whose values they all are
            fault = f"Rank 0 of {self.size} failed: {type(error).__name__}: {error}"
            raise RankError(fault) from error

    def sum(self, total: Tensor) -> Tensor:
        """Return the sum over ranks, with the same bits on every rank."""
        total = total.contiguous()
        self._collect("a sum", total, lambda: dist.all_reduce(total))
        return total

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows (m, ...) of all ranks, in their order, shape (Σ m, ...)."""
        shapes = self.meet("rows to gather", tuple(rows.shape), list)
        counts, rest = [shape[0] for shape in shapes], next((s[1:] for s in shapes if s[0]), ())
        most = max(counts)
        padded = rows.new_zeros(most, *rest)
        padded[: len(rows)] = rows.view(len(rows), *rest)
        every = rows.new_empty(self.size * most, *rest)
        self._collect("rows", padded, lambda: dist.all_gather_into_tensor(every, padded))
        if min(counts) == most:
            return every
        return torch.cat([part[:count] for part, count in zip(every.split(most), counts)])

    def scatter_sum(self, total: Tensor) -> Tensor:
        """Return this rank's part (1, ...) of the sum of (R, ...) over ranks."""
        own = torch.empty_like(total[:1])
        self._collect("a scattered sum", total, lambda: dist.reduce_scatter_tensor(own, total))
        return own

    def from_first(self, tensor: Tensor) -> Tensor:
        """Return rank 0's tensor, of the same shape on every rank."""
        tensor = tensor.clone()
        self._collect("rank 0's tensor", tensor, lambda: dist.broadcast(tensor, 0))
        return tensor

    @contextmanager
    def joined(self) -> Iterator[Group]:
        """Tell the others of any error inside, so that all end."""
        try:
            yield self
            self.meet("the end", None, len)
        except RankError:
            raise
        except BaseException as error:
            with suppress(Exception):  # nobody may be left to be told
                self._meet(["failed", f"{type(error).__name__}: {error}", None])
            raise

    def _collect(self, subject: str, tensor: Tensor, run: Callable[[], Any]) -> None:
        self.meet(f"{subject} of shape {tuple(tensor.shape)}", None, len)
        try:
            run()
        except RuntimeError as error:
            self._meet(["failed", f"{type(error).__name__}: {error}", None])
            raise

    def _meet(self, word: list[Any]) -> list[list[Any]]:
        """Return what all ranks say; raise where one has failed, is gone or elsewhere."""
        up, down, timeout = self._channels
        if self.rank:
            with suppress(RuntimeError):  # rank 0 may have given up waiting, and still answer
                _send(word, 0, up, timeout)
            try:
                # rank 0 may itself wait for somebody that long, from later on
                words, gone = _receive(0, down, 2 * timeout)
            except RuntimeError as error:
                raise RankError(_gone(0, self.size, error)) from error
        else:
            words, gone = self._gathered(word)
        fault = gone or _fault(words)
        if fault:
            raise RankError(fault)
        return words

    def _gathered(self, word: list[Any]) -> tuple[list[list[Any]], str | None]:
        """Hear all ranks, and tell them what all have said, or who is gone."""
        up, down, timeout = self._channels
        words, gone = json.loads(json.dumps([word])), {}
        for rank in range(1, self.size):
            try:
                words.append(_receive(rank, up, timeout))
            except RuntimeError as error:
                gone[rank] = _gone(rank, self.size, error)
        # the first that was waited for in vain takes the connections of the others with it
        named = next(iter(gone), None)
        for rank in range(1, self.size):
            if rank != named:
                with suppress(RuntimeError):
                    _send([words, gone.get(named)], rank, down, timeout)
        return words, gone.get(named)


def current_group() -> Group:
    """Return the initialised process group of several ranks, or this process alone."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return ProcessGroup()
    return Group()


def group_of(shard: str | None) -> Group:
    """Return the ranks that fit together."""
    return Group() if shard is None else current_group()


def first(values: list[Any]) -> Any:
    """Return rank 0's value."""
    return values[0]


def _fault(words: list[list[Any]]) -> str | None:
    """Return what is wrong with what ranks say, if anything is."""
    count = len(words)
    failures = [
        f"Rank {r} of {count} failed: {w[1]}" for r, w in enumerate(words) if w[0] == "failed"
    ]
    if failures:
        return " ".join(failures)
    for rank, (_, subject, _) in enumerate(words):
        if subject != words[0][1]:
            return (
                f"Rank {rank} of {count} went another way than rank 0: it came with "
                f"{subject}, rank 0 with {words[0][1]}. Give all ranks the same model, loader and "
                "settings, on machines of one kind."
            )
    return None


def _gone(rank: int, size: int, error: RuntimeError) -> str:
    reason = str(error).split("] ", 1)[-1].split(". ")[0]
    return f"Rank {rank} of {size} is gone: it died, or hung beyond the group's timeout ({reason})."


@functools.lru_cache(maxsize=1)
def _open_channels(world: Any) -> _Channels:
    timeout = _DEFAULT_TIMEOUT
    with suppress(AttributeError, RuntimeError):  # not every backend tells
        timeout = world._get_backend(torch.device("cpu")).options._timeout
    first, second = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(2))
    return _Channels(first, second, timeout)


def _send(message: Any, rank: int, channel: Any, timeout: timedelta) -> None:
    """Send a message whose first part tells how long the rest is: mostly there is none."""
    body = json.dumps(message).encode()
    head = len(body).to_bytes(8, "big") + body[: _HEAD - 8]
    parts = [head.ljust(_HEAD, b"\0"), body[_HEAD - 8 :]]
    for part in filter(None, parts):
        tensor = torch.frombuffer(bytearray(part), dtype=torch.uint8)
        dist.isend(tensor, rank, group=channel).wait(timeout)


def _receive(rank: int, channel: Any, timeout: timedelta) -> Any:
    first = torch.zeros(_HEAD, dtype=torch.uint8, device="cpu")
    dist.irecv(first, rank, group=channel).wait(timeout)
    head = first.numpy().tobytes()
    length = int.from_bytes(head[:8], "big")
    rest = torch.zeros(max(0, length - _HEAD + 8), dtype=torch.uint8, device="cpu")
    if len(rest):
        dist.irecv(rest, rank, group=channel).wait(timeout)
    return json.loads((head[8:] + rest.numpy().tobytes())[:length])
