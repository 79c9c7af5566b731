"""The checkpoint of ``distil``: the posterior's predictions, and the last state of the training."""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic
from typing import Any

from torch_lla_em.distil.targets import StudentTargets
from torch_lla_em.runtime import files

_FILE = "distil.pt"
_REMEDY = "Delete the folder to start again, or pass another one."
# seconds between two states of the training that are saved
_SECONDS = 30.0


class DistillationProgress:
    """A folder with the state of a run of ``distil``; without a folder nothing is saved."""

    def __init__(self, folder: str | os.PathLike[str] | None, header: dict[str, str]):
        self._header, self._saved = header, monotonic()
        self.training: tuple[Any, ...] | None = None
        """The last state of the training that was saved."""

        self._predictions: list[StudentTargets] = []
        self._num_read = 0
        self._path = None if folder is None else Path(folder) / _FILE
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            files.remove_temporary(self._path.parent)
            if self._path.exists():
                self._open(self._path)

    @property
    def is_due(self) -> bool:
        """Whether the state should be saved now."""
        return self._path is not None and monotonic() - self._saved >= _SECONDS

    def next_prediction(self) -> StudentTargets | None:
        """Return the next of the saved predictions, or None if there are no more."""
        self._num_read += 1
        saved = self._predictions
        return saved[self._num_read - 1] if self._num_read <= len(saved) else None

    def add(self, prediction: StudentTargets) -> StudentTargets:
        """Return a prediction, which is saved with the others."""
        if self._path is not None:
            self._predictions.append(prediction)
        if self.is_due:
            self.save()
        return prediction

    def save(self, *training: Any) -> None:
        """Save all predictions and the state of the training, if there is one yet."""
        self.training = training or None
        state = {"predictions": self._predictions, "training": self.training}
        if self._path is not None:
            files.write_atomically({"header": self._header, **state}, self._path)
            self._saved = monotonic()

    def _open(self, path: Path) -> None:
        found = files.contents_of(path, ("header", "predictions", "training"), _REMEDY)
        known = found["header"]
        for name in sorted(known.keys() | self._header.keys()):
            if known.get(name) != self._header.get(name):
                raise ValueError(
                    f"The checkpoint in {str(path.parent)!r} belongs to another distillation: its "
                    f"{name} is another than here. {_REMEDY}"
                )
        self._predictions, self.training = found["predictions"], found["training"]
