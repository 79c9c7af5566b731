"""Passes over a loader: batches on the right device, with rows counted and checked."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

TargetFn = Callable[[Any], Tensor]


class Batch(NamedTuple):
    """One batch of a pass."""

    index: int
    """Position in the pass, from 0."""

    rows: Tensor
    """Row numbers in the pass, shape (B,): the key of each row's noise."""

    inputs: Any
    """What the network is called with."""

    targets: Tensor
    """y."""

    def split(self, size: int) -> Iterator[Batch]:
        """Yield the batch in pieces of at most ``size`` rows."""
        for start in range(0, len(self.rows), size):
            piece = slice(start, start + size)

            def cut(tensor: Tensor, piece: slice = piece) -> Tensor:
                return tensor[piece] if tensor.dim() and len(tensor) == len(self.rows) else tensor

            inputs = map_tensors(cut, self.inputs)
            yield Batch(self.index, self.rows[piece], inputs, self.targets[piece])


class Data:
    """A re-iterable loader; every pass must see the same number of rows.

    Batches are (inputs, targets), longer tuples that end with the targets, dicts with
    "labels", or anything that ``target_fn`` takes targets from.
    """

    def __init__(
        self, loader: Iterable[Any], device: torch.device, target_fn: TargetFn | None = None
    ):
        if isinstance(loader, Iterator):
            raise ValueError(
                "The loader is a generator or an iterator, which is exhausted after one pass; "
                "fitting takes several. Pass a DataLoader, or a list of its batches."
            )
        self._loader = loader
        self._device = device
        self._target_fn = target_fn
        self._checksum: float | None = None
        self.num_rows: int | None = None
        """N, known after the first pass."""

        self.num_targets = 0
        """Entries of all targets: N, or N C where every output has one."""

        self.num_outputs = 0
        """Entries of all outputs, N C: set by whoever sees them first."""

        self.num_passes = 0
        """Passes over the data so far."""

    def __iter__(self) -> Iterator[Batch]:
        seen, entries = 0, 0
        checksum = torch.zeros((), dtype=torch.float64, device=self._device)
        for index, batch in enumerate(self._loader):
            inputs, targets = self._split(batch)
            size = self._count(inputs, targets, index)
            rows = torch.arange(seen, seen + size, device=self._device)
            seen += size
            entries += targets.numel()
            map_tensors(lambda t: checksum.add_(_checksum(t)), inputs)
            yield Batch(index, rows, inputs, targets)
        self.num_targets = entries
        self._finish_pass(seen, checksum.item())

    def _split(self, batch: Any) -> tuple[Any, Tensor]:
        batch = map_tensors(lambda t: t.to(self._device, non_blocking=True), batch)
        targets = default_targets(batch) if self._target_fn is None else self._target_fn(batch)
        if not isinstance(targets, Tensor):
            targets = torch.as_tensor(targets)
        return inputs_of(batch), targets.to(self._device)

    def _count(self, inputs: Any, targets: Tensor, index: int) -> int:
        if targets.dim() == 0:
            raise ValueError(f"The targets of batch {index} are a single number, not one per row.")
        if isinstance(inputs, Tensor) and inputs.dim() and len(inputs) != len(targets):
            raise ValueError(
                f"Batch {index} has {len(inputs)} inputs but {len(targets)} targets: every row "
                "needs one of each."
            )
        return len(targets)

    def _finish_pass(self, rows: int, checksum: float) -> None:
        self.num_passes += 1
        if rows == 0:
            raise ValueError("The loader is empty: it yielded no rows.")
        if self.num_rows is None:
            self.num_rows, self._checksum = rows, checksum
        elif rows != self.num_rows:
            raise ValueError(
                f"The loader yielded {rows} rows in this pass but {self.num_rows} in the first. "
                "Every pass must see the same data: make the loader re-iterable and finite."
            )
        elif self._checksum is not None:
            if abs(checksum - self._checksum) > 1e-6 * max(1.0, abs(self._checksum)):
                warnings.warn(
                    "Two passes over the loader disagree: it augments at random, or drops "
                    "different rows of a shuffled set. The posterior is that of fixed data: "
                    "turn augmentation off, and drop_last too if the loader shuffles.",
                    stacklevel=2,
                )
                self._checksum = None


def _checksum(tensor: Tensor) -> Tensor:
    """A sum that the order of rows leaves alone, and any change within a row does not."""
    columns = tensor.reshape(len(tensor), -1) if tensor.dim() else tensor.reshape(1, 1)
    sums = columns.sum(0, dtype=torch.float64)
    return sums @ (torch.arange(1, len(sums) + 1, device=sums.device).double() * 0.618034).frac()


def inputs_of(batch: Any) -> Any:
    """Return what the network is called with: a batch without its targets."""
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key != "labels"}
    if isinstance(batch, (tuple, list)):
        return batch[0] if len(batch) <= 2 else tuple(batch[:-1])
    return batch


def default_targets(batch: Any) -> Tensor:
    """Return the targets of a batch (inputs, targets), (..., targets) or {"labels": ...}."""
    if isinstance(batch, Mapping) and "labels" in batch:
        return batch["labels"]
    if isinstance(batch, (tuple, list)) and len(batch) >= 2:
        return batch[-1]
    raise TypeError(
        f"No targets found in a batch of type {type(batch).__name__}: batches are (inputs, "
        'targets) or dicts with "labels"; for others pass target_fn=lambda batch: ...'
    )


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply a function to every tensor in nested tuples, lists, dicts and dataclasses."""
    if isinstance(tree, np.ndarray):
        tree = torch.from_numpy(tree)
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, value) for value in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(function, value) for value in tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        changed = {f.name: map_tensors(function, getattr(tree, f.name)) for f in fields(tree)}
        return replace(tree, **changed)
    return tree
