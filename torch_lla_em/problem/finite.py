"""What of a pass is finite: one flag on the device, read when the pass has ended."""

from __future__ import annotations

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

# beyond this, what is not finite is blamed on w, as of a solver that diverges
_MODERATE = 1e12


class Finite:
    """Whether what a pass meets is finite: one flag for all batches, then the batch at fault.

    Nothing is waited for until the pass has ended; where it went wrong, it is gone over again.
    """

    def __init__(self, device: torch.device):
        with torch.inference_mode(False):  # it is written to in place, whoever calls
            self.fine = torch.ones((), dtype=torch.bool, device=device)
        """Whether all is that must be, so far."""

        self.searching = False
        """Whether this pass is gone over again, to find the batch at fault."""

        self.excused: str | None = None
        """What is not to be blamed while searching, and whether it was met."""

        self.met = False
        self.blames_sums = False
        """Whether sums that are not finite are a batch's fault, while searching."""

    def expect(self, index: int | str, what: str, tensor: Tensor) -> None:
        """Have the pass gone over again if a tensor is not finite."""
        self.fine.logical_and_(all_finite(tensor))
        self.check(index, what, tensor)

    def check(self, index: int | str, what: str, tensor: Tensor) -> None:
        """Raise at what is not finite while the batch at fault is searched."""
        if not self.searching or is_finite(tensor):
            return
        if what != self.excused:
            raise (ValueError if what == INPUTS else FloatingPointError)(what.format(index))
        self.met = True


def all_finite(tensor: Tensor) -> Tensor:
    """Return whether all entries are finite, shape (): by their sum, which takes no memory."""
    return tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32)).isfinite()


def is_finite(tensor: Tensor) -> bool:
    """Whether all entries are finite, by their sum unless that overflows."""
    return bool(all_finite(tensor)) or bool(tensor.isfinite().all())


def is_moderate(w: Tensor) -> Tensor:
    """Return whether w is far from overflowing, shape ()."""
    return torch.linalg.vector_norm(w, float("inf")) < _MODERATE
