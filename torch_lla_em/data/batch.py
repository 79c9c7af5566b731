"""Batches as people have them: what is in them, and their pieces."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

TargetFn = Callable[[Any], Tensor]

_IGNORED = -100
_UNSIGNED = torch.uint16, torch.uint32, torch.uint64


class Batch(NamedTuple):
    """One batch of a pass."""

    index: int | str  # type: ignore[assignment]
    """Position in the pass, from 0; "0 to 9" where several were joined."""

    rows: Tensor
    """Row numbers in the pass, shape (B,), on the CPU: the key of each row's noise."""

    inputs: Any
    """What the network is called with."""

    targets: Tensor
    """y."""

    step_rows: int = 0
    """Rows of all ranks' batches, where they go step by step."""

    position: int = 0
    """Rows of this rank before it in the pass."""

    kept: Any = None
    """The kept pass that it is of, in which it comes again at its place."""

    whole: Any = None
    """The batch that it is a piece of, and where it begins there."""

    @property
    def place(self) -> tuple[int, int]:
        """The first of its rows, and how many: the same at every pass over kept batches."""
        return int(self.rows[:1].sum()), len(self.rows)

    def split(self, size: int, first: int | None = None) -> Iterator[Batch]:
        """Yield the batch in pieces of at most ``size`` rows, or whole if it has no rows to cut.

        ``first`` is the size of the first piece, where that is another.
        """
        rows, first = len(self.rows), size if first is None else first
        if rows <= first or cut(self.inputs, rows, slice(0, 1)) is None:
            yield self
            return
        starts = [0, *range(first, rows, size)]
        for start, end in zip(starts, [*starts[1:], rows]):
            piece = slice(start, end)
            yield self._replace(
                rows=self.rows[piece],
                inputs=cut(self.inputs, rows, piece),
                targets=self.targets[piece],
                position=self.position + start,
                whole=None,
            )

    def on(self, device: torch.device) -> tuple[Batch, Callable[[], None]]:
        """Return the batch on a device, and a wait till what it left may be written to again."""
        (inputs, targets), wait = sent((self.inputs, self.targets), device)
        return self._replace(inputs=inputs, targets=targets), wait


def inputs_of(batch: Any, targets: Tensor | None = None) -> Any:
    """Return what the network is called with: a batch without its targets.

    ``targets`` is what a ``target_fn`` returned: the entry that it is, if it is one, is left
    out; else "labels" of a dict and the last of a tuple. Objects with fields stay whole.
    """
    if isinstance(batch, Mapping):
        own = [key for key, value in batch.items() if value is targets and targets is not None]
        dropped = own or ["labels"]
        return _like(batch, {key: value for key, value in batch.items() if key not in dropped})
    if is_sequence(batch) and not (targets is not None and hasattr(batch, "_fields")):
        own = [i for i, value in enumerate(batch) if value is targets and targets is not None]
        last = own[-1] if own else max(1, len(batch) - 1)
        rest = tuple(value for i, value in enumerate(batch) if i != last)
        return rest[0] if len(rest) == 1 else rest
    return batch


def default_targets(batch: Any) -> Any:
    """Return the targets of a batch (inputs, targets), (..., targets) or {"labels": ...}."""
    if isinstance(batch, Mapping) and "labels" in batch:
        _refuse_unshifted(batch)
        return batch["labels"]
    if is_sequence(batch) and len(batch) >= 2:
        return batch[-1]
    raise TypeError(
        f"No targets found in a batch of type {type(batch).__name__}: batches are (inputs, "
        'targets) or dicts with "labels"; for others pass target_fn=lambda batch: ...'
    )


def split(batch: Any, target_fn: TargetFn | None, device: torch.device) -> tuple[Any, Tensor]:
    """Return inputs and targets; both wait where they are unless a ``target_fn`` takes them."""
    if target_fn is None:
        batch = map_tensors(lambda tensor: tensor, batch)
        targets, inputs = default_targets(batch), inputs_of(batch)
    else:
        batch = to_device(batch, device)
        targets = target_fn(batch)
        inputs = inputs_of(batch, targets)
    return inputs, as_targets(targets)


def as_targets(targets: Any) -> Tensor:
    """Return targets as a tensor: those of arrays, lists of numbers and columns of pandas too."""
    if targets is None:
        raise TypeError(
            "The targets are None: batches are (inputs, targets), with one target or more an "
            "example; a target_fn must return them."
        )
    if not isinstance(targets, Tensor):
        targets = targets.to_numpy() if hasattr(targets, "to_numpy") else targets
        try:
            targets = torch.as_tensor(targets, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"The targets are a {type(targets).__name__} that cannot be made a tensor "
                f"({error}): pass numbers, and labels as class indices 0, 1, ..."
            ) from error
    # of which torch knows little more than that they are there
    return targets.long() if targets.dtype in _UNSIGNED else targets


def num_rows(batch: Any, target_fn: TargetFn | None) -> int:
    """Return the rows of a batch that stays where it is."""
    return len((target_fn or default_targets)(batch))


