"""Checkpoints: the result of every pass is kept, so that a killed run goes on where it was.

Passes over the data are nearly all of the cost, and everything between them is a function
of their results. A run that is started again reads the passes that are there instead of
the data, and ends bitwise where an unbroken one would.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_lla_em import persistence
from torch_lla_em.problem import NoiseFeatures, Problem

logger = logging.getLogger("torch_lla_em")


class PassLog:
    """A folder with one file per pass, in order, and a header of what they belong to."""

    def __init__(self, folder: str | os.PathLike, header: dict[str, Any]):
        self.folder = Path(folder)
        self._position = 0
        self._writing = True
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically({"probe": torch.zeros(1)}, self.folder / "probe")
            (self.folder / "probe").unlink()
        except OSError as error:
            raise OSError(
                f"The checkpoint folder {str(self.folder)!r} cannot be written to ({error}): free "
                "space there, or pass another folder."
            ) from error
        self._check_header(header)

    @property
    def finished(self) -> Path:
        """Where the posterior of a finished run lies."""
        return self.folder / "posterior.pt"

    def recorded(self, key: Tensor, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the pass at this position from its file, or compute and write it.

        ``key`` is what the pass is taken at: a resumed run must ask the same questions.
        """
        path = self.folder / f"pass-{self._position:05d}.pt"
        self._position += 1
        asked = torch.stack([key.double().sum(), key.double().norm()]).cpu()
        if path.exists():
            entry = torch.load(path, map_location=key.device, weights_only=True)
            known = entry.pop("asked").cpu()
            if (asked - known).abs().max() > 1e-3 * (1 + known.abs().max()):
                raise ValueError(
                    f"The checkpoint in {str(self.folder)!r} took another path than this run does: "
                    "it is of another version of the program. Delete the folder to start anew."
                )
            return entry
        entry = compute()
        if self._writing:
            try:
                write_atomically({**entry, "asked": asked}, path)
            except OSError as error:
                self._writing = False
                logger.warning(
                    "The checkpoint cannot be written any more (%s); the fit goes on without, and "
                    "the passes before this one stay good.",
                    error,
                )
        return entry

    def finish(self, posterior: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Put the posterior, and what is known of its data, in the place of the passes."""
        write_atomically({**posterior, "facts": persistence.to_bytes(facts)}, self.finished)
        for path in self.folder.glob("pass-*.pt"):
            path.unlink()

    def _check_header(self, header: dict[str, Any]) -> None:
        path = self.folder / "header.pt"
        if not path.exists():
            write_atomically({"header": persistence.to_bytes(header)}, path)
            return
        known = persistence.from_bytes(torch.load(path, weights_only=True)["header"])
        for name in sorted(known.keys() | header.keys()):
            if known.get(name) != header.get(name):
                raise ValueError(
                    f"The checkpoint in {str(self.folder)!r} is of another run: its {name} is "
                    f"{known.get(name)!r}, here it is {header.get(name)!r}. Delete the folder, or "
                    "pass another."
                )


class RecordedProblem(Problem):
    """A problem whose passes go through a log."""

    log: PassLog

    def ggn_product(self, w: Tensor) -> Tensor:
        """Return G w, shape (K, P)."""
        return self._recorded(w, lambda: {"Gw": super(RecordedProblem, self).ggn_product(w)})["Gw"]

    def loss_and_gradient(self, w: Tensor) -> tuple[float, Tensor]:
        """Return Σ_n -log p(y_n | J_n w) and its gradient, shape (P,)."""

        def compute() -> dict[str, Tensor]:
            loss, gradient = super(RecordedProblem, self).loss_and_gradient(w)
            return {"loss": torch.tensor(loss, dtype=torch.float64), "gradient": gradient}

        entry = self._recorded(w, compute)
        return entry["loss"].item(), entry["gradient"]

    def noise_features(self, num_samples: int, seed: int) -> NoiseFeatures:
        """Return η and s² from one pass, whose noise is keyed by (seed, row)."""

        def compute() -> dict[str, Tensor]:
            return super(RecordedProblem, self).noise_features(num_samples, seed)._asdict()

        entry = self._recorded(torch.tensor([num_samples, seed], device=self.device), compute)
        return NoiseFeatures(entry["eta"], entry["squares"])

    def rows(self) -> Tensor:
        """Return R, shape (N C, P), with G = RᵀR."""
        key = torch.zeros(1, device=self.device)
        return self._recorded(key, lambda: {"R": super(RecordedProblem, self).rows()})["R"]

    def _recorded(self, key: Tensor, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        def counted() -> dict[str, Tensor]:
            return {**compute(), "facts": persistence.to_bytes(self._facts())}

        entry = self.log.recorded(key, counted)
        facts = persistence.from_bytes(entry.pop("facts"))
        self.cost.columns = facts.pop("columns")
        self.data.restore(facts)
        return entry

    def _facts(self) -> dict[str, Any]:
        return {"columns": self.cost.columns, **self.data.facts()}


def write_atomically(state: dict[str, Tensor], path: Path) -> None:
    """Write tensors so that the file is there whole or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def leaving_cleanly() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that files are closed and the network is restored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
