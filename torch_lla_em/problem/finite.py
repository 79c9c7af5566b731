"""Finds values that are not finite at the end of a pass, and the batch that they come from."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_lla_em.data import Batch, tensors_in

INPUTS = "The inputs of batch {} hold NaN or infinite values: remove those examples."
OUTPUTS = "The network's outputs on batch {} are not finite."
DERIVATIVE = (
    "The derivative of the network's outputs on batch {} is not finite, although the outputs are: "
    "some layer has no derivative there, for example a square root or a norm at 0. Use for "
    "example sqrt(x + 1e-12), or remove those examples."
)
LIKELIHOOD = (
    "The likelihood's curvature on batch {} is not finite: check the network's outputs and the "
    "targets of this batch for extreme values."
)

# for larger w, values that are not finite are attributed to w, as a solver may have diverged
_MODERATE = 1e12


def require(batch: Batch, what: str, tensor: Tensor) -> None:
    """Raise an error that names the batch if a tensor is not finite."""
    if tensor.isfinite().all():
        return
    inputs = [x for x in tensors_in(batch.inputs) if x.is_floating_point()]
    if what == OUTPUTS and not all(x.isfinite().all() for x in inputs):
        raise ValueError(INPUTS.format(batch.index))
    raise FloatingPointError(what.format(batch.index))


def all_finite(tensor: Tensor) -> Tensor:
    """Return whether all entries are finite, shape (): by their sum, which takes no memory."""
    return tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32)).isfinite()


def is_moderate(w: Tensor) -> Tensor:
    """Return whether w is far from overflowing, shape ()."""
    return torch.linalg.vector_norm(w, float("inf")) < _MODERATE
