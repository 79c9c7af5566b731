"""A folder that keeps the result of every pass, and what they belong to."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.checkpoint.first_outputs import FirstOutputs
from torch_lla_em.problem import Problem, Vectors, is_finite, size_of
from torch_lla_em.runtime import Group, files, first, records

logger = logging.getLogger("torch_lla_em")

FORMAT = 4
"""Of the files of a folder."""

_HEADER, _FINISHED, _OUTPUTS, PARTIAL = "header.pt", "posterior.pt", "outputs.pt", "partial.pt"
_PASS = re.compile(r"pass-\d{5}\.pt")
# what of a pass is no vector in weight space
_NO_VECTORS = {"loss", "facts", "count", "sums", "bytes", "lasted", "f", "targets", "Jw"}


class Log:
    """A folder with one file per pass, in order, and a header of what they belong to.

    Of several ranks the first writes and reads it, and all go on from what it holds. Nothing in
    it depends on how many ranks there were.
    """

    def __init__(self, folder: str | os.PathLike, header: dict[str, Any], group: Group = Group()):
        if not os.fspath(folder):
            raise ValueError("checkpoint='' names no folder: pass the name of one, or None.")
        self.folder = Path(folder)
        self._group, self._reads = group, group.rank == 0
        self.writes = self._reads
        """Whether this process keeps the folder."""

        self.vectors: Vectors | None = None
        """How vectors lie on ranks."""

        self.position = 0
        self.warned = False
        """Whether it was said that other inputs would not be noticed."""

        if self._reads:
            self._open(header)
        # where rank 0 cannot write, all have heard of it by now
        group.meet("the checkpoint", None, len)

    def _open(self, header: dict[str, Any]) -> None:
        lock = self.folder / _HEADER
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if files.take(lock):
                files.remove_stumps(self.folder)
            files.try_to_write(self.folder)
        except OSError as error:
            raise OSError(
                f"The checkpoint folder {str(self.folder)!r} cannot be written to ({error}): free "
                "space there, or pass another folder."
            ) from error
        self._check_header(header)
        if self.finished.exists():
            files.leave(lock)
        elif not files.take(lock):
            logger.warning(
                "Another process or thread is at work in the checkpoint folder %r: end one of them, since two "
                "runs replace each other's passes, or give this one another folder.",
                str(self.folder),
            )

    @property
    def finished(self) -> Path:
        """Where the posterior of a finished run lies."""
        return self.folder / _FINISHED

    @property
    def next_pass(self) -> Path:
        """Where the pass that comes next lies, or will."""
        return self._pass(self.position)

    def _pass(self, position: int) -> Path:
        return self.folder / f"pass-{position:05d}.pt"

    def posterior(self, device: torch.device) -> dict[str, Tensor] | None:
        """Return the posterior of a finished run, or None if it is not finished."""
        there = self._reads and os.path.exists(self.finished)
        state = {}
        if there:
            state = records.read(self.finished, ("facts",), "Delete it to fit again.")
        if not self._group.meet("a finished run", there, first):
            return None
        return self._from_first(state, device, None)

    def recorded(
        self, asked: Tensor, device: torch.device, compute: Callable[[], dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Return the entry at this position from its file, or compute and write it.

        ``asked`` are numbers that tell where a pass is taken: a run that goes on asks alike.
        """
        path, position = self.next_pass, self.position
        known = self._known(asked) if self._reads else None
        self.position += 1
        if self._group.meet("a recorded pass", known is not None, first):
            return self._from_first(known or {}, device, self.vectors)
        try:
            entry = compute()
        except Exception:  # perhaps of memory: then it is asked once more
            self.position = position
            raise
        whole = self._whole(entry)
        if self._reads and all(map(is_finite, whole.values())):
            self.write({**whole, "asked": asked}, path)
        return entry

    def _known(self, asked: Tensor) -> dict[str, Tensor] | None:
        """Return the entry at this position from its file, if it is there and good."""
        path = self.next_pass
        if not os.path.exists(path):
            return None
        remedy = "Delete it and all passes of higher numbers, to go on from before it."
        last = not os.path.exists(self._pass(self.position + 1))
        try:
            entry = files.tensors_of(path, ("asked",), "" if last else remedy)
        except FileNotFoundError:  # another run has finished meanwhile
            return None
        except files.UnreadableError as error:
            if not last:
                raise
            logger.warning("%s The pass is computed again.", error)
            return None
        known = entry.pop("asked")
        if (asked - known).abs().max() > 1e-3 * (1 + known.abs().max()):
            raise ValueError(
                f"The checkpoint in {str(self.folder)!r} took another path than this run does: "
                "it is of another version of the program, memory ended here and not there, or "
                "another run is at work in it. Go on where there is more memory, or delete the "
                "folder to start anew."
            )
        return entry

    def _whole(self, entry: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return whole vectors where they are sliced, on rank 0's CPU alone."""
        if self.vectors is None or self.vectors.group is None:
            return entry
        whole = {}
        for name, tensor in entry.items():
            if name in _NO_VECTORS:
                whole[name] = tensor
                continue
            parts = map(self.vectors.whole, self._parts(tensor))
            kept = [part.cpu() for part in parts if self._reads]
            whole[name] = torch.cat(kept).view(*tensor.shape[:-1], -1) if kept else tensor
        return whole

    def _from_first(
        self, entry: dict[str, Tensor], device: torch.device, vectors: Vectors | None
    ) -> dict[str, Tensor]:
        """Return rank 0's tensors, or slices of them, by way of the device."""
        if self._group.size == 1:
            return {name: tensor.to(device) for name, tensor in entry.items()}
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

    def compare(self, outputs: FirstOutputs | None, problem: Problem) -> None:
        """Keep what network and likelihood made of the first batch, or refuse other ones."""
        if outputs is None or not self.writes:
            return
        path = self.folder / _OUTPUTS
        if not os.path.exists(path):
            self.write(outputs.tensors(), path)
            return
        remedy = "Delete it; then the next run is compared with the outputs of this one."
        known = outputs.known(files.tensors_of(path, ("batch", "numbers"), remedy))
        example = known.example
        if example is not None and example.contradicts(
            problem.likelihood, problem.linear_model.network.device
        ):
            raise ValueError(
                f"The checkpoint in {str(self.folder)!r} began with another likelihood: for the same "
                "outputs and targets, this one returns other values. Pass the same likelihood, or "
                "another folder."
            )
        if outputs.contradicts(known):
            raise ValueError(
                "The network's outputs on the first batch differ from those that the checkpoint in "
                f"{str(self.folder)!r} began with, for the same data and weights: its forward_fn, "
                "code or buffers have changed. Bring them back, or pass another folder."
            )

    def write(self, state: dict[str, Tensor], path: Path) -> None:
        """Write a file, unless one could not be written before; what was written stays good."""
        if not self.writes:
            return
        try:
            files.write_atomically(state, path)
        except OSError as error:
            self.writes = False
            logger.warning(
                "The checkpoint cannot be written any more (%s); the fit goes on without, and "
                "the passes before this one stay good.",
                error,
            )

    def finish(self, posterior: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Put the posterior, and what is known of its data, in the place of the passes."""
        files.leave(self.folder / _HEADER)
        self.write({**posterior, "facts": records.to_bytes(facts)}, self.finished)
        if self.writes:
            for path in self.folder.iterdir():
                if _PASS.fullmatch(path.name) or path.name == PARTIAL:
                    files.remove(path)
        self._group.meet("the finished checkpoint", None, len)

    def require_room(self, passes: int) -> None:
        """Refuse to begin where two passes, of so many bytes, have no room; but go on."""
        free = files.room_in(self.folder) if self.writes else float("inf")
        if free >= passes:
            return
        fault = (
            f"The checkpoint folder {str(self.folder)!r} has {size_of(free)} free, but two passes take "
            f"{size_of(passes)}: free space there, or take fewer samples (num_samples)."
        )
        if not os.path.exists(self._pass(0)):
            raise OSError(f"{fault} Or pass another folder.")
        logger.warning("%s", fault)

    def _check_header(self, header: dict[str, Any]) -> None:
        path = self.folder / _HEADER
        if not path.exists():
            self._refuse_files_of_others()
            files.write_atomically({"header": records.to_bytes(header)}, path)
            return
        remedy = "Delete the folder to start anew, or pass another."
        known = records.from_bytes(files.tensors_of(path, ("header",), remedy)["header"])
        for name in sorted(known.keys() | header.keys()):
            if known.get(name) != header.get(name):
                raise ValueError(
                    f"The checkpoint in {str(self.folder)!r} is of another run: its {name} is "
                    f"{known.get(name)!r}, here it is {header.get(name)!r}. Delete the folder, or "
                    "pass another."
                )

    def _refuse_files_of_others(self) -> None:
        """Raise where files have the names of ours, but no header says that they are."""
        ours = {_FINISHED, _OUTPUTS, PARTIAL}
        for path in sorted(self.folder.iterdir()):
            if path.name in ours or _PASS.fullmatch(path.name):
                raise ValueError(
                    f"{str(path)!r} is not of a checkpoint, but has the name of a file of one: "
                    "pass a folder of its own as checkpoint."
                )
