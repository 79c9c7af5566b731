"""How a pass is spread over ranks: each takes some of the data."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_lla_em.problem.passes import (
    BLOCK,
    BY_COLUMN,
    VECTOR,
    Fold,
    Layer,
    Pass,
    Passes,
    Sums,
)
from torch_lla_em.problem.placement import Vectors
from torch_lla_em.runtime import Group


class DataSpread(Layer):
    """Each rank takes its batches for all columns; one sum of the results ends a pass."""

    def __init__(self, inner: Passes, group: Group):
        super().__init__(inner)
        self._group = group

    def around(self, fold: Fold, w: Tensor, task: Pass) -> Sums:
        """Return the sums over ranks, the same on each."""
        return {name: self._group.sum(own) for name, own in fold(self._agreed(w), task).items()}

    def _agreed(self, w: Tensor) -> Tensor:
        """Return w, or rank 0's where another machine's rounding has led to other bits."""
        if not w.is_floating_point():
            return w
        mark = [w.double().sum().item(), w.double().norm().item()]
        alike = self._group.meet(f"a pass at {tuple(w.shape)}", repr(mark), _alike)
        return w if alike else self._group.from_first(w)


class WeightSpread(Layer):
    """Each rank keeps a slice of every vector, and takes its batches for whole columns.

    Columns are made whole 1 / R of them at a time, so that no rank ever holds more than
    vectors sliced over ranks take, at one pass over the data for each such chunk.
    """

    def __init__(self, inner: Passes, vectors: Vectors, group: Group):
        super().__init__(inner)
        self._vectors, self._group = vectors, group

    def around(self, fold: Fold, w: Tensor, task: Pass) -> Sums:
        """Return this rank's slices of the sums."""
        parts: dict[str, list[Tensor]] = {name: [] for name in task.kinds}
        for chunk in w.split(-(-len(w) // self._group.size)):
            columns = self._vectors.whole(chunk) if w.is_floating_point() else chunk
            for name, own in fold(columns, task).items():
                parts[name].append(self._summed(own, task.kinds[name]))
        return {
            name: torch.cat(found) if task.kinds[name] in BY_COLUMN else torch.stack(found).sum(0)
            for name, found in parts.items()
        }

    def _summed(self, own: Tensor, kind: str) -> Tensor:
        if kind == BLOCK:
            return self._vectors.sum(own)
        return self._vectors.sum(own[None])[0] if kind == VECTOR else self._group.sum(own)


def _alike(marks: list[str]) -> bool:
    return len(set(marks)) == 1
