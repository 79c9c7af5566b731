"""Nested tuples, lists, dicts and dataclasses of tensors: their tensors, devices and rows."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor


def map_tensors(
    function: Callable[[Tensor], Any], tree: Any, opaque: Callable[[Any], Any] | None = None
) -> Any:
    """Apply a function to every tensor in nested tuples, lists, dicts and dataclasses.

    ``opaque`` is applied to objects that have a method ``to`` of their own, such as packed
    sequences and graphs.
    """
    if isinstance(tree, np.ndarray) and tree.dtype.kind in "biufc":
        tree = torch.from_numpy(tree)
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return like(tree, {k: map_tensors(function, v, opaque) for k, v in tree.items()})
    if is_opaque(tree):
        return tree if opaque is None else opaque(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, value, opaque) for value in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(function, value, opaque) for value in tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in fields(tree) if field.init]
        return replace(
            tree, **{name: map_tensors(function, getattr(tree, name), opaque) for name in names}
        )
    return tree


def tensors_in(tree: Any) -> list[Tensor]:
    """Return every tensor that ``map_tensors`` finds."""
    found: list[Tensor] = []
    map_tensors(found.append, tree)
    return found


def copied(tree: Any) -> Any:
    """Return the tree with a copy of every tensor, and of objects that have a method ``clone``."""

    def clone(other: Any) -> Any:
        own = getattr(other, "clone", None)
        return own() if callable(own) else other

    return map_tensors(torch.clone, tree, clone)


def to_device(tree: Any, device: torch.device) -> Any:
    """Move every tensor to a device."""
    if isinstance(tree, Tensor):
        return tree.to(device)
    moved, wait = sent(tree, device)
    wait()
    return moved


def sent(tree: Any, device: torch.device) -> tuple[Any, Callable[[], None]]:
    """Move every tensor to a device; return a function that waits until the copies are complete.

    Copies from pinned memory to a GPU are asynchronous: the memory they read from must not be
    written to before that.
    """
    pinned = False

    def move(tensor: Tensor) -> Tensor:
        nonlocal pinned
        # copies to the CPU have to be complete before the CPU reads them
        asynchronous = device.type == "cuda" and tensor.device.type == "cpu"
        pinned = pinned or (asynchronous and tensor.layout == torch.strided and tensor.is_pinned())
        return tensor.to(device, non_blocking=asynchronous)

    moved = map_tensors(move, tree, lambda other: other.to(device))
    if not pinned:
        return moved, lambda: None
    return moved, torch.cuda.current_stream(device).record_event().synchronize


def cut(tree: Any, size: int, piece: slice) -> Any | None:
    """Return a slice of ``size`` rows, or None if no tensor of the inputs has so many rows."""
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
    # a list of sentences, for example
    return tree[piece] if isinstance(tree, list) and len(tree) == size else None


def row_form(tree: Any, rows: int) -> Any:
    """Return a key that is equal for batches that can be concatenated; None if this one cannot be."""
    if isinstance(tree, Tensor):
        whole = tree.layout == torch.strided and tree.dim() and not tree.is_nested
        return (tree.dtype, tree.device, tree.shape[1:]) if whole and len(tree) == rows else None
    if isinstance(tree, Mapping):
        parts = {key: row_form(value, rows) for key, value in tree.items()}
        return None if not parts or None in parts.values() else parts
    if is_sequence(tree):
        several = [row_form(part, rows) for part in tree]
        return None if not several or None in several else several
    return None


def is_sequence(tree: Any) -> bool:
    """Whether this is a plain tuple or list, not a named tuple or another subclass."""
    return isinstance(tree, (tuple, list)) and not is_opaque(tree)


def is_opaque(tree: Any) -> bool:
    """Whether this is an object with a method ``to``, such as a graph or a packed sequence."""
    return callable(getattr(tree, "to", None)) and not isinstance(tree, (Tensor, Mapping, type))


def like(tree: Mapping, items: dict[Any, Any]) -> Any:
    """Return these items as a mapping of the same kind if it is a ``UserDict``, otherwise as a dict.

    The ``BatchEncoding`` of Hugging Face is a ``UserDict``, whose keys are attributes too.
    """
    if not isinstance(tree, UserDict):
        return items
    other = object.__new__(type(tree))
    vars(other).update(vars(tree))
    other.data = items
    return other
