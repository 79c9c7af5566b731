"""Loaders of users: the order of their examples, and the share of each rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import length_hint
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
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from torch_lla_em.data.batch import TargetFn

_EXAMPLES_AT_ONCE = 100

# arguments of a DataLoader that it stores as attributes of the same name
_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
)


def as_loader(data: Any, target_fn: TargetFn | None = None) -> Iterable[Any]:
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
    if not isinstance(data, Iterable):
        raise TypeError(
            f"The loader is a {type(data).__name__}, which cannot be iterated over. Pass a "
            "DataLoader, or a list of batches such as [(X, y)]."
        )
    return data


def paired(data: Any, targets: Tensor | None) -> Any:
    """Return a loader as it is, or inputs and their targets as a list of one batch."""
    return data if targets is None else [(data, targets)]


def is_pair(data: Any) -> bool:
    """Whether this is (X, y): a list of two batches without targets cannot be fitted."""
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        return False
    kinds = Tensor, np.ndarray
    arrays = all(isinstance(p, kinds) or hasattr(p, "to_numpy") for p in data)
    arrays = arrays and all(part.ndim for part in data)
    return arrays and len(data[0]) == len(data[1])


class Source:
    """A loader in the same order in every pass, whose batches are distributed among ranks.

    A ``DataLoader`` that shuffles is read in the order of its dataset, since the posterior does not
    depend on the order. Other loaders are read in their own order. Each of R ranks takes every R-th
    batch; a loader that cannot skip batches is read by all ranks. Of a list of fewer batches, such as the
    tensors of ``fit(x, y)``, it takes every R-th example of each.
    """

    def __init__(self, loader: Any, num_ranks: int = 1):
        self.loader = loader
        self._own: _OwnBatches | None = None
        self.shuffles = False
        """Whether the loader's own order is random: minibatches of SGD have one too."""

        sampler, rows = _sampler(loader), fixed_order(loader, num_ranks)
        self.is_list = type(loader) in (list, tuple)
        """Whether all batches are in memory."""

        self.by_examples = self.is_list and len(loader) < num_ranks
        """Whether ranks share the examples of each batch, and not the batches."""

        self.keeps_order = self.is_list or rows is not None
        """Whether batches come in the order of a list, or of a dataset."""

        draws = rows is None and isinstance(sampler, (RandomSampler, WeightedRandomSampler))
        self.drawn_by = type(sampler).__name__ if draws else None
        """The sampler that may draw other examples in every pass."""

        streams = isinstance(loader, DataLoader) and not _has_rows(loader)
        self.num_workers = loader.num_workers if streams else 0
        """How many workers each iterate over a dataset of their own."""

        if rows is not None:
            in_turn = type(sampler) in (SequentialSampler, list, tuple, range)
            self.shuffles = getattr(sampler, "shuffle", not in_turn)
            self._own = _OwnBatches(rows, loader.batch_size or 1, loader.drop_last)
            options = {name: getattr(loader, name, None) for name in _OPTIONS}
            self.loader = DataLoader(
                loader.dataset,
                batch_sampler=self._own,
                generator=torch.Generator(device="cpu"),
                **{name: value for name, value in options.items() if value},
            )
        elif num_ranks > 1 and isinstance(sampler, DistributedSampler):
            raise ValueError(
                "The loader has a DistributedSampler and a custom way of making batches, so "
                "examples that the sampler repeats cannot be skipped. Pass a DataLoader with "
                "a batch_size, or one without a DistributedSampler."
            )

    def num_batches(self) -> int:
        """Return the number of batches of a pass over all ranks; 0 if it is not known without one."""
        return length_hint(self.loader) if self._own is None else self._own.num_batches

    def batches(
        self, first: int, step: int, seed: int | None
    ) -> Iterator[tuple[int, Tensor | None, Any]]:
        """Yield every ``step``-th batch of one pass, starting with batch ``first``.

        A batch comes with its position and the numbers of its examples. These are None if they
        continue those of the batch before. A loader that cannot skip batches yields all of them.
        ``seed`` selects another order, if the loader shuffles.
        """
        if self._own is None:
            for place, batch in enumerate(self.loader):
                yield place, None, batch
            return
        chosen = self._own.choose(first, step, seed if self.shuffles else None)
        in_turn = step == 1 and (seed is None or not self.shuffles)
        for number, (rows, batch) in enumerate(zip(chosen, self.loader)):
            yield first + number * step, None if in_turn else rows, batch


def in_order(data: Any) -> Any:
    """Return a loader of the same batches; one that shuffles in the order of its dataset."""
    source = Source(as_loader(data))
    if source._own is not None:
        source._own.choose(0, 1, None)
    return source.loader


class _OwnBatches:
    """The batch sampler of one pass: lists of a dataset's examples."""

    def __init__(self, rows: Sequence[Any], size: int, drop_last: bool):
        self._rows, self._size = rows, size
        self.num_rows = len(rows) - len(rows) % size if drop_last else len(rows)
        self.num_batches = -(-self.num_rows // size)
        self._chosen: Sequence[Tensor] = ()

    def choose(self, first: int, step: int, seed: int | None) -> Sequence[Tensor]:
        """Choose every ``step``-th batch from ``first`` on; ``seed`` None: in the order of the data.

        Return the numbers of the examples of each.
        """
        order = torch.arange(self.num_rows, device="cpu")
        if seed is not None:
            generator = torch.Generator(device="cpu").manual_seed(seed)
            order = torch.randperm(self.num_rows, generator=generator, device="cpu")
        self._chosen = order.split(self._size)[first::step] if self.num_rows else ()
        return self._chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def __iter__(self) -> Iterator[list[Any]]:
        for numbers in self._chosen:
            yield [self._rows[number] for number in numbers.tolist()]


def fixed_order(loader: Any, num_ranks: int) -> Sequence[Any] | None:
    """Return the examples of a loader's dataset in a fixed order, None if only it can order them."""
    listed = (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and type(loader.batch_sampler) is BatchSampler
        and _has_rows(loader)
    )
    sampler = _sampler(loader) if listed else None
    if type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    ):
        return range(len(sampler.data_source))
    if isinstance(sampler, DistributedSampler) and num_ranks > 1:
        return range(len(sampler.dataset))  # type: ignore[arg-type]
    if type(sampler) is SubsetRandomSampler:
        return list(sampler.indices)
    return sampler if type(sampler) in (list, tuple, range) else None


def _sampler(loader: Any) -> Any:
    """Return the sampler below a loader's batches."""
    batches = getattr(loader, "batch_sampler", None)
    return getattr(loader if batches is None else batches, "sampler", None)


def _has_rows(loader: DataLoader) -> bool:
    return not isinstance(loader.dataset, IterableDataset)
