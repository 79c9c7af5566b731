"""Batches of a loader, passes over them, and checks that every pass sees the same data."""

from torch_lla_em.data.batch import (
    Batch,
    TargetFn,
    as_targets,
    default_forward,
    default_targets,
    inputs_of,
    unlabelled,
)
from torch_lla_em.data.forms import (
    AnyInputs,
    GivenWeights,
    Inputs,
    Loader,
    Values,
    Weights,
    as_loader,
    paired,
    with_weights,
)
from torch_lla_em.data.identity import Identity, distinct
from torch_lla_em.data.loader import Data
from torch_lla_em.data.share import Share
from torch_lla_em.data.source import inputs_in_order
from torch_lla_em.data.trees import (
    Tree,
    copied,
    is_sequence,
    leaves_of,
    map_tensors,
    merged,
    rows_of,
    tensors_in,
    to_device,
)

__all__ = [
    "AnyInputs",
    "Batch",
    "Data",
    "GivenWeights",
    "Identity",
    "Inputs",
    "Loader",
    "Share",
    "TargetFn",
    "Tree",
    "Values",
    "Weights",
    "as_loader",
    "as_targets",
    "copied",
    "default_forward",
    "default_targets",
    "distinct",
    "inputs_in_order",
    "inputs_of",
    "is_sequence",
    "leaves_of",
    "map_tensors",
    "merged",
    "paired",
    "rows_of",
    "tensors_in",
    "to_device",
    "unlabelled",
    "with_weights",
]
