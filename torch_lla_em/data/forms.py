"""Forms of data that users pass as loaders, and the order of the examples of a ``DataLoader``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

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
from torch_lla_em.data.weights import is_pair

_EXAMPLES_AT_ONCE = 100
"""Examples of a Dataset in a batch."""


def as_loader(data: Any, target_fn: TargetFn | None = None) -> Any:
    """Return an iterable of batches that can be read repeatedly, from (X, y) or a Dataset too."""
    if isinstance(data, Iterator):
        raise ValueError(
            "The loader is a generator or an iterator, which is exhausted after one pass, but a "
            "fit needs several. Pass a DataLoader, or a list of its batches."
        )
    if target_fn is None and (is_pair(data) or (isinstance(data, Mapping) and "labels" in data)):
        return [data]
    if isinstance(data, Dataset) and not isinstance(data, Iterable):
        return DataLoader(data, _EXAMPLES_AT_ONCE)
    return data


def paired(data: Any, targets: Tensor | None) -> Any:
    """Return a loader as it is, or inputs and their targets as a list of one batch."""
    return data if targets is None else [(data, targets)]


def order_of(loader: Any, num_ranks: int) -> tuple[Sequence[Any] | None, bool]:
    """Return a dataset's examples in a fixed order, and whether the loader shuffles; None if only it can order them."""
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    if not (plain and type(loader.batch_sampler) is BatchSampler) or isinstance(
        loader.dataset, IterableDataset
    ):
        return None, False
    sampler = loader.batch_sampler.sampler
    source = getattr(sampler, "data_source", getattr(sampler, "dataset", ()))
    every = range(len(source))  # which may be fewer than those of the dataset
    if type(sampler) is RandomSampler:
        is_whole = not sampler.replacement and sampler.num_samples == len(every)
        return (every, True) if is_whole else (None, False)
    if isinstance(sampler, DistributedSampler) and num_ranks > 1:
        return every, sampler.shuffle
    if type(sampler) is SubsetRandomSampler:
        return list(sampler.indices), True
    if type(sampler) is SequentialSampler:
        return every, False
    own: Any = sampler if type(sampler) in (list, tuple, range) else None
    return own, False
