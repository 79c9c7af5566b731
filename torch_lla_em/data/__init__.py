"""Batches, passes over a loader, and whether they are of the same data."""

from torch_lla_em.data.batch import Batch
from torch_lla_em.data.batches import (
    TargetFn,
    default_forward,
    default_targets,
    inputs_of,
    is_sequence,
    map_tensors,
    next_tokens,
    to_device,
)
from torch_lla_em.data.identity import Fingerprint, row_numbers
from torch_lla_em.data.loader import Chain, Data

__all__ = [
    "Batch",
    "Chain",
    "Data",
    "Fingerprint",
    "TargetFn",
    "default_forward",
    "default_targets",
    "inputs_of",
    "is_sequence",
    "map_tensors",
    "next_tokens",
    "row_numbers",
    "to_device",
]
