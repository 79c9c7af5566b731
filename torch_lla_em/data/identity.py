"""Whether two passes over a loader see the same data, in whatever order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_lla_em.data.contents import contents

_CHUNK = 1 << 16
# sums of float64 in another order agree to about 1e-13
_AGREEMENT = 1e-9


class Fingerprint:
    """Σ r, Σ r² and Σ c r over rows, for a number r that stands for everything in a row.

    The order of rows leaves the first two alone. The sum of squares notices rows that are mixed,
    the sum notices signs, and neither is blind to columns that change places. The third, whose
    factors c go by the place in the pass, tells a pass that repeats another.

    Passes are compared by tensors that have a row of one shape for every row of the data. Of
    others, as where every batch is padded to its own length, or of graphs, the sums change with
    the order: they are compared once it is known that they come again as they were.
    """

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}
        self._shapes: dict[int, dict[torch.Size, int]] = {}
        self._inside: set[int] = set()
        self._trusted: set[int] = set()

    def add(self, batch: Any, start: int = 0) -> None:
        """Take in one batch, which begins at this row of the pass."""
        for position, (tensor, is_row) in enumerate(contents(batch)):
            self._add(position, tensor, start)
            if not is_row:
                self._inside.add(position)

    def agrees(self, other: Fingerprint) -> bool:
        """Whether both may be of the same rows."""
        return all(self._same(p, other) for p in self._common(other) if self._compared(p, other))

    def matches(self, other: Fingerprint) -> bool:
        """Whether both may be of the same rows, with nothing left out for its shape."""
        return self._shapes == other._shapes and self.agrees(other)

    def repeats(self, other: Fingerprint) -> bool:
        """Whether both are of the same rows, in one order and in the same batches."""
        return self._shapes == other._shapes and all(
            self._same(p, other) and self._in_order(p, other) for p in self._sums
        )

    def learn(self, later: Fingerprint, is_next: bool) -> None:
        """Note which tensors a later pass, or the next, has shown to be the same every time.

        In passes after the next a loader that shuffles few rows might repeat the first by chance.
        """
        if is_next and later.repeats(self):
            self._trusted = set(self._sums)
        for p in self._common(later) - self._inside - later._inside:
            # padded otherwise, and yet the same: by zeros at the end
            if self._shapes[p] != later._shapes[p] and self._same(p, later):
                self._trusted.add(p)

    def trust(self, rows: bool) -> None:
        """Take the rows to be the same every time, or nothing."""
        self._trusted = self._sums.keys() - self._inside if rows else set()

    def compared(self) -> set[int]:
        """Return the places in a batch of the tensors that another pass is compared by."""
        return {p for p in self._sums if self._compared(p, self)}

    @property
    def is_padded(self) -> bool:
        """Whether rows of a tensor have several shapes."""
        return any(len(shapes) > 1 for shapes in self._shapes.values())

    def on_cpu(self) -> Fingerprint:
        """Return the same, with all sums on the CPU."""
        return Fingerprint.of(self.state())

    def merge(self, other: Fingerprint) -> None:
        """Take in the rows of another fingerprint, beside this one's own."""
        self._inside |= other._inside
        for position, sums in other._sums.items():
            self._sums[position] = self._sums[position] + sums if position in self._sums else sums
            shapes = self._shapes.setdefault(position, {})
            for shape, rows in other._shapes[position].items():
                shapes[shape] = shapes.get(shape, 0) + rows

    def state(self) -> dict[str, Any]:
        """Return plain numbers that ``of`` restores."""
        return {
            "sums": {str(position): sums.tolist() for position, sums in self._sums.items()},
            "shapes": {
                str(position): [[list(shape), rows] for shape, rows in shapes.items()]
                for position, shapes in self._shapes.items()
            },
            "inside": sorted(self._inside),
            "trusted": sorted(self._trusted),
        }

    @classmethod
    def of(cls, state: dict[str, Any]) -> Fingerprint:
        """Return the fingerprint of a state."""
        fingerprint = cls()
        for position, sums in state["sums"].items():
            fingerprint._sums[int(position)] = torch.tensor(sums, dtype=torch.float64)
        for position, shapes in state["shapes"].items():
            fingerprint._shapes[int(position)] = {torch.Size(shape): rows for shape, rows in shapes}
        fingerprint._inside, fingerprint._trusted = set(state["inside"]), set(state["trusted"])
        return fingerprint

    def _add(self, position: int, tensor: Tensor, start: int) -> None:
        shapes = self._shapes.setdefault(position, {})
        shapes[tensor.shape[1:]] = shapes.get(tensor.shape[1:], 0) + len(tensor)
        r = row_numbers(tensor)
        places = torch.arange(start + 1, start + 1 + len(r), device=r.device)
        c = (places.double() * 0.6180339887498949).frac()
        sums = torch.stack([r.sum(), r.square().sum(), r.dot(c)])
        self._sums[position] = self._sums[position] + sums if position in self._sums else sums

    def _common(self, other: Fingerprint) -> set[int]:
        return self._sums.keys() & other._sums.keys()

    def _compared(self, position: int, other: Fingerprint) -> bool:
        if position in self._trusted | other._trusted:
            return True
        shapes = self._shapes[position].keys() | other._shapes[position].keys()
        return len(shapes) == 1 and position not in self._inside | other._inside

    def _same(self, position: int, other: Fingerprint) -> bool:
        """Whether the sums agree that no order changes."""
        total, squares, _ = self._sums[position].tolist()
        others, others_squares, _ = other._sums[position].tolist()
        if abs(squares - others_squares) > _AGREEMENT * squares:
            return False
        return abs(total - others) <= _AGREEMENT * self._most(position)

    def _in_order(self, position: int, other: Fingerprint) -> bool:
        difference = self._sums[position][2] - other._sums[position][2]
        return abs(difference.item()) <= _AGREEMENT * self._most(position)

    def _most(self, position: int) -> float:
        """Return what no sum of |r| is larger than, by Cauchy and Schwarz."""
        count = sum(self._shapes[position].values())
        return (count * self._sums[position][1].item()) ** 0.5


