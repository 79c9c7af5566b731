"""Nested tuples, lists and dicts of tensors: their tensors, devices and rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

Tree = object
"""A tensor, or nested tuples, lists and mappings of tensors and of other objects."""


class Movable(Protocol):
    """An object that moves to a device, such as a graph or a packed sequence."""

    def to(self, device: Any, /) -> Any:
        """Return the object on a device."""


def as_tensors(tree: Tree) -> Any:
    """Return a tree with tensors for arrays, and dicts for other mappings, such as batches of
    transformers."""

    def at(leaf: object) -> Any:
        if isinstance(leaf, Mapping):
            return {name: as_tensors(part) for name, part in leaf.items()}
        is_array = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc"
        return torch.from_numpy(leaf) if is_array else leaf

    return tree_map(at, tree, is_leaf=is_opaque)


def map_tensors(function: Callable[..., Any], tree: Tree, *others: Tree) -> Any:
    """Apply a function to every tensor of a tree, together with the values at the same place of
    other trees. All other leaves are kept."""

    def at(leaf: object, *rest: Any) -> Any:
        return function(leaf, *rest) if isinstance(leaf, Tensor) else leaf

    return tree_map(at, tree, *others, is_leaf=is_opaque)


def merged(trees: Sequence[Any]) -> Any:
    """Return the rows of trees of one form as one tree."""
    return map_tensors(lambda *parts: torch.cat(parts), *trees)


def rows_of(tree: Tree, rows: Tensor | slice) -> Any:
    """Return some rows of every tensor of a tree."""
    if isinstance(rows, slice):
        return map_tensors(lambda tensor: tensor[rows], tree)
    return map_tensors(lambda tensor: tensor[rows.to(tensor.device)], tree)


def leaves_of(tree: Tree) -> list[Any]:
    """Return every leaf of a tree, tensors and others."""
    return tree_leaves(tree, is_leaf=is_opaque)


def tensors_in(tree: Tree) -> list[Tensor]:
    """Return every tensor of a tree."""
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


def copied(tree: Tree) -> Any:
    """Return the tree with a copy of every tensor, and of objects that have a method ``clone``."""
    if isinstance(tree, Tensor):
        return tree.clone()
    return tree_map(
        lambda x: x.clone() if callable(getattr(x, "clone", None)) else x, tree, is_leaf=is_opaque
    )


def to_device(tree: Tree, device: torch.device) -> Any:
    """Return a tree ``as_tensors`` on a device, with objects that have a method ``to``."""

    def move(leaf: object) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf.to(device) if is_opaque(leaf) else leaf
        # do not wait for the GPU, unless the memory is pinned: a loader may fill it again before
        # the copy has ended
        plain = leaf.device.type == "cpu" and leaf.layout == torch.strided
        waits = device.type != "cuda" or (plain and leaf.is_pinned())
        return leaf.to(device, non_blocking=not waits)

    return tree_map(move, as_tensors(tree), is_leaf=is_opaque)


def cut(tree: Tree, size: int, rows: slice) -> Any | None:
    """Return some of the rows of a tree with ``size`` rows; None if nothing in it has that many."""
    if any(is_rows(leaf, size) for leaf in leaves_of(tree)):
        return map_tensors(lambda tensor: tensor[rows] if is_rows(tensor, size) else tensor, tree)
    # a list of sentences, for example
    return tree[rows] if isinstance(tree, list) and len(tree) == size else None


def is_rows(leaf: object, size: int) -> TypeGuard[Tensor]:
    """Whether this is a dense tensor with a row for each of ``size`` examples."""
    if not isinstance(leaf, Tensor) or leaf.layout != torch.strided or leaf.is_nested:
        return False
    return leaf.dim() > 0 and len(leaf) == size


def is_sequence(tree: Tree) -> TypeGuard[tuple[Any, ...] | list[Any]]:
    """Whether this is a tuple or list without a method ``to`` of its own."""
    return isinstance(tree, (tuple, list)) and not is_opaque(tree)


def is_opaque(tree: Tree) -> TypeGuard[Movable]:
    """Whether this is an object with a method ``to``, such as a graph or a packed sequence."""
    return callable(getattr(tree, "to", None)) and not isinstance(tree, (Tensor, Mapping, type))
