"""One checkpoint for several ranks: rank 0 writes and reads it, all go on from what it holds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.checkpoint.pass_log import PassLog, mark_of
from torch_lla_em.problem import DataSpread
from torch_lla_em.runtime import Group, first

_SMALL = 1 << 16
# what of a pass is no vector in weight space
_NO_VECTORS = {"loss", "facts", "count", "sums", "bytes"}


class SharedLog(PassLog):
    """A log of passes that belong to a group; their results are those of all ranks together.

    Nothing in it depends on how many ranks there were.
    """

    def __init__(self, folder: str | os.PathLike, header: dict[str, Any], group: Group):
        self._group, self.folder, self.position, self.writing = group, Path(folder), 0, True
        self.spread = DataSpread(group)
        """How vectors lie on ranks."""

        if group.rank == 0:
            super().__init__(folder, header)
        # where rank 0 cannot write, all have heard of it by now
        group.meet("the checkpoint", None, len)

    def recorded(self, key: Tensor, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the pass at this position from rank 0's file, or compute and write it."""
        own = self._group.rank == 0
        asked = self.asked = mark_of(key, self.spread.space)
        known = self._known(asked, torch.device("cpu")) if own else None
        there = self._group.meet("a recorded pass", known is not None, first)
        if there:
            entry = known or {}
        else:
            computed = compute()
            entry = self._whole(computed)
            if own:
                self._computed(asked, lambda: entry)
        self.position += not own
        return self._from_first(entry, key.device, self.spread) if there else computed

    def posterior(self, device: torch.device) -> dict[str, Tensor] | None:
        """Return the posterior of a finished run."""
        state = super().posterior(device) if self._group.rank == 0 else None
        if not self._group.meet("a finished run", state is not None, first):
            return None
        return self._from_first(state or {}, device, DataSpread(self._group))

    def finish(self, posterior: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Put the posterior, and what is known of its data, in the place of the passes."""
        if self._group.rank == 0:
            super().finish(posterior, facts)
        self._group.meet("the finished checkpoint", None, len)

    def _whole(self, entry: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return whole vectors where they are sliced, on rank 0's CPU alone."""
        if not self.spread.is_sliced:
            return entry
        whole = {}
        for name, tensor in entry.items():
            if name in _NO_VECTORS:
                whole[name] = tensor
                continue
            parts = map(self.spread.whole, self._parts(tensor))
            kept = [part.cpu() for part in parts if self._group.rank == 0]
            whole[name] = torch.cat(kept).view(*tensor.shape[:-1], -1) if kept else tensor
        return whole

    def _from_first(
        self, entry: dict[str, Tensor], device: torch.device, spread: DataSpread
    ) -> dict[str, Tensor]:
        """Return rank 0's tensors, or slices of them, large ones by way of the device."""
        small = {name: t.cpu() for name, t in entry.items() if t.nbytes <= _SMALL}
        large = {name: (t.shape, t.dtype) for name, t in entry.items() if t.nbytes > _SMALL}
        small, large = self._group.meet("a checkpoint", (small, large), first)
        received = {name: tensor.to(device) for name, tensor in small.items()}
        for name, tensor in received.items():
            received[name] = tensor if name in _NO_VECTORS else spread.own(tensor)
        for name, (shape, dtype) in large.items():
            held = entry[name] if entry else torch.empty(shape, dtype=dtype, device="meta")
            own = []
            for part in self._parts(held):
                part = part.to(device) if entry else torch.empty_like(part, device=device)
                part = self._group.from_first(part)
                own.append(part if name in _NO_VECTORS else spread.own(part))
            received[name] = torch.cat(own).view(*shape[:-1], -1)
        return received

    def _parts(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the rows of a tensor in as many parts as there are ranks."""
        rows = tensor.reshape(-1, tensor.shape[-1])
        return rows.split(-(-len(rows) // self._group.size))
