"""Formats of batches: inputs with their targets, and how the network is called on the inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_lla_em.data.trees import (
    Tree,
    copied,
    cut,
    is_rows,
    is_sequence,
    leaves_of,
    map_tensors,
    merged,
    tensors_in,
    to_device,
)

TargetFn = Callable[[Any], Tensor]

Tally = dict[int, tuple[int, Tensor]]
"""For each piece of the first pass, by the number of its first example: the number of outputs, and
that of labelled examples, ()."""

_IGNORED = nn.CrossEntropyLoss().ignore_index
_UNSIGNED = torch.uint16, torch.uint32, torch.uint64  # for which torch has few operations


class Batch(NamedTuple):
    """One batch of a pass."""

    index: int | str  # type: ignore[assignment]
    """Position in the pass, from 0; "0 to 9" for several batches that were joined."""

    rows: Tensor
    """Numbers of the examples, shape (B,), on the CPU: the keys of their random probes."""

    inputs: Any
    targets: Tensor
    step_rows: int = 0
    """Number of examples in the current batches of all ranks, if ranks process batches in step."""

    weights: Tensor | None = None
    """Weights of the examples, (B,), or of the targets, in their shape; None: all are 1."""

    is_kept: bool = False
    """Whether this batch stays in memory, so that every pass yields the same object."""

    tally: Tally | None = None
    """Where the first pass counts outputs and labels; a piece that is repeated counts once."""

    @property
    def place(self) -> tuple[int, int]:
        """Number of the first example, and the size; for kept batches these are the same in every
        pass."""
        return int(self.rows[:1].sum()), len(self.rows)

    def split(self, size: int) -> Iterator[Batch]:
        """Yield the batch in pieces of at most ``size`` examples, or whole if it cannot be
        split."""
        rows = len(self.rows)
        if rows <= size or cut(self.inputs, rows, slice(0, 1)) is None:
            yield self
            return
        for start in range(0, rows, size):
            yield self.part(slice(start, min(rows, start + size)))

    def part(self, piece: slice) -> Batch:
        """Return some of the examples of a batch that can be cut."""
        return self._replace(
            rows=self.rows[piece],
            inputs=cut(self.inputs, len(self.rows), piece),
            targets=self.targets[piece],
            weights=None if self.weights is None else self.weights[piece],
            is_kept=False,
        )

    def copied(self) -> Batch:
        """Return a copy of the batch."""
        return self._replace(**copied(self.tensors()))

    def on(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        return self._replace(**to_device(self.tensors(), device))

    def tensors(self) -> dict[str, Any]:
        """Return the targets, the inputs and the weights, if there are any, by name."""
        named = {"targets": self.targets, "inputs": self.inputs}
        return named if self.weights is None else {**named, "weights": self.weights}


def joined(batches: Iterable[Batch], size: int) -> Iterator[Batch]:
    """Join small batches into batches of up to ``size`` examples, if the rows of their tensors have
    equal shapes and types."""
    waiting: list[Batch] = []
    key: Any = None
    for batch in batches:
        form = form_of(batch) if len(batch.rows) < size else None
        rows = sum(len(other.rows) for other in waiting) + len(batch.rows)
        if waiting and (form is None or form != key or rows > size):
            yield _concatenated(waiting)
            waiting = []
        key = form
        if form is None:
            yield batch
        else:  # a loader may overwrite the memory of a batch before the batch is used
            waiting.append(batch.copied())
    if waiting:
        yield _concatenated(waiting)


def form_of(batch: Batch) -> Any:
    """Return a key that is equal for batches that can be merged; None if this one cannot be."""
    tensors, rows = batch.tensors(), len(batch.rows)
    if not all(is_rows(leaf, rows) for leaf in leaves_of(tensors)):
        return None
    return map_tensors(lambda tensor: (tensor.dtype, tensor.device, tensor.shape[1:]), tensors)


def _concatenated(batches: list[Batch]) -> Batch:
    first, last = batches[0], batches[-1]
    if first is last:
        return first
    rows = torch.cat([batch.rows for batch in batches])
    tensors = merged([batch.tensors() for batch in batches])
    return Batch(f"{first.index} to {last.index}", rows, **tensors)


def inputs_of(batch: Tree, targets: Tensor | None = None) -> Any:
    """Return the inputs of a batch: everything except its targets.

    ``targets`` is the tensor that a ``target_fn`` returned. If it is one of the entries, that entry
    is left out; otherwise "labels" of a dict or the last entry of a tuple is left out. Objects with
    fields are returned whole.
    """
    if isinstance(batch, Mapping):
        same = [key for key, value in batch.items() if value is targets and targets is not None]
        dropped = same or ["labels"]
        return {key: value for key, value in batch.items() if key not in dropped}
    if is_sequence(batch) and not (targets is not None and hasattr(batch, "_fields")):
        places = [i for i, value in enumerate(batch) if value is targets and targets is not None]
        last = places[-1] if places else max(1, len(batch) - 1)
        rest = tuple(value for i, value in enumerate(batch) if i != last)
        return rest[0] if len(rest) == 1 else rest
    return batch


def unlabelled(batch: Tree, num_inputs: int, target_fn: TargetFn | None = None) -> Any:
    """Return the inputs of a batch that may have no targets.

    ``num_inputs`` is the number of inputs that the network was fitted with, 0 if unknown. A tuple
    with exactly this number of entries has no targets, if there are several.
    """
    if is_sequence(batch) and len(batch) == num_inputs > 1:
        return tuple(batch)
    given = None
    if target_fn is not None and not isinstance(batch, Tensor):
        with suppress(LookupError, AttributeError):  # there are none
            given = target_fn(batch)
    return inputs_of(batch, given)


def default_targets(batch: Tree) -> Any:
    """Return the targets of a batch (inputs, targets), (..., targets) or {"labels": ...}."""
    if isinstance(batch, Mapping) and "labels" in batch:
        labels, tokens = batch["labels"], batch.get("input_ids")
        if isinstance(labels, Tensor) and isinstance(tokens, Tensor) and labels.dim() == 2:
            kept = labels != _IGNORED
            if labels.shape == tokens.shape and kept.any() and labels[kept].equal(tokens[kept]):
                raise ValueError(
                    'The "labels" are the "input_ids" themselves: a causal language model shifts '
                    "them inside its loss, which is not called here. Pass the label after each "
                    "token, adapter=Adapter(targets=lambda batch: "
                    f'torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value={_IGNORED})).'
                )
        return labels
    if is_sequence(batch) and len(batch) >= 2:
        return batch[-1]
    raise TypeError(
        f"No targets found in a batch of type {type(batch).__name__}. Batches are (inputs, "
        'targets) or dicts with "labels". If the targets have another place, construct the '
        "posterior with adapter=Adapter(targets=lambda batch: ...), which returns them. If there "
        "are none, pass them: fit(x, y)."
    )


def as_targets(targets: object) -> Tensor:
    """Convert targets to a tensor; arrays, lists of numbers and pandas columns are accepted."""
    if not isinstance(targets, Tensor):
        targets = targets.to_numpy() if hasattr(targets, "to_numpy") else targets
        try:
            targets = torch.as_tensor(targets, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"The targets are a {type(targets).__name__} that cannot be converted to a tensor "
                f"({error}). Pass numbers, and labels as class indices 0, 1, ..."
            ) from error
    return targets.long() if targets.dtype in _UNSIGNED else targets


def default_forward(module: nn.Module, inputs: Tree) -> Tensor:
    """Call a network on a tensor, a tuple or a dict; return its tensor or ``.logits``."""
    named = inputs if isinstance(inputs, Mapping) else {}
    args = tuple(inputs) if is_sequence(inputs) else () if named else (inputs,)
    try:
        outputs = module(*args, **named)
    except TypeError as error:
        with suppress(TypeError):
            signature(module.forward).bind(*args, **named)
            if tensors_in((args, named)):
                raise error
        raise TypeError(
            f"The network does not accept the inputs of a batch ({error}). Inputs are all entries "
            'of a batch except the targets, the last entry of a tuple or "labels" of a dict. '
            "Pass arrays or lists as torch.tensor(x), a list of examples as torch.stack(x), a "
            'table as torch.tensor(x.to_numpy("float32")). For batches (x, y, weight) call '
            'fit(loader, weights="last"), and predict and calibrate, with x or batches (x, y). If '
            "other entries are not inputs, pass adapter=Adapter(lambda model, inputs: "
            "model(inputs[0]), lambda batch: batch[1]). If the network takes all inputs in one "
            "list or in one dict, pass adapter=Adapter(lambda model, inputs: model(inputs))."
        ) from error
    if not isinstance(outputs, Tensor):  # asking every tensor for .logits takes longer
        outputs = getattr(outputs, "logits", outputs)
    if not isinstance(outputs, Tensor):
        raise TypeError(
            f"The model returned {type(outputs).__name__}, not a tensor or an object with "
            "`.logits`. Pass adapter=Adapter(lambda model, inputs: ...) that returns one tensor."
        )
    return outputs
