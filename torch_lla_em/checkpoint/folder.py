"""A folder with the last state of a fit, or its posterior, and what they belong to."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.problem import Vectors, size_of
from torch_lla_em.runtime import Group, files, first, pack, records, unpack

logger = logging.getLogger("torch_lla_em")

FORMAT = 5
"""Version of the files in a checkpoint folder."""

_HEADER, _STATE, _FINISHED = "header.pt", "state.pt", "posterior.pt"
_BLOCK = "block-{}.pt"
_ANEW = "Delete the folder to start anew, or pass another."


class Folder:
    """One file with the state after the last EM step, one for each block of a growing basis.

    Of several ranks the first reads and writes, and all go on from what it holds.
    """

    def __init__(self, folder: str | os.PathLike, header: dict[str, Any], group: Group = Group()):
        if not os.fspath(folder):
            raise ValueError("checkpoint='' names no folder: pass the name of one, or None.")
        self.path, self._group = Path(folder), group
        self._reads = self.writes = group.rank == 0
        """Whether this process keeps the folder."""

        self._blocks: set[str] = set()
        """Those that are written."""

        if self._reads:
            self._open(header)
        # where rank 0 cannot write, all have heard of it by now
        group.meet("the checkpoint", None, len)

    def posterior(self, device: torch.device) -> dict[str, Tensor] | None:
        """Return the posterior of a finished fit, or None if it is not finished."""
        path, state = self.path / _FINISHED, {}
        there = self._reads and os.path.exists(path)
        if there:
            state = records.read(path, ("facts",), "Delete it to fit again.")
        if not self._group.meet("a finished fit", there, first):
            return None
        return self._received(state, device)

    def load(self, device: torch.device, vectors: Vectors) -> Any:
        """Return the last state, its tensors on the device, or None where there is none."""
        known, tensors = self._read() if self._reads else (None, {})
        known = self._group.meet("a saved state", known, first)
        if known is None:
            return None
        if vectors.group is not None and not known["sliced"]:
            raise ValueError(
                f"The checkpoint in {str(self.path)!r} holds whole vectors, of which each rank would "
                'take a slice: go on with shard="data", or pass another folder.'
            )
        received = self._received(tensors, device)
        if vectors.group is not None:
            received |= {name: vectors.own(received[name]) for name in known["sliced"]}
        return unpack(known["tree"], received)

    def save(self, state: Any, vectors: Vectors) -> None:
        """Put a state in the place of the last one; blocks that are there are not written again."""
        tree, tensors = pack(state)
        sliced = self._make_whole(tensors, vectors)
        if not self.writes:
            return
        blocks = {name for name in tensors if "-" in name}
        for name in blocks - self._blocks:
            self._write({"block": tensors[name]}, self._block(name))
        own = {name: tensor for name, tensor in tensors.items() if name not in blocks}
        known = {"tree": tree, "sliced": sliced, "blocks": sorted(blocks)}
        self._write({**own, "known": records.to_bytes(known)}, self.path / _STATE)
        if self.writes:
            self._blocks = blocks
            self._remove_blocks()

    def finish(self, posterior: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Put the posterior, and what is known of its data, in the place of the state."""
        files.leave(self.path / _HEADER)
        self._write({**posterior, "facts": records.to_bytes(facts)}, self.path / _FINISHED)
        if self.writes:
            files.remove(self.path / _STATE)
            self._blocks = set()
            self._remove_blocks()
        self._group.meet("the finished checkpoint", None, len)

    def require_room(self, size: int) -> None:
        """Refuse to begin where a state of so many bytes, at least, has no room."""
        free = files.room_in(self.path) if self.writes else float("inf")
        if free < size:
            raise OSError(
                f"The checkpoint folder {str(self.path)!r} has {size_of(free)} free, but a state "
                f"takes {size_of(size)} at least: free space there, pass another folder, or take fewer "
                "samples (num_samples)."
            )

    def _open(self, header: dict[str, Any]) -> None:
        lock = self.path / _HEADER
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if files.take(lock):
                files.remove_stumps(self.path)
            files.try_to_write(self.path)
        except OSError as error:
            raise OSError(
                f"The checkpoint folder {str(self.path)!r} cannot be written to ({error}): free "
                "space there, or pass another folder."
            ) from error
        self._check_header(header)
        if (self.path / _FINISHED).exists():
            files.leave(lock)
        elif not files.take(lock):
            logger.warning(
                "Another process or thread is at work in the checkpoint folder %r: end one of them, "
                "since two fits replace each other's states, or give this one another folder.",
                str(self.path),
            )

    def _check_header(self, header: dict[str, Any]) -> None:
        path = self.path / _HEADER
        if not path.exists():
            for name in (_FINISHED, _STATE):
                if (self.path / name).exists():
                    raise ValueError(
                        f"{str(self.path / name)!r} is not of a checkpoint, but has the name of a "
                        "file of one: pass a folder of its own as checkpoint."
                    )
            files.write_atomically({"header": records.to_bytes(header)}, path)
            return
        known = records.from_bytes(files.tensors_of(path, ("header",), _ANEW)["header"])
        for name in sorted(known.keys() | header.keys()):
            if known.get(name) != header.get(name):
                raise ValueError(
                    f"The checkpoint in {str(self.path)!r} is of another run: its {name} is "
                    f"{known.get(name)!r}, here it is {header.get(name)!r}. {_ANEW}"
                )

    def _block(self, name: str) -> Path:
        return self.path / _BLOCK.format(name)

    def _read(self) -> tuple[Any, dict[str, Tensor]]:
        """Return what is known of the last state, and its tensors; remove blocks of no state."""
        if not os.path.exists(self.path / _STATE):
            self._remove_blocks()
            return None, {}
        tensors = files.tensors_of(self.path / _STATE, ("known",), _ANEW)
        known = records.from_bytes(tensors.pop("known"))
        for name in known["blocks"]:
            tensors[name] = files.tensors_of(self._block(name), ("block",), _ANEW)["block"]
        self._blocks = set(known["blocks"])
        self._remove_blocks()
        return known, tensors

    def _remove_blocks(self) -> None:
        """Remove the blocks that are not of the last state."""
        kept = {self._block(name) for name in self._blocks}
        for path in set(self.path.glob(_BLOCK.format("*-*"))) - kept:
            files.remove(path)

    def _write(self, state: dict[str, Tensor], path: Path) -> None:
        """Write a file, unless one could not be written before; what was written stays good."""
        if not self.writes:
            return
        try:
            files.write_atomically({name: _alone(t) for name, t in state.items()}, path)
        except OSError as error:
            self.writes = False
            logger.warning(
                "The checkpoint cannot be written any more (%s); the fit goes on without, and the "
                "last state that was written stays good.",
                error,
            )

    def _make_whole(self, tensors: dict[str, Tensor], vectors: Vectors) -> list[str]:
        """Put whole vectors in the place of slices, on rank 0; return the names of these tensors.

        They are told by their shapes: no two ranks have slices of the same size throughout.
        """
        if vectors.group is None:
            return []
        shapes = self._group.meet("shapes", [list(t.shape) for t in tensors.values()], list)
        there = self._group.meet("blocks", [name in self._blocks for name in tensors], first)
        sliced = []
        for name, known, *of_ranks in zip(list(tensors), there, *shapes):
            if all(shape == of_ranks[0] for shape in of_ranks):
                continue
            sliced.append(name)
            for rows in () if known else [tensors[name]]:
                parts = [vectors.whole(part) for part in self._parts(rows)]
                if self._reads:
                    whole = torch.cat([part.cpu() for part in parts])
                    tensors[name] = whole.view(*rows.shape[:-1], -1)
        return sliced

    def _received(self, tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Return rank 0's tensors on this rank's device."""
        if self._group.size == 1:
            return {name: tensor.to(device) for name, tensor in tensors.items()}
        told = [(name, list(t.shape), str(t.dtype).split(".")[1]) for name, t in tensors.items()]
        received = {}
        for name, shape, dtype in self._group.meet("a checkpoint", told, first):
            empty = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            held = tensors[name].to(device).contiguous() if self._reads else empty
            received[name] = self._group.from_first(held)
        return received

    def _parts(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the rows of a tensor in as many parts as there are ranks."""
        rows = tensor.reshape(-1, tensor.shape[-1])
        return rows.split(max(1, -(-len(rows) // self._group.size)))


def _alone(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU that is no view of a larger one, which would be written whole."""
    own = tensor.detach().cpu()
    return own.clone() if own.untyped_storage().nbytes() > own.nbytes else own
