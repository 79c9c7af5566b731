"""Batches, passes over a loader, and whether they are of the same data."""

from torch_lla_em.data.batch import (
    Batch,
    TargetFn,
    as_targets,
    copied,
    default_targets,
    inputs_of,
    is_sequence,
    map_tensors,
    next_tokens,
    tensors_in,
    to_device,
)
from torch_lla_em.data.forward import default_forward
from torch_lla_em.data.identity import Identity
from torch_lla_em.data.loader import Data
from torch_lla_em.data.sources import Chain, as_loader, paired
from torch_lla_em.data.weights import Weighed

__all__ = [
    "Batch",
    "Chain",
    "Data",
    "Identity",
    "TargetFn",
    "Weighed",
    "as_loader",
    "as_targets",
    "copied",
    "default_forward",
    "default_targets",
    "inputs_of",
    "is_sequence",
    "map_tensors",
    "next_tokens",
    "paired",
    "tensors_in",
    "to_device",
]
