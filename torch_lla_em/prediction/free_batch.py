"""Graphs recorded at one batch size, rewritten to take any.

torch's own symbolic sizes end where derivatives are taken in C++. So the same computation is recorded
at B and at B + 1 examples; a number that differs between the graphs is linear in the batch size, and
is computed from it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

aten = torch.ops.aten


class FixedBatchError(ValueError):
    """A program can only take the batch size that it was recorded at."""


def batch_size(x: Any) -> int:
    """Return how many examples inputs hold, or raise if their tensors disagree."""
    sizes = {len(leaf) for leaf in pytree.tree_leaves(x) if _is_batched(leaf)}
    if len(sizes) != 1:
        raise FixedBatchError(f"the inputs have first axes of the sizes {sorted(sizes)}")
    return sizes.pop()


def resized(x: Any, size: int) -> Any:
    """Return inputs with so many examples, repeated if need be."""
    at = torch.arange(size, device="cpu") % batch_size(x)
    return pytree.tree_map(lambda leaf: leaf[at.to(leaf.device)] if _is_batched(leaf) else leaf, x)


def record(function: Callable[[Any], Any], x: Any) -> GraphModule:
    """Return the operations of a function at x, derivatives among them, for this batch size."""
    return make_fx(function, decomposition_table=_PLAIN)(x)


def record_free(function: Callable[[Any], Any], x: Any) -> GraphModule:
    """Return the operations of a function for any batch size, or raise ``FixedBatchError``."""
    size = max(batch_size(x), 2)  # operations treat an axis of size 1 in their own ways
    at, next_at = (record(function, resized(x, n)) for n in (size, size + 1))
    inputs = [node for node in at.graph.nodes if node.op == "placeholder"]
    batched = [_is_batched(leaf) for leaf in pytree.tree_leaves(x)]
    with at.graph.inserting_after(inputs[-1]):
        count = at.graph.call_function(aten.sym_size.int, (inputs[batched.index(True)], 0))
    nodes = [node for node in at.graph.nodes if node is not count]
    others = list(next_at.graph.nodes)
    if [(n.op, n.target) for n in nodes] != [(n.op, n.target) for n in others]:
        raise FixedBatchError("the network does other operations with one more example")
    for node, other in zip(nodes, others):
        constants = [
            getattr(g, n.target) for g, n in ((at, node), (next_at, other)) if n.op == "get_attr"
        ]
        if constants and not torch.equal(*constants):
            raise FixedBatchError("the network makes constants of the batch size")
        with at.graph.inserting_before(node):
            node.args = _freed(node.args, other.args, count, size)
            node.kwargs = _freed(node.kwargs, other.kwargs, count, size)
    at.graph.eliminate_dead_code()
    at.recompile()
    return at


def _freed(value: Any, other: Any, count: Node, size: int) -> Any:
    """Return an argument with numbers that differ as functions of the batch size."""
    if isinstance(value, Node):
        return value
    if isinstance(value, dict):
        return {key: _freed(each, other[key], count, size) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and len(value) == len(other):
        return type(value)(_freed(*pair, count, size) for pair in zip(value, other))
    if type(value) is int and type(other) is int and value != other:
        slope = other - value
        scaled = count.graph.call_function(operator.mul, (count, slope))
        return count.graph.call_function(operator.add, (scaled, value - slope * size))
    if value != other:
        raise FixedBatchError(f"{value} becomes {other} with one more example")
    return value


def _is_batched(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _zeros_with_axes_of(like: Tensor, other: Tensor, *, self_num_batch_dims: int = 0) -> Tensor:
    return like.new_zeros([*like.shape[:self_num_batch_dims], *other.shape])


# operations that torch.export or ONNX does not know, by plain ones
_PLAIN: dict[Any, Callable[..., Any]] = {
    aten._new_zeros_with_same_feature_meta.default: _zeros_with_axes_of,
    aten._efficientzerotensor.default: lambda size, **kwargs: torch.zeros(size, **kwargs),
    aten.sort.stable: lambda x, *, stable, **kwargs: torch.sort(x, **kwargs),
}
