"""A folder that keeps the result of every pass, and what they belong to."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.checkpoint.first_outputs import FirstOutputs
from torch_lla_em.problem import is_finite, size_of
from torch_lla_em.runtime import files, write_atomically
from torch_lla_em.runtime import records as persistence
from torch_lla_em.solvers import Space

logger = logging.getLogger("torch_lla_em")

FORMAT = 2
"""Of the files of a folder."""


class PassLog:
    """A folder with one file per pass, in order, and a header of what they belong to."""

    warned = False
    """Whether it was said that other inputs would not be noticed."""

    def __init__(self, folder: str | os.PathLike, header: dict[str, Any]):
        self.folder = Path(folder)
        self.position = 0
        self.writing = True
        self.asked = torch.zeros(2)
        """Where the pass at hand is taken."""

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            files.remove_stumps(self.folder)
            write_atomically({"probe": torch.zeros(1)}, self.folder / "probe")
            files.remove(self.folder / "probe")
        except OSError as error:
            raise OSError(
                f"The checkpoint folder {str(self.folder)!r} cannot be written to ({error}): free "
                "space there, or pass another folder."
            ) from error
        self._check_header(header)
        if not os.path.exists(self.finished) and not files.take(self._header):
            logger.warning(
                "Another process is at work in the checkpoint folder %r: end one of them, since two "
                "runs replace each other's passes, or give this one another folder.",
                str(self.folder),
            )

    @property
    def _header(self) -> Path:
        return self.folder / "header.pt"

    @property
    def _shortages(self) -> Path:
        return self.folder / "shortages.pt"

    @property
    def finished(self) -> Path:
        """Where the posterior of a finished run lies."""
        return self.folder / "posterior.pt"

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
        return persistence.read(self.finished, ("facts",), "Delete it to fit again.")

    def recorded(self, key: Tensor, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the pass at this position from its file, or compute and write it.

        ``key`` is what the pass is taken at: a resumed run must ask the same questions.
        """
        asked = self.asked = mark_of(key, Space())
        known = self._known(asked, key.device)
        return self._computed(asked, compute) if known is None else known

    def _known(self, asked: Tensor, device: torch.device) -> dict[str, Tensor] | None:
        """Return the pass at this position from its file, if it is there and good."""
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
        """Compute the pass at this position and write it."""
        path, position = self.next_pass, self.position
        self.position += 1
        try:
            entry = compute()
        except Exception:  # perhaps of memory: then it is asked once more
            self.position = position
            raise
        if all(map(is_finite, entry.values())):
            self._write({**entry, "asked": asked}, path)
        return entry

    def compare(self, outputs: FirstOutputs | None) -> None:
        """Keep what the network made of its first batch, or refuse another network's."""
        if outputs is None:
            return
        path = self.folder / "outputs.pt"
        if not os.path.exists(path):
            self._write(outputs.tensors(), path)
            return
        remedy = "Delete it; then the next run is compared with the outputs of this one."
        if outputs.contradicts(outputs.known(files.tensors_of(path, ("batch", "numbers"), remedy))):
            raise ValueError(
                "The network's outputs on the first batch differ from those that the checkpoint in "
                f"{str(self.folder)!r} began with, for the same data and weights: its forward_fn, "
                "code or buffers have changed. Bring them back, or pass another folder."
            )

    def read_shortages(self) -> list[list[int]]:
        """Return where memory ended between passes, as far as it is known."""
        if not os.path.exists(self._shortages):
            return []
        remedy = "Delete the folder to start anew, or pass another."
        return files.tensors_of(self._shortages, ("shortages",), remedy)["shortages"].tolist()

    def write_shortages(self, known: list[list[int]]) -> None:
        """Keep where memory ended between passes, unless the passes that are there had more of it."""
        if not os.path.exists(self.next_pass):
            self._write({"shortages": torch.tensor(known)}, self._shortages)

    def _write(self, state: dict[str, Tensor], path: Path) -> None:
        if self.writing:
            try:
                write_atomically(state, path)
            except OSError as error:
                self.give_up(error)

    def give_up(self, error: OSError) -> None:
        """Write no more, and say so; what was written stays good."""
        self.writing = False
        logger.warning(
            "The checkpoint cannot be written any more (%s); the fit goes on without, and "
            "the passes before this one stay good.",
            error,
        )

    def finish(self, posterior: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Put the posterior, and what is known of its data, in the place of the passes."""
        files.leave(self._header)
        try:
            write_atomically({**posterior, "facts": persistence.to_bytes(facts)}, self.finished)
        except OSError as error:
            self.give_up(error)
            return
        for name in ("pass-*.pt", "partial.pt", "shortages.pt"):
            for path in self.folder.glob(name):
                files.remove(path)

    def require_room(self, passes: int) -> None:
        """Refuse to begin where two passes, of so many bytes, have no room; but go on."""
        free = files.room_in(self.folder)
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
        path = self._header
        if not path.exists():
            write_atomically({"header": persistence.to_bytes(header)}, path)
            return
        remedy = "Delete the folder to start anew, or pass another."
        known = persistence.from_bytes(files.tensors_of(path, ("header",), remedy)["header"])
        for name in sorted(known.keys() | header.keys()):
            if known.get(name) != header.get(name):
                raise ValueError(
                    f"The checkpoint in {str(self.folder)!r} is of another run: its {name} is "
                    f"{known.get(name)!r}, here it is {header.get(name)!r}. Delete the folder, or "
                    "pass another."
                )


def mark_of(key: Tensor, space: Space) -> Tensor:
    """Return two numbers that tell one place where a pass is taken from another."""
    total = torch.stack([key.double().sum(), key.double().square().sum()])
    if key.is_floating_point():  # whole numbers are no vector, so that no rank has a slice of them
        total = space.sum(total)
    return torch.stack([total[0], total[1].sqrt()]).cpu()
