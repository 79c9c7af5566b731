"""Forms of data and weights that users pass, and the order of the examples of a ``DataLoader``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from torch_lla_em.data.batch import TargetFn
from torch_lla_em.data.trees import Movable, Tree

Inputs = Tensor | np.ndarray | Mapping[str, Any] | Sequence[Any] | Movable
"""Inputs of one batch, as the network takes them: several in a tuple, or by name in a dict."""

Loader = Iterable[Any] | Dataset[Any]
"""Batches of examples: a ``DataLoader``, a ``Dataset``, or a list of batches."""

AnyInputs = Inputs | DataLoader[Any] | Dataset[Any]
"""Inputs of one batch, or of all batches of a loader."""

Values = Tensor | np.ndarray | Sequence[float]
"""One number for each example."""

Weights = str | Callable[[Tensor], Tensor]
"""Where the weights of a batch come from: "last", its last entry; or a function of its targets."""

GivenWeights = Weights | Values | float
"""The weights of a fit, as users pass them."""


def as_loader(data: Inputs | Loader, target_fn: TargetFn | None = None) -> Any:
    """Return an iterable of batches that can be read repeatedly, from (X, y) or a Dataset too."""
    if isinstance(data, Iterator):
        raise ValueError(
            "The loader is a generator or an iterator, which is exhausted after one pass, but a "
            "fit needs several. Pass a DataLoader, or a list of its batches."
        )
    if target_fn is None and (is_pair(data) or (isinstance(data, Mapping) and "labels" in data)):
        return [data]
    if isinstance(data, Dataset) and not isinstance(data, Iterable):
        return DataLoader(data, batch_size=100)
    return data


def paired(data: Inputs | Loader, targets: Tensor | None) -> Any:
    """Return a loader as it is, or inputs and their targets as a list of one batch."""
    return data if targets is None else [(data, targets)]


def is_pair(data: Inputs | Loader) -> bool:
    """Whether this is (X, y) and not a list of batches. (A fit needs batches with targets, so two
    arrays cannot be two batches.)"""
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        return False
    arrays = all(isinstance(p, Tensor | np.ndarray) or hasattr(p, "to_numpy") for p in data)
    return arrays and all(part.ndim for part in data) and len(data[0]) == len(data[1])


def are_batches(data: Inputs | Loader) -> bool:
    """Whether this is a list of two batches of inputs, where no targets are needed: two arrays of
    equal shape and type in a list."""
    if not (isinstance(data, list) and is_pair(data)):
        return False
    first, second = ((type(p), getattr(p, "dtype", None), p.shape[1:]) for p in data)
    return first == second


def with_weights(loader: Inputs | Loader, weights: GivenWeights) -> tuple[Any, Weights]:
    """Return a loader and where its weights come from, for the ``weights`` of a user."""
    if callable(weights) or (isinstance(weights, str) and weights == "last"):
        return loader, weights
    if isinstance(weights, Real):
        number = float(weights)
        return loader, lambda y: torch.full(y.shape[:1], number, device=y.device)
    # fit(x, y) passes a list of one batch, whose inputs may be several
    batch: Any = loader if is_pair(loader) else None
    if isinstance(loader, list) and len(loader) == 1:
        batch = loader[0]
    is_labelled = isinstance(batch, (tuple, list)) and len(batch) == 2
    if isinstance(weights, str) or not is_labelled:
        words = repr(weights) if isinstance(weights, str) else f"a {type(weights).__name__}"
        raise TypeError(
            f"weights are {words}: pass a tensor together with tensors of inputs and targets, "
            'fit(x, y, weights=w); or "last" for a loader of batches (inputs, targets, weights); '
            "or a function of the targets."
        )
    return [(*batch, torch.as_tensor(weights, device="cpu"))], "last"


def without_weights(batch: Tree) -> tuple[Any, Any]:
    """Split a batch of a loader into inputs and targets, and the weights at its end."""
    if not isinstance(batch, (tuple, list)) or len(batch) < 3:
        raise TypeError(
            'With weights="last" batches are (inputs, targets, weights), not a '
            f"{type(batch).__name__}."
        )
    return tuple(batch[:-1]), batch[-1]


def checked_weights(given: object, targets: Tensor) -> Tensor:
    """Return weights in float64, with the shape of the targets, or one for each example."""
    w = torch.as_tensor(given, dtype=torch.float64, device=targets.device)
    if w.shape not in (targets.shape, targets.shape[:1]):
        raise ValueError(
            f"The weights have shape {tuple(w.shape)}, but the targets {tuple(targets.shape)}: "
            "pass one weight for each example, or for each label."
        )
    if not (torch.isfinite(w).all() and (w >= 0).all()):
        raise ValueError("Weights must be finite and not negative.")
    return w


def order_of(loader: Inputs | Loader, num_ranks: int) -> tuple[Sequence[Any] | None, bool]:
    """Return the indices of a dataset in a fixed order, and whether the loader shuffles. The
    indices are None if only the loader knows its order."""
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return None, False
    if type(loader.batch_sampler) is not BatchSampler or isinstance(
        loader.dataset, IterableDataset
    ):
        return None, False
    sampler = loader.batch_sampler.sampler
    source = getattr(sampler, "data_source", getattr(sampler, "dataset", ()))
    every = range(len(source))  # these may be fewer than the examples of the dataset
    if type(sampler) is RandomSampler:
        is_whole = not sampler.replacement and sampler.num_samples == len(every)
        return (every, True) if is_whole else (None, False)
    if isinstance(sampler, DistributedSampler) and num_ranks > 1:
        return every, sampler.shuffle
    if type(sampler) is SubsetRandomSampler:
        return list(sampler.indices), True
    if type(sampler) is SequentialSampler:
        return every, False
    order: Any = sampler if type(sampler) in (list, tuple, range) else None
    return order, False
