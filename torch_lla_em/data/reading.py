"""One pass over loaders: the batches of this rank, what it counts, and what ranks compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.data.batch import Batch, TargetFn, check_rows, copied, num_rows, split
from torch_lla_em.data.identity import Identity
from torch_lla_em.data.shares import Share, other_data
from torch_lla_em.runtime import Group

Mask = Callable[[Tensor], Tensor | None]

_COUNTS = "rows", "labelled", "targets", "outputs"
_REPEATED = (
    "Each of the {} workers of the DataLoader yields all examples of its IterableDataset, so that every "
    "example comes {} times: share them out by torch.utils.data.get_worker_info() in the dataset's "
    "__iter__, or pass num_workers=0."
)


class Reading:
    """The batches of one pass, some of which may be looked at before the pass goes over them."""

    def __init__(self, shares: Sequence[Share], device: torch.device, target_fn: TargetFn | None):
        self._shares = shares
        self._split = partial(split, target_fn=target_fn, device=device)
        self._num_rows = partial(num_rows, target_fn=target_fn)
        self.rows = self.labelled = self.targets = self.outputs = 0
        self.batches = self._reached = 0
        self.parts = [Identity(share.keeps_order) for share in shares]
        """The rows of every loader."""

        self._beside = Identity()
        """The rows that the rank before this one took, as this one has read them."""

        self.drawn: list[str] = []
        self.again: list[str] = []
        """Where the generators were before, and where they were put, if they were."""

        self._looked_at: list[tuple[int, Batch]] = []
        self._rest: Iterator[tuple[int, Batch]] = iter(())

    def begin(self, is_first: bool, group: Group) -> None:
        """Begin to read; in the first pass compare what ranks, or workers, yield."""
        self._rest = self._read(is_first and group.size > 1, is_first)

    def ahead(self) -> Iterator[tuple[int, Batch]]:
        """Yield batches, each with the number of its loader, that the pass goes over later."""
        yield from self._looked_at
        while True:
            if self._looked_at and not all(share.is_list for share in self._shares):
                # a loader may fill the same memory again
                part, last = self._looked_at[-1]
                inputs, targets = copied((last.inputs, last.targets))
                self._looked_at[-1] = part, last._replace(inputs=inputs, targets=targets)
            if (batch := next(self._rest, None)) is None:
                return
            self._looked_at.append(batch)
            yield batch

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        while self._looked_at:
            yield self._looked_at.pop(0)
        yield from self._rest

    def count(self, part: int, batch: Batch, compared: bool) -> None:
        """Count a batch of a loader, and take in its rows."""
        self.rows += len(batch.rows)
        self.targets += batch.targets.numel()
        if compared:
            self.parts[part].add((batch.targets, batch.inputs), batch.rows)

    def count_labels(self, targets: Tensor, mask: Mask) -> None:
        """Count the rows that have a target which is not ignored."""
        kept = mask(targets)
        if kept is None or not kept.dim():
            self.labelled += len(targets)
        else:
            self.labelled += int(kept.reshape(len(kept), -1).any(1).sum())

    def tally(self) -> dict[str, Any]:
        """Return what this rank has counted."""
        counts = {name: getattr(self, name) for name in _COUNTS}
        beside = self._beside.on_cpu()
        parts = [part.on_cpu() for part in self.parts]
        return {**counts, "reached": self._reached, "parts": parts, "beside": beside}

    def _read(self, compared: bool, workers: bool) -> Iterator[tuple[int, Batch]]:
        """Yield this rank's batches as they are."""
        index = -1
        for part, share in enumerate(self._shares):
            start = self._reached
            by_worker = [Identity() for _ in range(share.num_workers if workers else 0)]
            for number, turn in enumerate(share.turns(compared)):
                index += 1
                if not (turn.taken or turn.beside):
                    self._reached += self._num_rows(turn.batch) if turn.size is None else turn.size
                    continue
                inputs, targets = self._split(turn.batch)
                size = check_rows(inputs, targets, index, turn.size)
                rows = torch.arange(self._reached, self._reached + size, device="cpu")
                rows = rows if turn.rows is None else start + turn.rows
                self._reached += size
                if size and turn.beside:
                    self._beside.add((targets, inputs), rows)
                if size and len(by_worker) > 1:
                    by_worker[number % len(by_worker)].add((targets, inputs))
                if size and turn.taken:
                    self.batches += 1
                    yield part, Batch(index, rows, inputs, targets)
            if len(by_worker) > 1 and all(
                own.num_rows and own.has_rows_of(by_worker[0]) for own in by_worker
            ):
                raise ValueError(_REPEATED.format(len(by_worker), len(by_worker)))


def together(every: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what ranks that shared a pass have counted; raise where they read other data."""
    for rank, own in enumerate(every):
        if own["reached"] != every[0]["reached"]:
            raise ValueError(
                f"The loader of rank {rank} yielded {own['reached']} rows, that of rank 0 "
                f"{every[0]['reached']}: every rank must be given the same data."
            )
    for rank, own in enumerate(every):
        if own["beside"].num_rows and not own["beside"].repeats(whole(every[rank - 1]["parts"])):
            first, second = sorted((rank, (rank - 1) % len(every)))
            raise other_data(second, first, "batches of other rows, or in another order")
    parts = [whole(of_ranks) for of_ranks in zip(*(own["parts"] for own in every))]
    return {**{name: sum(own[name] for own in every) for name in _COUNTS}, "parts": parts}


def whole(parts: Sequence[Identity]) -> Identity:
    """Return the rows of all of them."""
    found = Identity(all(part.in_order for part in parts))
    for part in parts:
        found.merge(part)
    return found


def refuse_changed(parts: Sequence[Identity], known: Sequence[Identity]) -> None:
    """Raise where the data of an earlier fit, which are read again, are not what they were."""
    for now, before in zip(parts, known):
        if not now.agrees(before):
            raise ValueError(
                f"The data of an earlier fit have changed: it read {before.num_rows} examples, and "
                f"the same loader now yields {now.num_rows} of other content. With override=False "
                "the earlier data are read again, so do not refill their list or write to their "
                "tensors; or call fit once with one loader of all data."
            )


def refuse_other(now: Identity, known: Identity) -> None:
    """Raise where the data are not those of a checkpoint."""
    if not now.agrees(known):
        order = " or order" if now.in_order else ""
        cut = ", or batches cut and padded in another way" if now.is_padded else ""
        raise ValueError(
            f"The checkpoint is of other data: it saw {known.num_rows} rows, and these are "
            f"{now.num_rows} rows of another content{order}{cut}. Delete its folder, or pass another."
        )
