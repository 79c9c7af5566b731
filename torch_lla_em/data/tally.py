"""What the ranks have counted in a pass, and whether they read the same data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from torch_lla_em.data.identity import Identity

_COUNTS = "rows", "labelled", "targets", "outputs"


def labelled(targets: Tensor, mask: Callable[[Tensor], Tensor | None]) -> int:
    """Return how many rows have a target that is not ignored."""
    kept = mask(targets)
    if kept is None or not kept.dim():
        return len(targets)
    return int(kept.reshape(len(kept), -1).any(1).sum())


def other_data(rank: int, first: int, what: str) -> ValueError:
    """Return the error of a rank that reads other data than another."""
    return ValueError(
        f"Rank {rank} sees other data than rank {first}: {what}. Pass every rank the same loader, "
        "in the same order and without random augmentation: fit shares it out. Or give it a "
        "DistributedSampler."
    )


class Tally:
    """What a rank has counted in a pass."""

    def __init__(self) -> None:
        self.rows = self.labelled = self.targets = self.outputs = self.batches = self.turns = 0
        self.reached = 0
        """Rows that went by, whoever took them."""

        self.identity = Identity()
        self.parts: list[Identity] = []
        """Of every loader, where there are several."""

        self._beside: dict[str, Identity] = {}
        """Of what two ranks have read, by who took it and who else did."""

    def note(self, owner: int, reader: int, batch: Any, rows: Tensor) -> None:
        """Take in a batch that two ranks read."""
        pair = f"{owner} {reader}"
        self._beside.setdefault(pair, Identity()).add(batch, rows)

    def state(self) -> dict[str, Any]:
        """Return plain numbers."""
        beside = {key: identity.state() for key, identity in self._beside.items()}
        identity, parts = self.identity.state(), [part.state() for part in self.parts]
        counts = {name: getattr(self, name) for name in _COUNTS}
        return {
            **counts,
            "reached": self.reached,
            "identity": identity,
            "parts": parts,
            "beside": beside,
        }


def together(every: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what ranks that shared a pass have counted."""
    whole = Identity.of(every[0]["identity"])
    for rank, tally in enumerate(every[1:], 1):
        if tally["reached"] != every[0]["reached"]:
            raise ValueError(
                f"The loader of rank {rank} yielded {tally['reached']} rows, that of rank 0 "
                f"{every[0]['reached']}: every rank must be given the same data."
            )
        whole.merge(Identity.of(tally["identity"]))
    parts = list(map(Identity.of, every[0]["parts"]))
    for tally in every[1:]:
        for part, own in zip(parts, tally["parts"]):
            part.merge(Identity.of(own))
    read: dict[str, list[Any]] = {}
    for tally in every:
        for pair, state in tally["beside"].items():
            read.setdefault(pair, []).append(state)
    for pair, states in read.items():
        if len(states) < 2 or not _repeats(*states):
            first, rank = sorted(map(int, pair.split()))
            raise other_data(rank, first, "batches of other rows, or in another order")
    counts = {name: sum(tally[name] for tally in every) for name in _COUNTS}
    return {**counts, "identity": whole.state(), "parts": [part.state() for part in parts]}


def same(every: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what ranks that each took the whole pass have counted, if it is the same."""
    for rank, tally in enumerate(every):
        if tally["rows"] != every[0]["rows"]:
            raise other_data(rank, 0, f"{tally['rows']} rows against {every[0]['rows']}")
        if not _repeats(tally["identity"], every[0]["identity"]):
            raise other_data(rank, 0, "other rows, or in another order")
    return {key: every[0][key] for key in (*_COUNTS, "identity", "parts")}


def _repeats(state: dict[str, Any], other: dict[str, Any]) -> bool:
    return Identity.of(state).repeats(Identity.of(other))


def refuse_changed(parts: Sequence[Identity], known: Sequence[Identity]) -> None:
    """Raise where the data of an earlier fit, which are read again, are not what they were."""
    for now, before in zip(parts, known):
        if now.num_rows != before.num_rows or not now.agrees(before):
            raise ValueError(
                f"The data of an earlier fit have changed: it read {before.num_rows} examples, and "
                f"the same loader now yields {now.num_rows} of other content. With override=False "
                "the earlier data are read again, so do not refill their list or write to their "
                "tensors; or call fit once with one loader of all data."
            )


def refuse_other_checkpoint(
    rows: int, identity: Identity, known_rows: int | None, known: Identity | None
) -> None:
    """Raise where the checkpoint's passes went over other rows."""
    if rows != known_rows or (known and not identity.agrees(known)):
        order = " or order" if identity.in_order else ""
        cut = ", or batches cut and padded in another way" if identity.is_padded else ""
        raise ValueError(
            f"The checkpoint is of other data: it saw {known_rows} rows, and these are "
            f"{rows} rows of another content{order}{cut}. Delete its folder, or pass another."
        )
