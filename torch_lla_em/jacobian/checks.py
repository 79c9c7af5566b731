"""Checks of the forward pass, and the layer that is called last."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.data import Inputs, map_tensors, tensors_in
from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.parameters import owns_weights
from torch_lla_em.runtime import report, suppressed


def checked_outputs(network: Network, names: tuple[str, ...], x: Inputs) -> Tensor:
    """Return f(x), shape (B, ..., C), after checks that it can be differentiated."""
    f, reached = _traced(network, names, x)
    again, reached_again = _traced(network, names, x)
    if not (f.ndim and f.is_floating_point()):
        raise TypeError(
            f"The outputs are {f.dtype} of shape {tuple(f.shape)}. They must be floating point, of "
            "shape (B, ..., C): for every example its logits, not its label or the loss."
        )
    if not f.isfinite().all():
        raise FloatingPointError("The outputs are not finite. Check the inputs and the weights.")
    if reached - reached_again:
        raise RuntimeError(
            f"The parameter {min(reached - reached_again)!r} is used in the first forward pass "
            "only: the model caches a tensor computed from it (in a dict, functools.cache or a "
            "global), so there is no derivative in later passes. Clear the cache, and compute the "
            "tensor in every forward pass."
        )
    change = (f.double() - again.double()).norm() / again.double().norm().clamp(min=1e-300)
    if change > math.sqrt(torch.finfo(f.dtype).eps):
        raise ValueError(
            "Two forward passes over the same inputs disagree: the model draws random numbers "
            "or keeps state in eval mode. F.dropout(x) needs training=self.training."
        )
    unused = sorted(set(names) - reached_again)
    if unused and _skips_weights(network, x):
        raise NotImplementedError(
            "The model uses reentrant activation checkpointing, which has no derivatives in "
            f"{unused[0]!r}. Pass use_reentrant=False to torch.utils.checkpoint, or switch "
            "checkpointing off."
        )
    if not reached_again:
        raise NotImplementedError(
            "The outputs do not depend on the parameters in the posterior: autograd records no "
            f"operation on {names[0]!r} or any other of them. Look for no_grad, detach or another "
            "copy of the model in the forward pass, or change `parameters`."
        )
    if unused:
        report(
            "log",
            f"The outputs do not depend on {len(unused)} of {len(names)} parameter tensors in the "
            f"posterior, for example on {unused[0]!r}. Exclude them with `parameters`. If they "
            "should matter, a cached tensor depends on them, for example in an attribute: clear "
            "it.",
        )
    return f


def _traced(network: Network, names: tuple[str, ...], x: Inputs) -> tuple[Tensor, set[str]]:
    """Return f(x), and the parameters in its graph."""
    leaves = network.leaves(names)
    with torch.enable_grad():
        f = network.outputs(x, leaves)
    ends = {id(getattr(node, "variable", None)) for node in upstream([f.grad_fn])}
    parameters = dict(network.module.named_parameters())
    elsewhere = [name for name in names if id(parameters[name]) in ends]
    if elsewhere:
        raise RuntimeError(
            f"The parameter {elsewhere[0]!r} is also used outside of the module's registered "
            "parameters, where it cannot be replaced (in a list, a cache or a second model). "
            "Register it as a parameter, or leave it out of `parameters`."
        )
    return f.detach(), {name for name, leaf in leaves.items() if id(leaf) in ends}


def _skips_weights(network: Network, x: Inputs) -> bool:
    """Whether there is a reentrant checkpoint, which is visible only by gradients of the inputs."""
    with torch.enable_grad():
        x = map_tensors(
            lambda t: t.detach().requires_grad_().clone() if t.is_floating_point() else t, x
        )
        nodes = upstream([network.outputs(x).grad_fn])
        return any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes)


def upstream(nodes: list[Any]) -> Iterator[Any]:
    """Yield these nodes of a graph, and every node from which one of them is computed."""
    nodes, seen = [*nodes], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        nodes.extend(following for following, _ in node.next_functions)


def last_layers(network: Network, x: Inputs) -> tuple[str, ...]:
    """Return the paths of the layers with weights that act on f(x) through no other such layer, in
    the order of calls.

    There are several if the network has several heads. If the graph of f(x) does not show them, as
    under ``no_grad``, the layer that is called last is returned.
    """
    layers = {layer: path for path, layer in network.module.named_modules() if owns_weights(layer)}
    calls: list[tuple[nn.Module, list[Any], list[Any]]] = []  # with the nodes of inputs and outputs

    def see(layer: nn.Module, args: object, kwargs: object, out: object) -> None:
        """Record a call, unless the layer is a container, such as a network with a class token."""
        if not any(called in layer.modules() and called is not layer for called, _, _ in calls):
            given, returned = (
                [t.grad_fn for t in tensors_in(tree)] for tree in ([args, kwargs], out)
            )
            calls.append((layer, given, returned))

    with network.guarded(), ExitStack() as hooks:
        for layer, path in layers.items():
            if "parametrizations" not in path:
                handle = layer.register_forward_hook(see, with_kwargs=True)
                hooks.callback(handle.remove)
        every = dict(network.module.named_parameters())
        names = tuple(n for n, p in every.items() if p.is_floating_point() or p.is_complex())
        # a graph that keeps no tensors takes no memory; functions of torch.func in a network do not
        # allow that
        unsaved = torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda kept: kept)
        failures: list[Exception] = []
        with suppressed(failures), torch.enable_grad(), unsaved:
            f = network.outputs(x, network.leaves(names))
        if failures:
            calls.clear()
            f = network.outputs(x)
        of_f = set(upstream([f.grad_fn]))
        acting = [call for call in calls if not of_f.isdisjoint(call[2])]
        within = set(upstream([node for _, given, _ in acting for node in given]))
        last = [layer for layer, _, returned in acting if within.isdisjoint(returned)]
    if not calls:
        raise ValueError(
            "No layer with weights is called in the forward pass, so there is no last layer. Pass "
            "`parameters=` with a list of name patterns."
        )
    if not last or not any(calls[-1][2]):  # outputs are in no graph
        last = [calls[-1][0]]
    return tuple(dict.fromkeys(layers[layer] for layer in last))


def require_rows(f: Tensor, x: Inputs) -> None:
    """Raise an error for the outputs of a single example; one number per example, (B,), is fine."""
    flat = f.dim() == 1 and any(t.dim() > 1 and len(t) == len(f) for t in tensors_in(x))
    if f.dim() < 2 and not flat:
        raise ValueError(
            f"The network returned outputs of shape {tuple(f.shape)} for these inputs, but "
            "predictions are for batches of examples, with outputs (B, ..., C): for a single "
            "example pass x[None]."
        )
