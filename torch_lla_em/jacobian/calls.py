"""Records the products z = W a + b of a network's weights in one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.rows import num_examples

# what a network may do to its last layer's outputs without changing them
_VIEWS = "PermuteBackward0", "ViewBackward0", "AliasBackward0"


class Call(NamedTuple):
    """One product z = W a + b, or a lookup of rows a of a table W."""

    weight: str | None
    """The name of W; None if it is not in the posterior."""

    bias: str | None
    weight_shape: torch.Size
    given: Tensor
    version: int
    """Version counter of the input at the time of the call."""

    edge: GradientEdge
    """The node at which gradients with respect to z arrive, even if z is changed in place later."""

    shape: torch.Size
    """Shape of z."""

    conv: tuple | None = None
    """Stride, padding, dilation and groups."""

    padding_idx: int | None = None
    """The row of an embedding that gets no gradient (padding)."""

    @property
    def names(self) -> list[str]:
        """The names of the weight and the bias, if they are in the posterior."""
        return [name for name in (self.weight, self.bias) if name is not None]

    @property
    def sizes(self) -> list[int]:
        """The numbers of their entries."""
        both = (self.weight, self.weight_shape.numel()), (self.bias, self.weight_shape[0])
        return [size for name, size in both if name is not None]

    @property
    def is_lookup(self) -> bool:
        return not self.given.is_floating_point()

    @property
    def multiplications(self) -> int:
        """Number of multiplications by the weight in a forward pass; for a table, its gradient's size."""
        if self.is_lookup:
            return self.shape.numel() + self.weight_shape.numel()
        return self.shape.numel() * self.weight_shape[1:].numel()

    @property
    def is_kept(self) -> bool:
        """Whether the input has not been changed in place."""
        return self.given._version == self.version

    def outputs(self, z: Tensor, rows: int) -> Tensor:
        """Return gradients in z, (D, *z.shape), as (D, rows, groups, channels, places)."""
        if self.conv is None:
            return z.reshape(len(z), rows, 1, -1, z.shape[-1]).mT
        groups = self.conv[3]
        z = z.reshape(len(z), rows, -1, groups, z.shape[2] // groups, prod(z.shape[3:]))
        return z.permute(0, 1, 3, 4, 2, 5).flatten(4)

    def inputs(self, rows: int) -> Tensor:
        """Return a as (rows, groups, channels × kernel, places), a lookup as (rows, places)."""
        a = self.given.detach()
        if self.is_lookup:
            return a.reshape(rows, -1)
        if self.conv is None:
            return a.reshape(rows, 1, -1, a.shape[-1]).mT
        stride, padding, dilation, groups = self.conv
        kernel = self.weight_shape[2:]
        a = _padded(a, kernel, padding, dilation)
        for d, size in enumerate(kernel):
            a = a.unfold(2 + d, (size - 1) * dilation[d] + 1, stride[d])[..., :: dilation[d]]
        n = len(kernel)
        a = a.reshape(rows, -1, groups, a.shape[1] // groups, *a.shape[2:])
        # rows, groups, channels, kernel, repeats, places
        a = a.permute(0, 2, 3, *range(4 + n, 4 + 2 * n), 1, *range(4, 4 + n))
        return a.flatten(2, 2 + n).flatten(3)

    def is_output(self, f: Tensor) -> bool:
        """Whether f is what was returned, but for a view whose last axis has all channels."""
        channels = self.shape[-1 if self.conv is None else 1]
        if (
            self.is_lookup
            or f.dim() < 2
            or f.shape[-1] != channels
            or self.shape.numel() != f.numel()
        ):
            return False
        node = f.grad_fn
        while node is not None and node != self.edge.node and type(node).__name__ in _VIEWS:
            node = node.next_functions[0][0]
        return node == self.edge.node

    def first_row_alone(self, z: Tensor, rows: int) -> bool:
        """Whether in a gradient (1, *z.shape) of the first row's outputs all other rows are zero."""
        return not (z.shape[1] % rows or self.outputs(z, rows)[:, 1:].any())


def _padded(a: Tensor, kernel: torch.Size, padding: Any, dilation: tuple[int, ...]) -> Tensor:
    if padding == "valid":
        return a
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        sides = [(p, p) for p in padding]
    return F.pad(a, [p for side in reversed(sides) for p in side]) if any(map(any, sides)) else a


class _Recorder(TorchFunctionMode):
    """Records the products of some weights, and cuts the weights themselves off the graph."""

    def __init__(self, leaves: dict[str, Tensor], shared: Container[str], rows: int):
        super().__init__()
        self._shared, self._rows = shared, rows
        self._names = {id(leaf): name for name, leaf in leaves.items()}
        # they require gradients, so that autograd records a graph
        self._aliases = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
        self.calls: list[Call] = []
        self._seen: dict[Callable, Callable] = {
            F.linear: self._linear,
            F.embedding: self._embedding,
            **{conv: partial(self._conv, conv) for conv in (F.conv1d, F.conv2d, F.conv3d)},
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        return self._seen.get(func, func)(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._note(partial(F.linear, input), (weight, bias), input)

    def _conv(
        self,
        conv: Callable[..., Tensor],
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        def run(W: Tensor, b: Tensor | None) -> Tensor:
            return conv(input, W, b, stride, padding, dilation, groups)

        n = weight.dim() - 2
        if input.dim() != n + 2:
            return run(weight, bias)
        each = [s if isinstance(s, str) else _each(s, n) for s in (stride, padding, dilation)]
        return self._note(run, (weight, bias), input, conv=(*each, groups))

    def _embedding(
        self,
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        if self._names.get(id(weight)) in self._shared:
            input = torch.atleast_2d(input)
            input = input.expand(self._rows, *input.shape[1:])

        def run(W: Tensor, _: None) -> Tensor:
            return F.embedding(input, W, padding_idx, *args, **kwargs)

        padding = None if padding_idx is None else padding_idx % len(weight)
        return self._note(run, (weight, None), input, padding_idx=padding)

    def _note(
        self, run: Callable[..., Tensor], weights: tuple, given: Tensor, **kind: Any
    ) -> Tensor:
        """Return the result of ``run`` for aliases of the weights, and record the call."""
        weight, bias = names = [self._names.get(id(tensor)) for tensor in weights]
        if names == [None, None]:
            return run(*weights)
        version = given._version
        z = run(*(self._aliases.get(name, tensor) for name, tensor in zip(names, weights)))
        if z.requires_grad:  # not under no_grad
            shape, edge = weights[0].shape, get_gradient_edge(z)
            self.calls.append(Call(weight, bias, shape, given, version, edge, z.shape, **kind))
        return z


def _each(value: Any, n: int) -> tuple[int, ...]:
    return (value,) * n if isinstance(value, int) else tuple(value) * (n // len(value))


def recorded(
    network: Network, names: tuple[str, ...], x: Any, shared: Container[str] = ()
) -> tuple[Tensor, list[Call], set[str]]:
    """Return f(x), the calls at which its graph ends, and the weights that are also used otherwise.

    A lookup in one of the ``shared`` tables serves all rows, such as that of positions. Here it is
    repeated for each row.
    """
    leaves = {name: w.detach().requires_grad_() for name, w in network.weights(names).items()}
    with torch.enable_grad(), _Recorder(leaves, shared, num_examples(x)) as recorder:
        f = network.function(x)(leaves)
    reached = {id(getattr(node, "variable", None)) for node in nodes_of(f)}
    return f, recorder.calls, {name for name, leaf in leaves.items() if id(leaf) in reached}


def nodes_of(f: Tensor) -> Iterator[Any]:
    """Yield every node of the graph of f."""
    nodes, seen = [f.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        nodes.extend(following for following, _ in node.next_functions)
