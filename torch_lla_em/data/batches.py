"""What people's batches are made of: tensors in tuples, dicts and objects, inputs and targets."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

TargetFn = Callable[[Any], Tensor]

_IGNORED = -100


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


def next_tokens(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the targets of a causal language model: at each token, the label after it.

    Nothing comes after the last token, whose target is -100, which ``Classification`` skips.
    """
    labels = batch["labels"] if "labels" in batch else batch["input_ids"]
    if "attention_mask" in batch:
        labels = labels.masked_fill(batch["attention_mask"] == 0, _IGNORED)
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=_IGNORED)


def default_forward(module: nn.Module, inputs: Any) -> Tensor:
    """Call a network on a tensor, a tuple or a dict; return its tensor or ``.logits``."""
    if isinstance(inputs, Mapping):
        outputs = module(**inputs)
    elif is_sequence(inputs):
        outputs = module(*inputs)
    else:
        outputs = module(inputs)
    outputs = getattr(outputs, "logits", outputs)
    if not isinstance(outputs, Tensor):
        raise TypeError(
            f"The model returned {type(outputs).__name__}, not a tensor or an object with "
            "`.logits`. Pass forward_fn=lambda model, inputs: ... that returns one tensor."
        )
    return outputs


def is_sequence(tree: Any) -> bool:
    """Whether this is a tuple or a list of several things, and no object of its own kind."""
    return isinstance(tree, (tuple, list)) and not _is_opaque(tree)


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
    if _is_opaque(tree):
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


def to_device(tree: Any, device: torch.device) -> Any:
    """Move every tensor to a device, from pinned memory to a card without waiting."""

    def move(tensor: Tensor) -> Tensor:
        # the other way, the host would read what has not arrived yet
        return tensor.to(device, non_blocking=device.type == "cuda" and tensor.device.type == "cpu")

    return map_tensors(move, tree, lambda other: other.to(device))


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


def _is_opaque(tree: Any) -> bool:
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
                "torch_lla_em.data.batches."
            )