def check_rows(inputs: Any, targets: Tensor, index: int, listed: int | None) -> int:
    """Return the rows of a batch; refuse inputs and targets that are not one of each."""
    if targets.dim() == 0:
        raise ValueError(f"The targets of batch {index} are a single number, not one per row.")
    if isinstance(inputs, Tensor) and inputs.dim() and len(inputs) != len(targets):
        raise ValueError(
            f"Batch {index} has {len(inputs)} inputs but {len(targets)} targets: every row "
            "needs one of each."
        )
    if listed not in (None, len(targets)):
        raise ValueError(
            f"Batch {index} has {len(targets)} rows, made of {listed} of the dataset: "
            "several ranks can only share out data whose rows go one to one."
        )
    return len(targets)


def next_tokens(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the targets of a causal language model: at each token, the label after it.

    Nothing comes after the last token, whose target is -100, which ``Classification`` skips.
    """
    labels = batch["labels"] if "labels" in batch else batch["input_ids"]
    if "attention_mask" in batch:
        labels = labels.masked_fill(batch["attention_mask"] == 0, _IGNORED)
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=_IGNORED)


def is_sequence(tree: Any) -> bool:
    """Whether this is a tuple or a list of several things, and no object of its own kind."""
    return isinstance(tree, (tuple, list)) and not is_opaque(tree)


def map_tensors(
    function: Callable[[Tensor], Any], tree: Any, opaque: Callable[[Any], Any] | None = None
) -> Any:
    """Apply a function to every tensor in nested tuples, lists, dicts and dataclasses.

    ``opaque`` is applied to objects that move themselves (``.to``), such as packed
    sequences and graphs.
    """
    if isinstance(tree, np.ndarray) and tree.dtype.kind in "biufc":
        tree = torch.from_numpy(tree)
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return _like(tree, {k: map_tensors(function, v, opaque) for k, v in tree.items()})
    if is_opaque(tree):
        return tree if opaque is None else opaque(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, value, opaque) for value in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(function, value, opaque) for value in tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        settable = [f.name for f in fields(tree) if f.init]
        return replace(
            tree, **{name: map_tensors(function, getattr(tree, name), opaque) for name in settable}
        )
    return tree


def tensors_in(tree: Any) -> list[Tensor]:
    """Return every tensor that ``map_tensors`` finds."""
    found: list[Tensor] = []
    map_tensors(found.append, tree)
    return found


def copied(tree: Any) -> Any:
    """Return the tree with a copy of every tensor, and of objects that know how to copy themselves."""
    return map_tensors(torch.clone, tree, _cloned)


def _cloned(tree: Any) -> Any:
    clone = getattr(tree, "clone", None)
    return clone() if callable(clone) else tree


def to_device(tree: Any, device: torch.device) -> Any:
    """Move every tensor to a device."""
    moved, wait = sent(tree, device)
    wait()
    return moved


def sent(tree: Any, device: torch.device) -> tuple[Any, Callable[[], None]]:
    """Move every tensor to a device; return a wait till the memory left may be written to again.

    From pinned memory copies to a card go on while the host does, which may fill that memory
    with the next batch. What is not pinned has been read once the call returns.
    """
    pinned = False

    def move(tensor: Tensor) -> Tensor:
        nonlocal pinned
        # the other way, the host would read what has not arrived yet
        ahead = device.type == "cuda" and tensor.device.type == "cpu"
        pinned = pinned or (ahead and tensor.layout == torch.strided and tensor.is_pinned())
        return tensor.to(device, non_blocking=ahead)

    moved = map_tensors(move, tree, lambda other: other.to(device))
    if not pinned:
        return moved, lambda: None
    return moved, torch.cuda.current_stream(device).record_event().synchronize


def cut(tree: Any, size: int, piece: slice) -> Any | None:
    """Return these of ``size`` rows, or None where nothing in the inputs goes by rows."""
    found = False

    def take(tensor: Tensor) -> Tensor:
        nonlocal found
        if tensor.layout != torch.strided or not tensor.dim() or len(tensor) != size:
            return tensor
        found = True
        return tensor[piece]

    taken = map_tensors(take, tree)
    if found:
        return taken
    # a list of sentences, say
    return tree[piece] if isinstance(tree, list) and len(tree) == size else None


def is_opaque(tree: Any) -> bool:
    """Whether this is an object that moves itself, such as a graph or a packed sequence."""
    return callable(getattr(tree, "to", None)) and not isinstance(tree, (Tensor, Mapping, type))


def _like(tree: Mapping, items: dict[Any, Any]) -> Any:
    """Return these items in a mapping of the same kind, where that can be done."""
    if isinstance(tree, UserDict):  # a Hugging Face BatchEncoding, whose keys are attributes
        other = tree.copy() if type(tree) is UserDict else _shallow(tree)
        other.data = items
        return other
    return items


def _shallow(tree: UserDict) -> UserDict:
    other = object.__new__(type(tree))
    vars(other).update(vars(tree))
    return other


def _refuse_unshifted(batch: Mapping[str, Any]) -> None:
    labels, tokens = batch["labels"], batch.get("input_ids")
    if not isinstance(labels, Tensor) or not isinstance(tokens, Tensor):
        return
    if labels.dim() == 2 and labels.shape == tokens.shape:
        kept = labels != _IGNORED
        if kept.any() and torch.equal(labels[kept], tokens[kept]):
            raise ValueError(
                'The "labels" are the "input_ids" themselves: a causal language model shifts them '
                "inside its loss, which is not called here. Pass target_fn=next_tokens, from "
                "torch_lla_em.data."
            )
