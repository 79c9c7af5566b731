"""One checkpoint for several ranks: rank 0 writes and reads it, all go on from what it holds."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.checkpoint.log import Log
from torch_lla_em.problem import Vectors
from torch_lla_em.runtime import Group, first

_SMALL = 1 << 16
# what of a pass is no vector in weight space
_NO_VECTORS = {"loss", "facts", "count", "sums", "bytes", "lasted", "f", "targets", "Jw"}


class SharedLog(Log):
    """A log of passes that belong to a group; their results are those of all ranks together.

    Nothing in it depends on how many ranks there were.
    """

    def __init__(self, folder: str | os.PathLike, header: dict[str, Any], group: Group):
        self._group, self.writes = group, group.rank == 0
        self.vectors: Vectors | None = None
        """How vectors lie on ranks; None: whole."""

        super().__init__(folder, header)
        # where rank 0 cannot write, all have heard of it by now
        group.meet("the checkpoint", None, len)

    def recorded(
        self, asked: Tensor, device: torch.device, compute: Callable[[], dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Return the entry at this position from rank 0's file, or compute and write it."""
        own, path = self._group.rank == 0, self.next_pass
        known = self._known(asked, "cpu") if own else None
        if self._group.meet("a recorded pass", known is not None, first):
            self.position += not own
            return self._from_first(known or {}, device, self.vectors)
        self.position += 1
        computed = compute()
        entry = self._whole(computed)
        if own:
            self._keep(entry, asked, path)
        return computed

    def posterior(self, device: torch.device) -> dict[str, Tensor] | None:
        """Return the posterior of a finished run."""
        state = super().posterior(device) if self._group.rank == 0 else None
        if not self._group.meet("a finished run", state is not None, first):
            return None
        return self._from_first(state or {}, device, None)

    def finish(self, posterior: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Put the posterior, and what is known of its data, in the place of the passes."""
        if self._group.rank == 0:
            super().finish(posterior, facts)
        self._group.meet("the finished checkpoint", None, len)

    def _whole(self, entry: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return whole vectors where they are sliced, on rank 0's CPU alone."""
        if self.vectors is None:
            return entry
        whole = {}
        for name, tensor in entry.items():
            if name in _NO_VECTORS:
                whole[name] = tensor
                continue
            parts = map(self.vectors.whole, self._parts(tensor))
            kept = [part.cpu() for part in parts if self._group.rank == 0]
            whole[name] = torch.cat(kept).view(*tensor.shape[:-1], -1) if kept else tensor
        return whole

    def _from_first(
        self, entry: dict[str, Tensor], device: torch.device, vectors: Vectors | None
    ) -> dict[str, Tensor]:
        """Return rank 0's tensors, or slices of them, by way of the device."""
        told = [(name, list(t.shape), str(t.dtype).split(".")[1]) for name, t in entry.items()]
        received = {}
        for name, shape, dtype in self._group.meet("a checkpoint", told, first):
            meta = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            held = entry[name] if entry else meta
            own = []
            for part in self._parts(held) if held.dim() else [held]:
                part = part.to(device) if entry else torch.empty_like(part, device=device)
                part = self._group.from_first(part)
                sliced = vectors is not None and name not in _NO_VECTORS
                own.append(vectors.own(part) if sliced else part)
            received[name] = torch.cat(own).view(*shape[:-1], -1) if held.dim() else own[0]
        return received

    def _parts(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the rows of a tensor in as many parts as there are ranks."""
        rows = tensor.reshape(-1, tensor.shape[-1])
        return rows.split(max(1, -(-len(rows) // self._group.size)))
