"""Finds weights that act only by products z = W a + b, and computes the factors of their
Jacobian."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

from torch_lla_em.data import Inputs
from torch_lla_em.jacobian.checks import upstream
from torch_lla_em.jacobian.factors import ByFactors, Dense, Lookup, Outer, Term
from torch_lla_em.jacobian.linearised import Intercepted
from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.parameters import ParameterLayout
from torch_lla_em.jacobian.rows import Ways, num_examples

# number of outputs per example above which the backward passes cost more than they save
_MOST_OUTPUTS = 512
# operations by which a network may return its last layer's outputs without changing them
_VIEWS = "PermuteBackward0", "ViewBackward0", "AliasBackward0"

_CONVS = F.conv1d, F.conv2d
_OF_CONV = "input", "weight", "bias", "stride", "padding", "dilation", "groups"
_OF_EMBEDDING = "input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq"
_ARGUMENTS: dict[Callable[..., Any], tuple[str, ...]] = {
    F.linear: ("input", "weight", "bias"),
    F.embedding: (*_OF_EMBEDDING, "sparse"),
    **dict.fromkeys(_CONVS, _OF_CONV),
}


class Call(NamedTuple):
    """One product z = W a + b, or a lookup of rows a of a table W."""

    names: tuple[str, ...]  # of W, and of b if it is in the posterior
    weight_shape: torch.Size
    given: Tensor
    version: int  # of the input at the time of the call
    edge: GradientEdge  # at which gradients in z arrive, even if z is changed in place later
    shape: torch.Size  # of z
    conv: tuple[Any, ...] | None  # stride, padding, dilation and groups
    padding_idx: int | None  # the row of an embedding that gets no gradient
    is_lookup: bool

    def outputs(self, z: Tensor, rows: int) -> Tensor:
        """Return gradients in z, (d, *z.shape), as (rows, d, groups, channels, places)."""
        if self.conv is None:
            return z.reshape(len(z), rows, 1, -1, z.shape[-1]).mT.transpose(0, 1)
        groups = self.conv[3]
        z = z.reshape(len(z), rows, -1, groups, z.shape[2] // groups, prod(z.shape[3:]))
        return z.permute(1, 0, 3, 4, 2, 5).flatten(4)

    def inputs(self, rows: int) -> Tensor:
        """Return a as (rows, groups, channels × kernel, places), or (rows, channels); a lookup as
        (rows, places)."""
        a = self.given.detach()
        if self.is_lookup:
            return a.reshape(rows, -1)
        if self.conv is None and a.shape[:-1] == (rows,):
            return a
        if self.conv is None:
            return a.reshape(rows, 1, -1, a.shape[-1]).mT
        *options, groups = self.conv
        kernel: Any = self.weight_shape[2:]
        n = len(kernel)
        per_axis: list[Any] = [
            (own,) * n if isinstance(own, (int, str)) else tuple(own) * (n // len(own))
            for own in options
        ]
        stride, padding, dilation = per_axis
        if padding[0] == "same":
            totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
            a = F.pad(a, [side for t in reversed(totals) for side in (t // 2, t - t // 2)])
        padding = (0,) * n if isinstance(padding[0], str) else padding
        if n == 1:  # treated as images with one line
            a, kernel, dilation = a.unsqueeze(2), (1, *kernel), (1, *dilation)
            padding, stride = (0, *padding), (1, *stride)
        a = F.unfold(a, kernel, dilation, padding, stride)
        a = a.view(rows, -1, groups, a.shape[1] // groups, a.shape[2])  # with repeats
        return a.permute(0, 2, 3, 1, 4).flatten(3)

    def is_output(self, f: Tensor) -> bool:
        """Whether f is the result of this call, or a view of it whose last axis has all
        channels."""
        channels = self.shape[-1 if self.conv is None else 1]
        is_whole = f.dim() > 1 and f.shape[-1] == channels and self.shape.numel() == f.numel()
        node = f.grad_fn if is_whole and not self.is_lookup else None
        while node is not None and node != self.edge.node and type(node).__name__ in _VIEWS:
            node = node.next_functions[0][0]
        return node == self.edge.node

    def is_dense(self, a: Tensor, D: int) -> bool:
        """Whether columns of J take less arithmetic than factors, and no more than four times the
        memory."""
        if a.dim() == 2:
            return False
        rows, G, I, T = a.shape
        O = self.shape.numel() // (rows * G * T)
        return T > 1 and min(O * T * (I + D), 4 * T * (I + D * O)) >= D * O * I

    def columns(self, z: Tensor, a: Tensor, is_dense: bool) -> Tensor:
        """Return J, or its factor B, for gradients of some outputs, (rows, d, ...)."""
        if a.dim() == 2 and not self.is_lookup:
            return z.transpose(0, 1)
        z = self.outputs(z, len(a))
        if self.padding_idx is not None:
            z = z * (a != self.padding_idx)[:, None, None, None]
        if not is_dense:
            return z.flatten(2)
        # one product for all outputs: broadcasting over them would copy the inputs for each
        J = (z.transpose(1, 2).flatten(2, 3) @ a.mT).unflatten(2, (z.shape[1], z.shape[3]))
        J = J.transpose(1, 2).flatten(2)
        return J if len(self.names) == 1 else torch.cat([J, z.sum(-1).flatten(2)], 2)


def _recorded(
    network: Network, layout: ParameterLayout, x: Inputs, shared: tuple[str, ...]
) -> tuple[Tensor, list[Call], bool]:
    """Return f(x), the calls at which its graph ends, and whether weights are also used in other
    ways.

    A lookup in a ``shared`` table, such as that of positions, is the same for all rows, and is
    repeated for each of them.
    """
    leaves = network.leaves(layout.names)
    names = {id(leaf): name for name, leaf in leaves.items()}
    calls: list[Call] = []

    def see(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func not in _ARGUMENTS:
            return func(*args, **kwargs)
        given = dict(zip(_ARGUMENTS[func], args, strict=False)) | kwargs
        x, W = given["input"], given["weight"]
        weight, bias = (names.get(id(given.get(part))) for part in ("weight", "bias"))
        if weight is None or (func in _CONVS and x.dim() != W.dim()):
            return func(**given)
        if func is F.embedding and weight in shared:
            x = torch.atleast_2d(x)
            x = given["input"] = x.expand(rows, *x.shape[1:])
        for part, name in (("weight", weight), ("bias", bias)):
            if name is not None:  # cut off the graph, but autograd continues to record it
                given[part] = given[part].detach().requires_grad_()
        version, z = x._version, func(**given)
        if z.requires_grad:  # not under no_grad
            conv = None
            if func in _CONVS:
                options = zip(_OF_CONV[3:], (1, 0, 1, 1), strict=True)
                conv = tuple(given.get(name, usual) for name, usual in options)
            padding = given.get("padding_idx")
            padding = None if padding is None else padding % len(W)
            used, edge = (weight,) if bias is None else (weight, bias), get_gradient_edge(z)
            is_lookup = func is F.embedding
            calls.append(Call(used, W.shape, x, version, edge, z.shape, conv, padding, is_lookup))
        return z

    rows = num_examples(x)
    with torch.enable_grad(), Intercepted(see):
        f = network.outputs(x, leaves)
    reached = {id(getattr(node, "variable", None)) for node in upstream([f.grad_fn])}
    return f, calls, not reached.isdisjoint(names)


def find(
    network: Network, layout: ParameterLayout, x: Inputs, ways: Ways
) -> tuple[Ways, int] | None:
    """Return the names of the weights that have an influence, the shared tables, and the number of
    multiplications by weights, if all weights act by products at x.

    For a table the number is the size of its gradient. One example is not enough to decide. If one
    weight acts in another way, factors of the rest are not worth it: on a tiny BERT they saved .4
    of 5.1 s.
    """
    f, calls, others = _recorded(network, layout, x, ways.shared)
    used = {name for call in calls for name in call.names}
    if len(f) < 2 or others or not used or not f.requires_grad:
        return None
    if f[0].numel() > _MOST_OUTPUTS and not all(call.is_output(f) for call in calls):
        return None
    u, generator = torch.zeros_like(f), torch.Generator("cpu").manual_seed(0)
    u[0] = torch.randn(f[0].shape, generator=generator, device="cpu").to(f)
    grads = torch.autograd.grad(f, [call.edge for call in calls], u, allow_unused=True)
    multiplications = 0
    for call, z in zip(calls, grads, strict=True):
        W, size = call.weight_shape, call.shape.numel()
        multiplications += size + W.numel() if call.is_lookup else size * W[1:].numel()
        # gradients of the first row's outputs are 0 at all other rows
        if z is None or not (len(z) % len(f) or call.outputs(z[None], len(f))[1:].any()):
            continue
        if call.is_lookup and call.names[0] not in ways.shared:
            shared = (*ways.shared, *call.names)
            return find(network, layout, x, ways._replace(shared=shared))
        return None
    return ways._replace(names=tuple(sorted(used))), multiplications


def by_factors(
    network: Network,
    layout: ParameterLayout,
    x: Inputs,
    ways: Ways,
    keep: bool = False,
    at_once: int | None = None,
) -> ByFactors | None:
    """Return the linear model at x, by one backward pass for each output; None if a weight is used
    in another way than at the first batch.

    Factors that are stored (``keep``) share no memory with other tensors.
    """
    f, calls, others = _recorded(network, layout, x, ways.shared)
    as_before = all(
        call.given._version == call.version and set(call.names) <= set(ways.names) for call in calls
    )
    if others or not f.requires_grad or not as_before:
        return None
    B, D, best = len(f), f[0].numel(), ways.columns(x, at_once)
    given = [call.inputs(B) for call in calls]
    ends = [call.is_output(f) for call in calls]  # these calls need no backward pass
    dense = [not e and call.is_dense(a, D) for call, a, e in zip(calls, given, ends, strict=True)]
    pieces: list[list[Tensor]] = [[] for _ in calls]
    inner = [i for i, end in enumerate(ends) if not end]

    def pull(u: Tensor) -> dict[int, Tensor]:
        """Return the gradients at the calls that have an influence."""
        edges = [calls[i].edge for i in inner]
        grads = torch.autograd.grad(f, edges, u, retain_graph=True, allow_unused=True)
        return {i: z for i, z in zip(inner, grads, strict=True) if z is not None}

    if inner:
        one = torch.eye(D, dtype=f.dtype, device=f.device).view(D, 1, *f.shape[1:])
        u, step = one.expand(D, *f.shape), best or D
        for some in [u] if step >= D else u.split(step):
            # torch.func.vmap, since is_grads_batched takes convolutions one by one
            few = len(some) == 1
            for i, z in (pull(some[0]) if few else torch.vmap(pull)(some)).items():
                z = z[None] if few else z
                pieces[i].append(calls[i].columns(z, given[i], dense[i]))
    parts: list[Term] = []
    for call, a, is_dense, end, block in zip(calls, given, dense, ends, pieces, strict=True):
        if not block and not end:  # no influence
            continue
        b = None if end else block[0] if len(block) == 1 else torch.cat(block, 1)
        if b is not None and is_dense:
            sizes = [call.weight_shape.numel(), call.weight_shape[0]]
            parts.append(Dense(call.names, sizes[: len(call.names)], b))
        elif b is not None and call.is_lookup:
            parts.append(Lookup(call.names, call.weight_shape, a, b))
        else:
            a = a[:, 0, :, 0] if a.dim() == 4 and a.shape[1] == a.shape[3] == 1 else a
            parts.append(Outer(call.names, a.clone() if keep else a, b))
    # products by factors hold the outputs of these layers, without places that a `Dense` has summed
    # over
    widths = [
        f[0].numel(),
        *(t.b.shape[2] for t in parts if not isinstance(t, Dense) and t.b is not None),
    ]
    of_one = ways.example_bytes and max(widths) * f.itemsize
    most = ways._replace(example_bytes=of_one).columns(x, at_once)
    return ByFactors(layout, f.detach(), parts, most)
