"""Checkpoint folders: the last state of a fit or its posterior, and the settings that they belong to."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.runtime import Group, files, first, pack, records, unpack

logger = logging.getLogger("torch_lla_em")

FORMAT = 7
"""Version of the files in a checkpoint folder."""

_HEADER, _STATE, _FINISHED = "header.pt", "state.pt", "posterior.pt"
_BLOCK = "block-{}.pt"
_REMEDY = "Delete the folder to start a new fit, or pass another one."


class Folder:
    """A folder with the state after the last EM step, and one file for each block of a growing basis.

    Of several ranks, rank 0 reads and writes the files; the others receive what it has read.
    """

    def __init__(
        self, folder: str | os.PathLike[str], header: dict[str, Any], group: Group = Group()
    ):
        if not os.fspath(folder):
            raise ValueError("checkpoint='' is not the name of a folder. Pass a name, or None.")
        self.path, self._group = Path(folder), group
        self._reads = self.writes = group.rank == 0
        """Whether this process reads and writes the files."""

        self._blocks: set[str] = set()
        """Names of the blocks that have been written."""

        if self._reads:
            self._open(header)
        # an error on rank 0 ends the other ranks here
        group.meet(None, len)

    def posterior(self, device: torch.device) -> dict[str, Tensor] | None:
        """Return the posterior of a finished fit, or None if it is not finished."""
        path, state = self.path / _FINISHED, {}
        there = self._reads and os.path.exists(path)
        if there:
            state = records.read(path, ("facts",), "Delete it to fit again.")
        if not self._group.meet(there, first):
            return None
        return self._received(state, device)

    def load(self, device: torch.device) -> Any:
        """Return the last state, with its tensors on the device, or None if there is none."""
        known, tensors = self._read() if self._reads else (None, {})
        known = self._group.meet(known, first)
        if known is None:
            return None
        return unpack(known["tree"], self._received(tensors, device))

    def save(self, state: Any) -> None:
        """Replace the last state; blocks that have been written are not written again."""
        if not self.writes:
            return
        tree, tensors = pack(state)
        blocks = {name for name in tensors if "-" in name}
        for name in blocks - self._blocks:
            self._write({"block": tensors[name]}, self._block(name))
        own = {name: tensor for name, tensor in tensors.items() if name not in blocks}
        known = {"tree": tree, "blocks": sorted(blocks)}
        self._write({**own, "known": records.to_bytes(known)}, self.path / _STATE)
        if self.writes:
            self._blocks = blocks
            self._remove_blocks()

    def finish(self, posterior: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Replace the state by the posterior and the facts about its data."""
        self._write({**posterior, "facts": records.to_bytes(facts)}, self.path / _FINISHED)
        if self.writes:
            files.remove(self.path / _STATE)
            self._blocks = set()
            self._remove_blocks()
        self._group.meet(None, len)

    def _open(self, header: dict[str, Any]) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            files.remove_temporary(self.path)
            self._check_header(header)
        except OSError as error:
            raise OSError(
                f"The checkpoint folder {str(self.path)!r} cannot be used ({error}): free space "
                "there, or pass another folder."
            ) from error

    def _check_header(self, header: dict[str, Any]) -> None:
        path = self.path / _HEADER
        if not path.exists():
            for name in (_FINISHED, _STATE):
                if (self.path / name).exists():
                    raise ValueError(
                        f"{str(self.path / name)!r} is not part of a checkpoint, although it has the "
                        "name of such a file: pass another folder as checkpoint."
                    )
            files.write_atomically({"header": records.to_bytes(header)}, path)
            return
        known = records.from_bytes(files.tensors_of(path, ("header",), _REMEDY)["header"])
        for name in sorted(known.keys() | header.keys()):
            if known.get(name) != header.get(name):
                raise ValueError(
                    f"The checkpoint in {str(self.path)!r} belongs to another fit: its {name} is "
                    f"{known.get(name)!r}, but here it is {header.get(name)!r}. {_REMEDY}"
                )

    def _block(self, name: str) -> Path:
        return self.path / _BLOCK.format(name)

    def _read(self) -> tuple[Any, dict[str, Tensor]]:
        """Return the record of the last state and its tensors; remove blocks of no state."""
        if not os.path.exists(self.path / _STATE):
            self._remove_blocks()
            return None, {}
        tensors = files.tensors_of(self.path / _STATE, ("known",), _REMEDY)
        known = records.from_bytes(tensors.pop("known"))
        for name in known["blocks"]:
            tensors[name] = files.tensors_of(self._block(name), ("block",), _REMEDY)["block"]
        self._blocks = set(known["blocks"])
        self._remove_blocks()
        return known, tensors

    def _remove_blocks(self) -> None:
        """Remove the blocks that do not belong to the last state."""
        kept = {self._block(name) for name in self._blocks}
        for path in set(self.path.glob(_BLOCK.format("*-*"))) - kept:
            files.remove(path)

    def _write(self, state: dict[str, Tensor], path: Path) -> None:
        """Write a file; if that fails, warn once and write no more."""
        if not self.writes:
            return
        try:
            files.write_atomically(state, path)
        except OSError as error:
            self.writes = False
            logger.warning(
                "The checkpoint cannot be written any more (%s). The fit continues without it; the last "
                "state that was written remains valid.",
                error,
            )

    def _received(self, tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Return rank 0's tensors on this rank's device."""
        if self._group.size == 1:
            return {name: tensor.to(device) for name, tensor in tensors.items()}
        shapes = [(name, list(t.shape), str(t.dtype).split(".")[1]) for name, t in tensors.items()]
        received = {}
        for name, shape, dtype in self._group.meet(shapes, first):
            empty = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            held = tensors[name].to(device).contiguous() if self._reads else empty
            received[name] = self._group.from_first(held)
        return received
