"""Whether two passes over a loader see the same data, in whatever order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_lla_em.batches import map_tensors

_CHUNK = 1 << 16
# sums of float64 in another order agree to about 1e-13
_AGREEMENT = 1e-9


class Fingerprint:
    """Σ r and Σ r² over rows, for a number r that stands for everything in a row.

    The order of rows leaves both alone. The sum of squares notices rows that are mixed, the
    sum notices signs, and neither is blind to columns that change places. Tensors whose rows
    change their shape, as where every batch is padded to its own length, are left out.
    """

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}
        self._shapes: dict[int, torch.Size] = {}
        self._left_out: set[int] = set()

    def add(self, batch: Any) -> None:
        """Take in one batch."""
        position = 0

        def visit(tensor: Tensor) -> None:
            nonlocal position
            self._add(position, tensor.detach())
            position += 1

        map_tensors(visit, batch)

    def agrees(self, other: Fingerprint) -> bool:
        """Whether both may be of the same rows."""
        left_out = self._left_out | other._left_out
        for position in self._sums.keys() & other._sums.keys():
            if position in left_out or self._shapes[position] != other._shapes[position]:
                continue
            mine, others = self._sums[position].tolist(), other._sums[position].tolist()
            count, _, squares = mine
            if abs(squares - others[2]) > _AGREEMENT * squares:
                return False
            # by Cauchy and Schwarz no sum of |r| is larger
            if abs(mine[1] - others[1]) > _AGREEMENT * (count * squares) ** 0.5:
                return False
        return True

    def on_cpu(self) -> Fingerprint:
        """Return the same, with all sums on the CPU."""
        return Fingerprint.of(self.state())

    def merge(self, other: Fingerprint) -> None:
        """Take in the rows of another fingerprint, beside this one's own."""
        self._left_out |= other._left_out
        for position, sums in other._sums.items():
            shape = self._shapes.setdefault(position, other._shapes[position])
            if shape != other._shapes[position]:
                self._left_out.add(position)
            elif position in self._sums:
                self._sums[position] = self._sums[position] + sums
            else:
                self._sums[position] = sums

    def state(self) -> dict[str, Any]:
        """Return plain numbers that ``of`` restores."""
        return {
            "sums": {str(position): sums.tolist() for position, sums in self._sums.items()},
            "shapes": {str(position): list(shape) for position, shape in self._shapes.items()},
            "left_out": sorted(self._left_out),
        }

    @classmethod
    def of(cls, state: dict[str, Any]) -> Fingerprint:
        """Return the fingerprint of a state."""
        fingerprint = cls()
        for position, sums in state["sums"].items():
            fingerprint._sums[int(position)] = torch.tensor(sums, dtype=torch.float64)
        for position, shape in state["shapes"].items():
            fingerprint._shapes[int(position)] = torch.Size(shape)
        fingerprint._left_out = set(state["left_out"])
        return fingerprint

    def _add(self, position: int, tensor: Tensor) -> None:
        if not tensor.dim() or tensor.layout != torch.strided or not tensor.numel():
            self._left_out.add(position)
            return
        shape = self._shapes.setdefault(position, tensor.shape[1:])
        if shape != tensor.shape[1:]:
            self._left_out.add(position)
            return
        r = row_numbers(tensor)
        sums = torch.stack([torch.ones_like(r).sum(), r.sum(), r.square().sum()])
        self._sums[position] = self._sums[position] + sums if position in self._sums else sums


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
    columns = tensor.reshape(len(tensor), -1)
    total = torch.zeros(len(columns), dtype=torch.float64, device=tensor.device)
    for start in range(0, columns.shape[1], _CHUNK):
        chunk = columns[:, start : start + _CHUNK].double()
        places = torch.arange(start + 1, start + 1 + chunk.shape[1], device=tensor.device)
        total += chunk @ (places.double() * 0.618034).frac()
    return total
