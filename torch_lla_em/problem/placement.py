"""Where vectors in parameter space are stored: on which device, and whole or in slices per rank."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from torch_lla_em.jacobian import LinearModel, ParameterLayout
from torch_lla_em.runtime import Group

logger = logging.getLogger("torch_lla_em")


class Vectors:
    """Creates vectors on the device that stores them, and selects the entries of this rank."""

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
        # slices differ in size between ranks, so that a shape shows whether a tensor is a slice
        return self.whole_layout.size // (1 if self.group is None else self.group.size) + 1

    @property
    def layout(self) -> ParameterLayout:
        """The parameters in the posterior, or the slices of blocks that are stored on this rank."""
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

    def home(self, count: int, size: int) -> Tensor:
        """Return an uninitialised block on the device of the vectors, in pinned memory if possible."""
        if self._pinned and self.device.type == "cpu":
            try:
                return torch.empty(count, size, dtype=self.dtype, device="cpu", pin_memory=True)
            except RuntimeError as error:  # drivers have several words for it
                self._pinned = False
                what = str(error).split("\n")[0]
                logger.warning("Out of pinned memory; using pageable memory instead (%s).", what)
        return torch.empty(count, size, dtype=self.dtype, device=self.device)

    def visiting(self, vectors: Tensor) -> Tensor:
        """Return whole vectors (K, P) on the device of the network."""
        vectors = self.whole(vectors)
        return vectors if self.device.type == self.near.type else vectors.to(self.near, copy=True)

    def own(self, vectors: Tensor) -> Tensor:
        """Return this rank's entries of vectors (..., P)."""
        if self.group is None:
            return vectors
        start, stop = self._slice
        return vectors[..., start:stop].clone()

    def whole(self, vectors: Tensor) -> Tensor:
        """Return whole vectors (K, P), gathered from the slices of all ranks."""
        if self.group is None:
            return vectors
        missing = self._width - vectors.shape[1]
        slices = self.group.gather(torch.nn.functional.pad(vectors, (0, missing))[None])
        rows = slices.transpose(0, 1).reshape(len(vectors), -1)
        return rows[:, : self.whole_layout.size].contiguous()

    def sum(self, total: Tensor) -> Tensor:
        """Return this rank's slice of the sum over ranks of vectors (K, P), or (P,)."""
        if total.dim() == 1:
            return self.sum(total[None])[0]
        group, size = self.group or Group(), self.whole_layout.size
        padded = torch.nn.functional.pad(total, (0, self._width * group.size - size))
        parts = padded.view(len(total), group.size, self._width).transpose(0, 1)
        start, stop = self._slice
        return group.scatter_sum(parts.contiguous())[0, :, : stop - start]
