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
from torch_lla_em.problem import is_finite, size_of
from torch_lla_em.runtime import files, records

logger = logging.getLogger("torch_lla_em")

FORMAT = 3
"""Of the files of a folder."""

_HEADER, _FINISHED, _OUTPUTS, PARTIAL = "header.pt", "posterior.pt", "outputs.pt", "partial.pt"
_PASS = re.compile(r"pass-\d{5}\.pt")


class Log:
    """A folder with one file per pass, in order, and a header of what they belong to."""

    writes = True
    """Whether this process keeps the folder, as rank 0 does."""

    def __init__(self, folder: str | os.PathLike, header: dict[str, Any]):
        if not os.fspath(folder):
            raise ValueError("checkpoint='' names no folder: pass the name of one, or None.")
        self.folder = Path(folder)
        self.position = 0
        self.warned = False
        """Whether it was said that other inputs would not be noticed."""

        if self.writes:
            self._open(header)

    def _open(self, header: dict[str, Any]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            files.remove_stumps(self.folder)
            files.try_to_write(self.folder)
        except OSError as error:
            raise OSError(
                f"The checkpoint folder {str(self.folder)!r} cannot be written to ({error}): free "
                "space there, or pass another folder."
            ) from error
        self._check_header(header)
        if not self.finished.exists() and not files.take(self.folder / _HEADER):
            logger.warning(
                "Another process is at work in the checkpoint folder %r: end one of them, since two "
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
        if not os.path.exists(self.finished):
            return None
        return records.read(self.finished, ("facts",), "Delete it to fit again.")

    def recorded(
        self, asked: Tensor, device: torch.device, compute: Callable[[], dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Return the entry at this position from its file, or compute and write it.

        ``asked`` are numbers that tell where a pass is taken: a run that goes on asks alike.
        """
        known = self._known(asked, device)
        return self._computed(asked, compute) if known is None else known

    def _known(self, asked: Tensor, device: torch.device | str) -> dict[str, Tensor] | None:
        """Return the entry at this position from its file, if it is there and good."""
        path = self.next_pass
        if not os.path.exists(path):
            return None
        remedy = "Delete it and all passes of higher numbers, to go on from before it."
        last = not os.path.exists(self._pass(self.position + 1))
        try:
            entry = files.tensors_of(path, ("asked",), "" if last else remedy, device)
        except FileNotFoundError:  # another run has finished meanwhile
            return None
        except files.UnreadableError as error:
            if not last:
                raise
            logger.warning("%s The pass is computed again.", error)
            return None
        known = entry.pop("asked").cpu()
        if (asked - known).abs().max() > 1e-3 * (1 + known.abs().max()):
            raise ValueError(
                f"The checkpoint in {str(self.folder)!r} took another path than this run does: "
                "it is of another version of the program, memory ended here and not there, or "
                "another run is at work in it. Go on where there is more memory, or delete the "
                "folder to start anew."
            )
        self.position += 1
        return entry

    def _computed(
        self, asked: Tensor, compute: Callable[[], dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Compute the entry at this position and write it."""
        path, position = self.next_pass, self.position
        self.position += 1
        try:
            entry = compute()
        except Exception:  # perhaps of memory: then it is asked once more
            self.position = position
            raise
        self._keep(entry, asked, path)
        return entry

    def _keep(self, entry: dict[str, Tensor], asked: Tensor, path: Path) -> None:
        if all(map(is_finite, entry.values())):
            self.write({**entry, "asked": asked}, path)

    def compare(self, outputs: FirstOutputs | None) -> None:
        """Keep what the network made of its first batch, or refuse another network's."""
        if outputs is None or not self.writes:
            return
        path = self.folder / _OUTPUTS
        if not os.path.exists(path):
            self.write(outputs.tensors(), path)
            return
        remedy = "Delete it; then the next run is compared with the outputs of this one."
        if outputs.contradicts(outputs.known(files.tensors_of(path, ("batch", "numbers"), remedy))):
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
