"""Reads a loader in the same order in every pass, as batches with numbered examples, and joins small ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import length_hint
from typing import Any

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

from torch_lla_em.data.batch import Batch, TargetFn, as_targets, default_targets, inputs_of
from torch_lla_em.data.identity import Identity
from torch_lla_em.data.trees import map_tensors, row_form, tensors_in, to_device
from torch_lla_em.data.weights import Weights, checked_weights, is_pair, without_weights

_REPEATED = (
    "Each of the {0} workers of the DataLoader yields all examples of its IterableDataset, so "
    "every example is read {0} times. Split the examples among workers by "
    "torch.utils.data.get_worker_info() in the dataset's __iter__, or pass num_workers=0."
)
_OTHER_SIZE = (
    "Batch {} has {} examples, but was collated from {} of the dataset. If the loader shuffles or "
    "several ranks share it, its collate_fn must keep the number of examples. Pass a list of "
    "batches instead."
)
# examples of a Dataset in a batch, and batches that are read to find one with two examples or more
_EXAMPLES_AT_ONCE, _BATCHES_AHEAD = 100, 32

# arguments of a DataLoader that it stores as attributes of the same name
_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "prefetch_factor", "persistent_workers", "pin_memory_device"),
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


def in_order(data: Any) -> Any:
    """Return a loader of the same batches; one that shuffles in the order of its dataset."""
    reader = Reader(data, torch.device("cpu"))
    reader.choose(0, 1, None)
    return reader.loader


class Reader:
    """Batches of a loader with numbered examples; each of several ranks reads its share.

    A ``DataLoader`` that shuffles is read in the order of its dataset, since the posterior does not
    depend on the order. Other loaders are read in their own order. Each of R ranks takes every R-th
    batch; a loader that cannot skip batches is read by all ranks. Of a list of fewer batches, such as the
    tensors of ``fit(x, y)``, it takes every R-th example of each.
    """

    def __init__(
        self,
        loader: Any,
        device: torch.device,
        target_fn: TargetFn | None = None,
        num_ranks: int = 1,
        weights: Weights | None = None,
    ):
        read: Any = as_loader(loader, target_fn)
        self.loader = read
        self._device, self._target_fn = device, target_fn
        self._num_ranks, self._weights = num_ranks, weights
        self._ahead: list[Batch] = []
        """The first batches, if they have been looked at before a pass."""

        self._rest: Iterator[Batch] | None = None
        """The batches after them, with which the next pass continues."""

        self.num_read = 0
        """Number of batches that were read in the last pass."""

        self.is_list = type(self.loader) in (list, tuple)
        """Whether all batches are in memory."""

        self.by_examples = self.is_list and len(self.loader) < num_ranks
        """Whether ranks share the examples of each batch, and not the batches."""

        self._order(num_ranks)

    def _order(self, num_ranks: int) -> None:
        """Find how the loader orders its examples, and read those of a dataset in a fixed order."""
        loader, sampler = self.loader, _sampler(self.loader)
        self._rows = rows = _fixed_order(loader, num_ranks)
        """The examples of the dataset in a fixed order; None if only the loader can order them."""

        self.shuffles = False
        """Whether the loader's own order is random: minibatches of SGD have one too."""

        self.keeps_order = self.is_list or rows is not None
        """Whether batches come in the order of a list, or of a dataset."""

        draws = rows is None and isinstance(sampler, (RandomSampler, WeightedRandomSampler))
        self.drawn_by = type(sampler).__name__ if draws else None
        """The sampler that may draw other examples in every pass."""

        streams = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
        self._num_workers = loader.num_workers if streams else 0
        """How many workers each iterate over a dataset of their own."""

        if rows is not None:
            in_turn = type(sampler) in (SequentialSampler, list, tuple, range)
            self.shuffles = getattr(sampler, "shuffle", not in_turn)
            self._size = loader.batch_size or 1
            self._num_rows = len(rows) - len(rows) % self._size if loader.drop_last else len(rows)
            self._chosen: list[list[Any]] = []  # the batches of a pass
            options = {name: getattr(loader, name, None) for name in _OPTIONS}
            self.loader = DataLoader(
                loader.dataset,
                batch_sampler=self._chosen,
                generator=torch.Generator(device="cpu"),
                **{name: value for name, value in options.items() if value},
            )
        elif num_ranks > 1 and isinstance(sampler, DistributedSampler):
            raise ValueError(
                "The loader has a DistributedSampler and a custom way of making batches, so "
                "examples that the sampler repeats cannot be skipped. Pass a DataLoader with "
                "a batch_size, or one without a DistributedSampler."
            )

    def choose(self, first: int, step: int, seed: int | None) -> Sequence[Tensor] | None:
        """Choose every ``step``-th batch of a dataset from ``first`` on; return their examples' numbers.

        ``seed`` selects another order, if the loader shuffles. None if the loader orders its examples.
        """
        if self._rows is None:
            return None
        order = torch.arange(self._num_rows, device="cpu")
        if seed is not None and self.shuffles:
            generator = torch.Generator(device="cpu").manual_seed(seed)
            order = torch.randperm(self._num_rows, generator=generator, device="cpu")
        parts = order.split(self._size)[first::step] if self._num_rows else ()
        self._chosen[:] = [[self._rows[number] for number in part.tolist()] for part in parts]
        in_turn = step == 1 and (seed is None or not self.shuffles)
        return None if in_turn else parts

    def num_batches(self) -> int:
        """Return the number of batches of a pass over all ranks; 0 if it is not known without one."""
        return length_hint(self.loader) if self._rows is None else -(-self._num_rows // self._size)

    def first(self) -> Batch | None:
        """Return the first batch of two examples or more, or small batches joined to one.

        The next pass of a single process continues after these batches, so that the loader and its
        workers are started only once.
        """
        if not self._ahead:
            self._rest = self.batches(0, 1)
            for batch in islice(self._rest, _BATCHES_AHEAD):
                # others may write to the same memory again
                self._ahead.append(batch if self.is_list else batch.copied())
                if len(batch.rows) > 1:
                    break
        several = (batch for batch in joined(self._ahead, 2) if len(batch.rows) > 1)
        return next(several, self._ahead[0] if self._ahead else None)

    def changes(self) -> bool:
        """Whether the first batch has other content when it is read again, although its order is fixed."""
        if self.is_list or not self.keeps_order or not self._ahead:
            return False
        if getattr(self.loader, "persistent_workers", False):
            self._rest = None  # it would go on with the workers that start anew here
        each = [Identity(same_batches=True) for _ in range(2)]
        for identity, batch in zip(each, (self._ahead[0], next(self.batches(0, 1)))):
            identity.add(tuple(batch.tensors().values()))
        return not each[0].agrees(each[1])

    def begin(self, share: int, seed: int | None) -> Iterable[Batch]:
        """Return the batches of a pass, of which the first may have been looked at."""
        rest, self._rest = self._rest, None
        if self._num_ranks == 1 and rest is not None:
            return chain(tuple(self._ahead), rest)
        return self.batches(share, self._num_ranks, seed)

    def batches(self, first: int, step: int, seed: int | None = None) -> Iterator[Batch]:
        """Yield every ``step``-th batch of the loader; ``seed`` selects another order of examples."""
        self.num_read = seen = 0
        workers = [Identity() for _ in range(self._num_workers)]
        parts, skips = self.choose(first, step, seed), self._rows is not None
        for count, raw in enumerate(self.loader):
            place = first + count * step if skips else count
            is_others = not skips and place % step != first  # another rank's
            if is_others and not self.by_examples:
                raw, _ = without_weights(raw, self._weights)
                seen += len((self._target_fn or default_targets)(raw))
                continue
            inputs, targets, weights = self._split(raw)
            size = _checked_size(inputs, targets, place)
            if not size:
                continue
            numbers = (
                torch.arange(seen, seen + size, device="cpu") if parts is None else parts[count]
            )
            if len(numbers) != size:
                raise ValueError(_OTHER_SIZE.format(place, size, len(numbers)))
            seen, self.num_read = seen + size, self.num_read + 1
            if len(workers) > 1:
                workers[place % len(workers)].add((targets, inputs))
            batch = Batch(place, numbers, inputs, targets, weights=weights)
            if self.by_examples and step > 1:
                can_be_cut = row_form(batch.tensors(), size) is not None
                if not can_be_cut and is_others:
                    continue
                batch = batch.part(slice(first, None, step)) if can_be_cut else batch
            if len(batch.rows):
                yield batch
        if len(workers) > 1 and all(w.num_rows and w.agrees(workers[0]) for w in workers):
            raise ValueError(_REPEATED.format(len(workers)))

    def _split(self, batch: Any) -> tuple[Any, Tensor, Tensor | None]:
        """Return inputs, targets and weights; moved to the device only if a ``target_fn`` is called."""
        batch, weights = without_weights(batch, self._weights)
        given = None
        if self._target_fn is None:
            batch = map_tensors(lambda tensor: tensor, batch)
            targets = as_targets(default_targets(batch))
        else:
            batch = to_device(batch, self._device)
            given = self._target_fn(batch)
            targets = as_targets(given)
        if callable(self._weights):  # which may index a tensor on the CPU
            weights = self._weights(targets if given is None else targets.cpu())
        inputs = inputs_of(batch, given)
        return inputs, targets, None if weights is None else checked_weights(weights, targets)


def _checked_size(inputs: Any, targets: Tensor, index: int) -> int:
    """Return the number of examples of a batch; raise if there are more inputs than targets or fewer."""
    if targets.dim() == 0:
        raise ValueError(f"The targets of batch {index} are a single number, not one per example.")
    if isinstance(inputs, Tensor) and inputs.dim() and len(inputs) != len(targets):
        raise ValueError(
            f"Batch {index} has {len(inputs)} inputs but {len(targets)} targets: every example "
            "needs one of each."
        )
    return len(targets)


def joined(batches: Iterable[Batch], size: int) -> Iterator[Batch]:
    """Join small batches into batches of up to ``size`` examples.

    Only batches in which every tensor has a row for every example are joined.
    """
    waiting: list[Batch] = []
    key: Any = None
    for batch in batches:
        form = row_form(batch.tensors(), len(batch.rows))
        alone = form is None or len(batch.rows) >= size
        rows = sum(len(other.rows) for other in waiting) + len(batch.rows)
        if waiting and (alone or form != key or rows > size):
            yield _concatenated(waiting)
            waiting = []
        if alone:
            yield batch
            continue
        key = form
        # a loader may overwrite the memory of a batch before the batch is used
        waiting.append(batch.copied())
    if waiting:
        yield _concatenated(waiting)


def _concatenated(batches: list[Batch]) -> Batch:
    """Concatenate batches of the same format."""
    first, last = batches[0], batches[-1]
    if first is last:
        return first
    columns = [tensors_in(batch.tensors()) for batch in batches]
    whole = iter([torch.cat(column) for column in zip(*columns)])
    tensors = map_tensors(lambda _: next(whole), first.tensors())
    rows = torch.cat([batch.rows for batch in batches])
    return Batch(f"{first.index} to {last.index}", rows, **tensors)


def _fixed_order(loader: Any, num_ranks: int) -> Sequence[Any] | None:
    """Return the examples of a loader's dataset in a fixed order, None if only it can order them."""
    if not (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and type(loader.batch_sampler) is BatchSampler
        and not isinstance(loader.dataset, IterableDataset)
    ):
        return None
    sampler = _sampler(loader)
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
