"""How a pass is spread over ranks: each takes some of the data, or some of the columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.jacobian import ParameterLayout
from torch_lla_em.runtime import Group
from torch_lla_em.solvers import Space

Run = Callable[[Tensor, bool], Tensor]
"""(w, whole) -> the sum over this rank's batches, or over all of them, shape (K, P)."""

DrawRun = Callable[[range, bool], tuple[Tensor, Tensor]]
"""(samples, whole) -> their η and the sum of their squares."""


class DataSpread:
    """Each rank takes its batches for all columns; one sum of the results ends a pass."""

    is_sliced = False
    """Whether a rank holds slices of vectors."""

    def __init__(self, group: Group):
        self.group = group
        self.space = Space(group) if self.is_sliced else Space()
        """What an inner product is of vectors that lie so."""

    def sweep(self, run: Run, w: Tensor) -> Tensor:
        """Return the result of a pass at w, shape (K, P), the same on every rank."""
        return self.group.sum(run(self.agreed(w), False))

    def draw(self, run: DrawRun, num_samples: int) -> tuple[Tensor, Tensor]:
        """Return η, shape (K, P), and the sum of squares, shape (P,)."""
        eta, squares = run(range(num_samples), False)
        return self.group.sum(eta), self.group.sum(squares)

    def sum(self, total: Tensor) -> Tensor:
        """Return the sum over ranks of vectors (K, P), or this rank's slice of it."""
        return self.group.sum(total)

    def columns_held(self, num_samples: int) -> int:
        """Return how many whole columns a rank holds in the place of K."""
        return num_samples

    def own(self, vectors: Tensor) -> Tensor:
        """Return what lies on this rank of vectors (..., P)."""
        return vectors

    def whole(self, vectors: Tensor) -> Tensor:
        """Return vectors (K, P) of what lies on this rank."""
        return vectors

    def layout(self, layout: ParameterLayout) -> ParameterLayout:
        """Return the layout of what lies on this rank."""
        return layout

    def assembled(self, posterior: Any) -> Any:
        """Return a posterior whose vectors are whole."""
        return posterior

    def agreed(self, w: Tensor) -> Tensor:
        """Return w, or rank 0's where another machine's rounding has led to other bits."""
        if self.group.size == 1:
            return w
        mark = w.double().sum().item(), w.double().norm().item()
        alike = self.group.meet(f"a pass at {tuple(w.shape)}", mark, _alike)
        return w if alike else self.group.from_first(w)


class ColumnSpread(DataSpread):
    """Each rank takes all batches for its columns; fewer columns than ranks spread over data."""

    def sweep(self, run: Run, w: Tensor) -> Tensor:
        """Return the result of a pass at w, shape (K, P), the same on every rank."""
        if len(w) < self.group.size:
            return super().sweep(run, w)
        start, stop = self._own(len(w))
        return self.group.gather(run(self.agreed(w)[start:stop], True))

    def draw(self, run: DrawRun, num_samples: int) -> tuple[Tensor, Tensor]:
        """Return η, shape (K, P), and the sum of squares, shape (P,)."""
        if num_samples < self.group.size:
            return super().draw(run, num_samples)
        eta, squares = run(range(*self._own(num_samples)), True)
        return self.group.gather(eta), self.group.sum(squares)

    def _own(self, columns: int) -> tuple[int, int]:
        """Return where this rank's columns begin and end."""
        rank, size = self.group.rank, self.group.size
        return columns * rank // size, columns * (rank + 1) // size


class WeightSpread(DataSpread):
    """Each rank keeps a slice of every vector, and takes its batches for whole columns.

    Columns are made whole 1 / R of them at a time, so that no rank ever holds more than
    vectors sliced over ranks take, at one pass over the data for each such chunk.
    """

    is_sliced = True

    def __init__(self, group: Group, size: int):
        super().__init__(group)
        self._size, self._width = size, -(-size // group.size)
        self._start = min(size, group.rank * self._width)
        self._stop = min(size, self._start + self._width)

    def sweep(self, run: Run, w: Tensor) -> Tensor:
        """Return this rank's slice of the result of a pass at w, shape (K, P / R)."""
        step = -(-len(w) // self.group.size)
        return torch.cat([self.sum(run(self.whole(chunk), False)) for chunk in w.split(step)])

    def draw(self, run: DrawRun, num_samples: int) -> tuple[Tensor, Tensor]:
        """Return this rank's slices of η and of the sum of squares."""
        step, parts, squares = -(-num_samples // self.group.size), [], 0
        for start in range(0, num_samples, step):
            eta, some = run(range(start, min(start + step, num_samples)), False)
            parts.append(self.sum(eta))
            squares = squares + self.sum(some[None])[0]
        return torch.cat(parts), squares

    def sum(self, total: Tensor) -> Tensor:
        """Return this rank's slice of the sum over ranks of vectors (K, P)."""
        padded = torch.nn.functional.pad(total, (0, self._width * self.group.size - self._size))
        parts = padded.view(len(total), self.group.size, self._width).transpose(0, 1)
        return self.group.scatter_sum(parts.contiguous())[0, :, : self._stop - self._start]

    def columns_held(self, num_samples: int) -> int:
        """Return how many whole columns a rank holds in the place of K."""
        return -(-num_samples // self.group.size)

    def own(self, vectors: Tensor) -> Tensor:
        """Return this rank's slice of vectors (..., P)."""
        return vectors[..., self._start : self._stop].clone()

    def whole(self, vectors: Tensor) -> Tensor:
        """Return vectors (K, P) of everybody's slices."""
        missing = self._width - vectors.shape[1]
        slices = self.group.gather(torch.nn.functional.pad(vectors, (0, missing))[None])
        return slices.transpose(0, 1).reshape(len(vectors), -1)[:, : self._size].contiguous()

    def layout(self, layout: ParameterLayout) -> ParameterLayout:
        """Return the layout of this rank's slice, whose blocks are parts of blocks."""
        shapes, begin = [], 0
        for size in layout.sizes:
            part = min(begin + size, self._stop) - max(begin, self._start)
            shapes.append(torch.Size([max(0, part)]))
            begin += size
        return ParameterLayout(layout.names, tuple(shapes))

    def assembled(self, posterior: Any) -> Any:
        """Return a posterior whose vectors are whole, without its noise."""
        return posterior._replace(
            noise=None,
            w_lin=self.whole(posterior.w_lin[None])[0],
            w_samples=self.whole(posterior.w_samples),
            scale=self.whole(posterior.scale[None])[0],
        )


def _alike(marks: list[tuple[float, float]]) -> bool:
    return all(repr(mark) == repr(marks[0]) for mark in marks)  # where NaN is NaN
