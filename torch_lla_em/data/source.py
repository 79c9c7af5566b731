"""The batches of a loader in a fixed order: each example has a number, and each rank its share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import length_hint
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from torch_lla_em.data.batch import (
    Batch,
    TargetFn,
    as_targets,
    default_targets,
    form_of,
    inputs_of,
)
from torch_lla_em.data.forms import (
    Inputs,
    Loader,
    Weights,
    are_batches,
    as_loader,
    checked_weights,
    order_of,
    without_weights,
)
from torch_lla_em.data.trees import Tree, as_tensors, to_device

# arguments of a DataLoader that it stores as attributes of the same name
_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "prefetch_factor", "persistent_workers", "pin_memory_device"),
)


def inputs_in_order(data: Inputs | Loader) -> Any:
    """Return a loader of batches that may have no targets; one that shuffles is read in the order
    of its dataset.

    Two arrays of one form in a list are two batches; otherwise a pair of arrays is (X, y).
    """
    return data if are_batches(data) else Source(data, torch.device("cpu")).loader


class Source:
    """A loader of labelled batches, read in the order of its dataset, which is the same in every
    pass."""

    def __init__(
        self,
        data: Inputs | Loader,
        device: torch.device,
        target_fn: TargetFn | None = None,
        weights: Weights | None = None,
        num_ranks: int = 1,
    ):
        self.loader = loader = as_loader(data, target_fn)
        self._device, self._target_fn, self._weights = device, target_fn, weights
        self.is_list = type(loader) in (list, tuple)
        self.by_examples = self.is_list and len(loader) < num_ranks
        """Whether ranks share the examples of each batch, and not the batches."""

        self._order, self._shuffles = order_of(loader, num_ranks)
        """The indices of a dataset in the order of every pass, and whether the minibatches of SGD
        are random."""

        self.is_ordered = self._order is not None
        """Whether the order is that of a dataset, so that no pass is needed to know it."""

        if self._order is not None:
            self._size, count = loader.batch_size or 1, len(self._order)
            self._num_rows = count - (count % self._size if loader.drop_last else 0)
            self._chosen: list[list[Any]] = []  # the batches of a pass
            options = {name: getattr(loader, name, None) for name in _OPTIONS}
            self.loader = DataLoader(
                loader.dataset,
                batch_sampler=self._chosen,
                generator=torch.Generator(device="cpu"),
                **{name: value for name, value in options.items() if value},
            )
            self._choose(0, 1)

    def num_batches(self) -> int:
        """Return the number of batches of a pass over all ranks; 0 if it is not known without
        one."""
        return length_hint(self.loader) if self._order is None else -(-self._num_rows // self._size)

    def read(self, first: int, step: int, seed: int = 0) -> Iterator[Batch]:
        """Yield every ``step``-th batch of the loader, with its examples' numbers."""
        seen, parts = 0, self._choose(first, step, seed)
        for count, raw in enumerate(self.loader):
            place = count if parts is None else first + count * step
            is_others = parts is None and count % step != first  # another rank's
            if is_others and not self.by_examples:
                if self._weights == "last":
                    raw, _ = without_weights(raw)
                seen += len((self._target_fn or default_targets)(raw))
                continue
            inputs, targets, weights = self._split(raw)
            if not targets.dim():
                raise TypeError(
                    f"Batch {place} of the loader is a single example: its targets are one number. "
                    "Loaders yield batches: pass DataLoader(dataset, batch_size=256), where the "
                    "dataset can be a list of examples, or tensors, fit(x, y)."
                )
            if isinstance(inputs, Tensor) and inputs.dim() and len(inputs) != len(targets):
                raise ValueError(
                    f"Batch {place} has {len(inputs)} inputs but {len(targets)} targets: every "
                    "example needs one of each."
                )
            numbers = torch.arange(seen, seen + len(targets), device="cpu")
            seen += len(targets)
            if parts is not None and len(parts[count]) != len(numbers):
                raise ValueError(
                    f"Batch {place} has {len(numbers)} examples, but was collated from "
                    f"{len(parts[count])} of the dataset: its collate_fn must keep their number. "
                    "Pass a list of batches instead."
                )
            numbers = numbers if parts is None else parts[count]
            batch = Batch(place, numbers, inputs, targets, weights=weights)
            if self.by_examples and step > 1:
                can_be_cut = form_of(batch) is not None
                if not can_be_cut and is_others:
                    continue
                batch = batch.part(slice(first, None, step)) if can_be_cut else batch
            if len(batch.rows):
                yield batch

    def _choose(self, first: int, step: int, seed: int = 0) -> Sequence[Tensor] | None:
        """Choose every ``step``-th batch of a dataset from ``first`` on; return their examples'
        numbers.

        ``seed`` selects another order, if the loader shuffles. The result is None for all examples
        of the loader in its order.
        """
        if self._order is None:
            return None
        numbers = torch.arange(self._num_rows, device="cpu")
        moved = bool(seed) and self._shuffles
        if moved:
            generator = torch.Generator(device="cpu").manual_seed(seed)
            numbers = torch.randperm(self._num_rows, generator=generator, device="cpu")
        parts = numbers.split(self._size)[first::step] if self._num_rows else ()
        self._chosen[:] = [[self._order[number] for number in part.tolist()] for part in parts]
        return parts if step > 1 or moved else None

    def _split(self, batch: Tree) -> tuple[Any, Tensor, Tensor | None]:
        """Return inputs, targets and weights; moved to the device only if a ``target_fn`` is
        called."""
        given = weights = None
        if self._weights == "last":
            batch, weights = without_weights(batch)
        if self._target_fn is None:
            batch = as_tensors(batch)
            targets = as_targets(default_targets(batch))
        else:
            batch = to_device(batch, self._device)
            given = self._target_fn(batch)
            targets = as_targets(given)
        if callable(self._weights):  # the function may index a tensor on the CPU
            weights = self._weights(targets if given is None else targets.cpu())
        inputs = inputs_of(batch, given)
        return inputs, targets, None if weights is None else checked_weights(weights, targets)
