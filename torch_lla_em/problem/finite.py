"""What of a pass is finite: noted batch by batch on the device, read when the pass has ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

INPUTS = "The inputs of batch {} hold NaN or infinite values: remove those rows."
OUTPUTS = "The network's outputs on batch {} are not finite."
DERIVATIVE = (
    "The derivative of the network's outputs on batch {} is not finite, though the outputs are: "
    "some layer has none there, as a root or a norm at 0. Give it one, as in sqrt(x + 1e-12), or "
    "leave those rows out."
)
LIKELIHOOD = (
    "The likelihood's curvature on batch {} is not finite: check the network's outputs and the "
    "targets there for extreme values."
)
STEP = "The step on batch {} is not finite."

_TOGETHER = 256
# beyond this, what is not finite is blamed on w, as of a solver that diverges
_MODERATE = 1e12

Notes = dict[str, tuple[list[int | str], list[Tensor]]]


class Finite:
    """Whether this and that of a batch is finite; nothing is waited for until somebody asks."""

    def __init__(self) -> None:
        self._notes: Notes = {}

    def clear(self) -> None:
        """Forget the pass before."""
        self._notes.clear()

    def note(self, index: int | str, what: str, fine: Tensor) -> None:
        """Note whether something of a batch is fine."""
        indices, flags = self._notes.setdefault(what, ([], []))
        indices.append(index)
        flags.append(fine.reshape(1))
        if len(flags) == _TOGETHER:  # many small tensors take more room than one
            flags[:] = [torch.cat(flags)]

    @contextmanager
    def aside(self) -> Iterator[Notes]:
        """Take what is noted meanwhile apart."""
        before, self._notes = self._notes, {}
        try:
            yield self._notes
        finally:
            self._notes = before

    def take(self, notes: Notes) -> None:
        """Note what was noted apart."""
        for what, noted in notes.items():
            for index, fine in zip(*noted):
                self.note(index, what, fine)

    def first_fault(self, what: str) -> int | str | None:
        """Return the first batch of which something is not fine, or None."""
        indices, flags = self._notes.get(what, ((), ()))
        fine = torch.cat(flags).tolist() if flags else ()
        return next((index for index, good in zip(indices, fine) if not good), None)

    def refuse(self, *whats: str) -> None:
        """Raise if one of these is not fine on some batch, with its number."""
        for what in whats:
            index = self.first_fault(what)
            if index is not None:
                kind = ValueError if what == INPUTS else FloatingPointError
                raise kind(what.format(index))


def all_finite(tensor: Tensor) -> Tensor:
    """Return whether all entries are finite, shape (): by their sum, which takes no memory."""
    return tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32)).isfinite()


def is_finite(tensor: Tensor) -> bool:
    """Whether all entries are finite, by their sum unless that overflows."""
    return bool(all_finite(tensor)) or bool(tensor.isfinite().all())


def is_moderate(w: Tensor) -> Tensor:
    """Return whether w is far from overflowing, shape ()."""
    return torch.linalg.vector_norm(w, float("inf")) < _MODERATE
