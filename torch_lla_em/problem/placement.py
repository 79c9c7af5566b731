"""Where vectors in weight space live: on the network's device or beside it, whole or in slices."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from torch_lla_em.jacobian import LinearModel, ParameterLayout
from torch_lla_em.problem.passes import BLOCK, OF_ROWS, Fold, Layer, Pass, Passes, Sums
from torch_lla_em.runtime import Group

logger = logging.getLogger("torch_lla_em")


class Vectors:
    """Makes vectors where they live, and tells which of their entries do so here."""

    def __init__(self, linear_model: LinearModel):
        self.whole_layout = linear_model.layout
        self.dtype = linear_model.dtype
        self.near = self.device = linear_model.network.device
        self.group: Group | None = None
        """The ranks that each hold a slice, if vectors are in slices."""

        self._pinned = torch.cuda.is_available()

    @property
    def _slice(self) -> tuple[int, int]:
        size = self.whole_layout.size
        if self.group is None:
            return 0, size
        start = min(size, self.group.rank * self._width)
        return start, min(size, start + self._width)

    @property
    def _width(self) -> int:
        # never of the same size on all ranks, so that shapes tell slices from all else
        return self.whole_layout.size // (1 if self.group is None else self.group.size) + 1

    @property
    def layout(self) -> ParameterLayout:
        """The random weights, or what of them lies on this rank: parts of blocks."""
        if self.group is None:
            return self.whole_layout
        (start, stop), shapes, begin = self._slice, [], 0
        for size in self.whole_layout.sizes:
            part = min(begin + size, stop) - max(begin, start)
            shapes.append(torch.Size([max(0, part)]))
            begin += size
        return ParameterLayout(self.whole_layout.names, tuple(shapes))

    def zeros(self, num_vectors: int) -> Tensor:
        """Return vectors (num_vectors, P), or this rank's slices of them."""
        size = self.layout.size
        return torch.zeros(num_vectors, size, dtype=self.dtype, device=self.device)

    def whole_zeros(self, num_vectors: int) -> Tensor:
        """Return whole vectors (num_vectors, P)."""
        shape = num_vectors, self.whole_layout.size
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def host_zeros(self, num_vectors: int) -> Tensor:
        """Return whole vectors beside a card: pinned, which copies fast, while there is any."""
        shape = num_vectors, self.whole_layout.size
        if self._pinned:
            try:
                return torch.zeros(shape, dtype=self.dtype, device="cpu", pin_memory=True)
            except RuntimeError as error:  # drivers have several words for it
                self._pinned = False
                what = str(error).split("\n")[0]
                logger.warning("Pinned memory ended, pageable memory is taken instead (%s).", what)
        return torch.zeros(shape, dtype=self.dtype, device="cpu")

    def own(self, vectors: Tensor) -> Tensor:
        """Return what lies on this rank of vectors (..., P)."""
        if self.group is None:
            return vectors
        start, stop = self._slice
        return vectors[..., start:stop].clone()

    def whole(self, vectors: Tensor) -> Tensor:
        """Return vectors (K, P) of everybody's slices."""
        if self.group is None:
            return vectors
        missing = self._width - vectors.shape[1]
        slices = self.group.gather(torch.nn.functional.pad(vectors, (0, missing))[None])
        rows = slices.transpose(0, 1).reshape(len(vectors), -1)
        return rows[:, : self.whole_layout.size].contiguous()

    def sum(self, total: Tensor) -> Tensor:
        """Return this rank's slice of the sum over ranks of vectors (K, P)."""
        group, size = self.group or Group(), self.whole_layout.size
        padded = torch.nn.functional.pad(total, (0, self._width * group.size - size))
        parts = padded.view(len(total), group.size, self._width).transpose(0, 1)
        start, stop = self._slice
        return group.scatter_sum(parts.contiguous())[0, :, : stop - start]


class Placed(Layer):
    """Vectors that live beside the network's device visit it, so many columns at a time."""

    def __init__(self, inner: Passes, vectors: Vectors, columns: int, group: Group):
        super().__init__(inner)
        self._vectors, self._columns, self._group = vectors, columns, group

    def around(self, fold: Fold, w: Tensor, task: Pass) -> Sums:
        """Return the sums where vectors live; each group of columns takes a pass."""
        home: Sums = {}
        for start in range(0, self._count(len(w)) * self._columns, self._columns):
            columns = slice(start, min(start + self._columns, len(w)))
            near = w[columns]
            if near.is_floating_point():
                near = near.to(self._vectors.near, copy=True)
            for name, own in fold(near, task).items():
                if task.kinds[name] == OF_ROWS:
                    own = own.to(self._vectors.device)
                    home[name] = torch.cat([home[name], own]) if name in home else own
                elif task.kinds[name] == BLOCK:
                    if name not in home:
                        home[name] = self._vectors.host_zeros(len(w))
                    home[name][columns] = own
                else:
                    own = own.to(self._vectors.device) if own.dim() else own
                    home[name] = home[name] + own if name in home else own
        return home

    def _count(self, columns: int) -> int:
        """Return the groups of columns: as many on every rank, the last of them empty perhaps."""
        return self._group.meet("groups of columns", -(-columns // self._columns), max)
