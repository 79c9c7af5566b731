"""Loaders as people pass them: the order of their examples, and each rank's share of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

from torch_lla_em.data.batch import TargetFn, as_targets, default_targets, inputs_of

_EXAMPLES_AT_ONCE = 100

# what a DataLoader was built with, and keeps under the same name
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


class Chain:
    """Several loaders, one after the other, at every pass."""

    def __init__(self, loaders: Sequence[Iterable[Any]]):
        self.loaders = tuple(loaders)

    def __iter__(self) -> Iterator[Any]:
        for loader in self.loaders:
            yield from loader

    def __deepcopy__(self, memo: dict[int, Any]) -> Chain:
        return self

    def __reduce__(self) -> tuple[type[Chain], tuple[tuple[()]]]:
        """Leave the data out of pickles."""
        return Chain, ((),)


class Weighed:
    """A loader whose examples have weights: yields (inputs, targets and weights in one tensor)."""

    def __init__(
        self,
        loader: Any,
        weights: Tensor | str | Callable[[Tensor], Tensor],
        target_fn: TargetFn | None,
    ):
        if isinstance(weights, str) and weights != "last":
            raise ValueError(
                f'weights={weights!r}: pass "last" where batches end with their weights, a tensor '
                "beside inputs and targets, or a function of the targets."
            )
        if not (callable(weights) or isinstance(weights, str)):
            # fit(x, y) passes a list of one batch
            loader = loader[0] if isinstance(loader, list) and len(loader) == 1 else loader
            if not is_pair(loader):
                raise TypeError(
                    "A tensor of weights goes with inputs and targets: fit(x, y, weights=w). For a "
                    'loader, have batches end with their weights and pass weights="last".'
                )
            loader, weights = [(*loader, torch.as_tensor(weights, device="cpu"))], "last"
        self.loader, self._weights, self._target_fn = as_loader(loader), weights, target_fn

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        return map(self.packed, self.loader)

    def packed(self, batch: Any) -> tuple[Any, Tensor]:
        """Return a batch of the loader as inputs, and targets with their weights."""
        weights = self._weights
        if not callable(weights):
            if not isinstance(batch, (tuple, list)) or len(batch) < 3:
                raise TypeError(
                    'With weights="last" batches are (inputs, targets, weights), not a '
                    f"{type(batch).__name__}."
                )
            *batch, weights = batch
        given = None if self._target_fn is None else self._target_fn(batch)
        y = as_targets(default_targets(batch) if given is None else given)
        return inputs_of(batch, given), _packed(y, weights(y) if callable(weights) else weights)


def _packed(y: Tensor, weights: Any) -> Tensor:
    """Return targets and weights, (*y.shape, 2), in double precision, which holds any label."""
    w = torch.as_tensor(weights, dtype=torch.float64, device=y.device)
    if w.shape not in (y.shape, y.shape[:1]):
        raise ValueError(
            f"The weights have shape {tuple(w.shape)}, but the targets {tuple(y.shape)}: pass one "
            "weight for each example, or for each label."
        )
    if not (torch.isfinite(w).all() and (w >= 0).all()):
        raise ValueError("Weights must be finite and not negative.")
    w = w.reshape(*w.shape, *(1,) * (y.dim() - w.dim())).expand(y.shape)
    return torch.stack([y.double(), w], -1)


def as_loader(data: Any, target_fn: TargetFn | None = None) -> Iterable[Any]:
    """Return an iterable of batches that can be read repeatedly, from (X, y) or a Dataset too."""
    if isinstance(data, Iterator):
        raise ValueError(
            "The loader is a generator or an iterator, which is exhausted after one pass; "
            "fitting takes several. Pass a DataLoader, or a list of its batches."
        )
    if target_fn is None and (is_pair(data) or (isinstance(data, Mapping) and "labels" in data)):
        return [data]
    if isinstance(data, Dataset) and not isinstance(data, Iterable):
        return DataLoader(data, _EXAMPLES_AT_ONCE)
    if not isinstance(data, Iterable):
        raise TypeError(
            f"The loader is a {type(data).__name__}, which cannot be iterated over: pass a "
            "DataLoader, or a list of batches, as [(X, y)]."
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
    """A loader in an order that is the same at every pass, shared out among ranks by batches.

    A ``DataLoader`` that shuffles reads the same examples in the order of its dataset, since the
    posterior does not depend on their order. Other loaders come in the order that they have. Several
    ranks each take every R-th batch; a loader that cannot skip batches is read by all of them.
    """

    def __init__(self, loader: Any, num_ranks: int = 1):
        weighed = loader if isinstance(loader, Weighed) else None
        self._convert: Callable[[Any], Any] = weighed.packed if weighed else lambda batch: batch
        self.loader: Any = loader if weighed is None else weighed.loader
        self._own: _OwnBatches | None = None
        self.shuffles = False
        """Whether the loader's own order is random: minibatches of SGD have one too."""

        rows = fixed_order(self.loader, num_ranks)
        self.is_list = type(self.loader) in (list, tuple)
        """Whether all batches are in memory."""

        self.keeps_order = self.is_list or rows is not None
        """Whether batches come in the order of a list, or of a dataset."""

        self.num_rows = 0
        """Number of examples in the last pass, of all ranks; 0 if all batches were read in turn."""

        own = _sampler(self.loader)
        if rows is None:
            if num_ranks > 1 and isinstance(own, DistributedSampler):
                raise ValueError(
                    "The loader has a DistributedSampler, but makes batches in its own way, so that "
                    "examples which the sampler repeats cannot be left out: pass a DataLoader with a "
                    "batch_size, or one without a DistributedSampler."
                )
        elif num_ranks > 1 or type(own) is not SequentialSampler:
            in_turn = type(own) in (SequentialSampler, list, tuple, range)
            self.shuffles = getattr(own, "shuffle", not in_turn)
            inner: Any = self.loader
            self._own = _OwnBatches(rows, inner)
            options = {n: getattr(self.loader, n, None) for n in _OPTIONS}
            self.loader = DataLoader(
                inner.dataset,
                batch_sampler=self._own,
                generator=torch.Generator(device="cpu"),
                **{name: value for name, value in options.items() if value},
            )

    @property
    def num_workers(self) -> int:
        """Return how many workers each iterate over a dataset of their own."""
        streams = isinstance(self.loader, DataLoader) and not _has_rows(self.loader)
        return self.loader.num_workers if streams else 0

    def num_batches(self) -> int | None:
        """Return the number of batches of a pass over all ranks, if it is known without one."""
        try:
            return len(self.loader) if self._own is None else self._own.num_batches
        except TypeError:
            return None

    @property
    def size(self) -> str:
        """Return the size of the loader in words, "" if it is not known without a pass."""
        if self._own is not None:
            return f"{self._own.num_rows} examples"
        number = self.num_batches()
        return "" if number is None else f"{number} batches"

    def batches(
        self, first: int, step: int, count: Callable[[Any], int], seed: int | None = None
    ) -> Iterator[tuple[int, Tensor | int | None, Any]]:
        """Yield every ``step``-th batch of one pass from batch ``first`` on.

        With its place and the numbers of its examples, or the first of them; None if they follow
        those of the batch before. ``count`` returns the number of examples of a batch that is left
        out. ``seed``: of another order, if the loader shuffles.
        """
        if self._own is not None:
            own, seed = self._own, seed if self.shuffles else None
            own.begin(first, step, seed)
            in_turn = step == 1 and seed is None
            self.num_rows = 0 if in_turn else own.num_rows
            for place, batch in zip(range(first, own.num_batches, step), self.loader):
                yield place, None if in_turn else own.numbers(place), self._convert(batch)
            return
        self.num_rows = 0
        for place, batch in enumerate(self.loader):
            converted = self._convert(batch)
            if place % step == first:
                yield place, self.num_rows if step > 1 else None, converted
            self.num_rows += count(converted) if step > 1 else 0


class _OwnBatches:
    """Lists of the examples of every ``step``-th batch, from batch ``first`` on."""

    def __init__(self, rows: Sequence[Any], loader: DataLoader):
        self._rows, self._size = rows, loader.batch_size or 1
        whole, rest = divmod(len(rows), self._size)
        self.num_batches = whole + (rest > 0 and not loader.drop_last)
        self.num_rows = whole * self._size if loader.drop_last else len(rows)
        self.begin(0, 1)

    def begin(self, first: int, step: int, seed: int | None = None) -> None:
        """Choose the batches of a pass, and the seed of their order, None for that of the data."""
        self._places, self._order = range(first, self.num_batches, step), None
        if seed is not None:
            generator = torch.Generator(device="cpu").manual_seed(seed)
            self._order = torch.randperm(self.num_rows, generator=generator, device="cpu")

    def numbers(self, place: int) -> Tensor:
        """Return the numbers of the examples of a batch."""
        start, end = place * self._size, min((place + 1) * self._size, self.num_rows)
        every = torch.arange(start, end, device="cpu")
        return every if self._order is None else self._order[every]

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[list[Any]]:
        for place in self._places:
            yield [self._rows[number] for number in self.numbers(place).tolist()]


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
