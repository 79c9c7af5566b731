"""Numbers that are not finite: noticed at the end of a pass, and blamed on a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_lla_em.data import Batch, tensors_in

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
    """Whether all that has to be finite in a pass is: one flag, for which no batch waits."""

    def __init__(self, device: torch.device):
        with torch.inference_mode(False):  # it is written to in place, whoever calls
            self.fine = torch.ones((), dtype=torch.bool, device=device)

    def expect(self, tensor: Tensor) -> None:
        """Take note if a tensor is not finite."""
        self.fine.logical_and_(all_finite(tensor))


def require(batch: Batch, what: str, tensor: Tensor) -> None:
    """Raise an error that names the batch if a tensor is not finite."""
    if is_finite(tensor):
        return
    inputs = [x for x in tensors_in(batch.inputs) if x.is_floating_point()]
    if what == OUTPUTS and not all(map(is_finite, inputs)):
        raise ValueError(INPUTS.format(batch.index))
    raise FloatingPointError(what.format(batch.index))


def all_finite(tensor: Tensor) -> Tensor:
    """Return whether all entries are finite, shape (): by their sum, which takes no memory."""
    return tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32)).isfinite()


def is_finite(tensor: Tensor) -> bool:
    """Whether all entries are finite, by their sum unless that overflows."""
    return bool(all_finite(tensor)) or bool(tensor.isfinite().all())


def is_moderate(w: Tensor) -> Tensor:
    """Return whether w is far from overflowing, shape ()."""
    return torch.linalg.vector_norm(w, float("inf")) < _MODERATE