class Tally:
    """What a rank has counted in a pass."""

    def __init__(self) -> None:
        self.rows = self.targets = self.outputs = 0
        self.reached = 0
        """Rows that went by, whoever took them."""

        self.fingerprint = Fingerprint()


def together(every: list[Tally]) -> Tally:
    """Return what ranks that shared a pass have counted."""
    total = every[0]
    for rank, tally in enumerate(every[1:], 1):
        if tally.reached != total.reached:
            raise ValueError(
                f"The loader of rank {rank} yielded {tally.reached} rows, that of rank 0 "
                f"{total.reached}: every rank must be given the same data."
            )
        total.rows, total.targets = total.rows + tally.rows, total.targets + tally.targets
        total.outputs += tally.outputs
        total.fingerprint.merge(tally.fingerprint)
    return total


def same(every: list[Tally]) -> Tally:
    """Return what ranks that each took the whole pass have counted, if it is the same."""
    for rank, tally in enumerate(every):
        if tally.rows != every[0].rows or not tally.fingerprint.agrees(every[0].fingerprint):
            raise ValueError(
                f"Rank {rank} saw other data than rank 0: every rank must be given the same."
            )
    return every[0]


def row_numbers(tensor: Tensor) -> Tensor:
    """Return a weighted sum of each row, (B,), no two of its weights alike."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    columns = tensor.reshape(len(tensor), tensor.shape[1:].numel())
    total = torch.zeros(len(columns), dtype=torch.float64, device=tensor.device)
    for start in range(0, columns.shape[1], _CHUNK):
        chunk = columns[:, start : start + _CHUNK].double()
        places = torch.arange(start + 1, start + 1 + chunk.shape[1], device=tensor.device)
        total += chunk @ (places.double() * 0.618034).frac()
    return total
