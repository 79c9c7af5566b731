"""Checks of the forward pass, and the layer that causes an error."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.data import map_tensors, tensors_in
from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.parameters import owns_weights
from torch_lla_em.jacobian.recorded import nodes_of
from torch_lla_em.runtime import report


def checked_outputs(network: Network, names: tuple[str, ...], x: Any) -> Tensor:
    """Return f(x), shape (B, ..., C), after checks that it can be differentiated."""
    f, reached, _ = _traced(network, names, x)
    again, reached_again, elsewhere = _traced(network, names, x)
    _check_outputs(network, f, x)
    if elsewhere:
        raise RuntimeError(
            f"The parameter {min(elsewhere)!r} is also used outside of the module's "
            "registered parameters, where it cannot be replaced (in a list, a closure or a "
            "second model). Register it as a parameter, or leave it out of `parameters`."
        )
    if reached - reached_again:
        raise RuntimeError(
            f"The parameter {min(reached - reached_again)!r} is used in the first forward pass only: the "
            "model caches a tensor computed from it (in an attribute, functools.cache or a global), so "
            "there is no derivative in later passes. Clear the cache, and compute the tensor in "
            "every forward pass."
        )
    change = (f.double() - again.double()).norm() / again.double().norm().clamp(min=1e-300)
    if change > math.sqrt(torch.finfo(f.dtype).eps):
        raise ValueError(
            "Two forward passes over the same inputs disagree, first in "
            f"{_first_layer(network, x, lambda a, b: bool((a != b).any()))}: it draws random numbers "
            "or keeps state in eval mode. F.dropout(x) needs training=self.training."
        )
    if not reached_again:
        raise NotImplementedError(
            "The outputs do not depend on the parameters in the posterior: autograd records no "
            f"operation on {names[0]!r} or any other of them. Look for no_grad, detach or another "
            "copy of the model in the forward pass, or change `parameters`."
        )
    unused = sorted(set(names) - reached_again)
    if unused:
        report(
            "log",
            f"The outputs do not depend on {len(unused)} of {len(names)} parameter tensors in the "
            f"posterior, for example on {unused[0]!r}. Exclude them with `parameters`. If they should "
            "matter, what depends on them is cached, for example in an attribute: clear that.",
        )
    return f.movedim(network.class_dim, -1)


def _traced(network: Network, names: tuple[str, ...], x: Any) -> tuple[Tensor, set[str], set[str]]:
    """Return f(x), the parameters in its graph, and those that it reaches although they were replaced."""
    parameters = dict(network.module.named_parameters())
    weights = {
        name: p.detach().requires_grad_() for name, p in parameters.items() if p.is_floating_point()
    }
    # checkpointed blocks are not recorded if their inputs require no gradients
    x = map_tensors(lambda t: t.clone().requires_grad_() if t.is_floating_point() else t, x)
    flags = {name: p.requires_grad for name, p in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in names)
        with torch.enable_grad():
            outputs = network.outputs(x, weights)
            nodes = list(nodes_of(outputs))
    finally:
        for name, parameter in parameters.items():
            parameter.requires_grad_(flags[name])
    if any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes):
        raise NotImplementedError(
            "The model uses reentrant activation checkpointing, whose derivatives silently ignore "
            "some weights. Pass use_reentrant=False to torch.utils.checkpoint, or switch "
            "checkpointing off."
        )
    ends = {id(getattr(node, "variable", None)) for node in nodes}
    reached, elsewhere = (
        {name for name in names if id(tensors[name]) in ends} for tensors in (weights, parameters)
    )
    return outputs.detach(), reached, elsewhere


def _check_outputs(network: Network, f: Tensor, x: Any) -> None:
    if not -f.ndim <= network.class_dim < f.ndim:
        raise ValueError(
            f"The outputs have shape {tuple(f.shape)}, so they have no axis "
            f"class_dim={network.class_dim}. Pass a class_dim from {-f.ndim} to {f.ndim - 1}."
        )
    if not f.is_floating_point():
        raise TypeError(
            f"The outputs are {f.dtype}, not floating point: the model, or its adapter, must "
            "return logits, not class labels."
        )
    if not f.isfinite().all():
        raise ValueError(
            "The outputs are not finite on the first batch, first in "
            f"{_first_layer(network, x, lambda a, _: not a.to_dense().isfinite().all())}. Check the "
            "inputs and the weights of that layer."
        )


def called_last(network: Network, x: Any) -> str:
    """Return the path of the layer with weights that is called last in f(x).

    Calls are ordered by their start; ordered by their end, a network with a class token would be last.
    """
    paths: list[str] = []

    def see(path: str, layer: nn.Module, *given: Any) -> None:
        if owns_weights(layer) and "parametrizations" not in path:
            paths.append(path)

    with explained(network, x), network.guarded(), hooked(network.module, see, before=True):
        network.outputs(x)
    if not paths:
        raise ValueError(
            "No layer with weights is called in the forward pass, so there is no last layer. Pass "
            "`parameters=` with a list of name patterns."
        )
    return paths[-1]


@contextmanager
def hooked(module: nn.Module, see: Callable[..., None], before: bool = False) -> Iterator[None]:
    """Call ``see(path, layer, args, kwargs, output)`` at the end of each submodule's call.

    ``before`` that call, it is without the output.
    """
    handles: list[Any] = []
    try:
        for path, layer in module.named_modules():
            if not isinstance(layer, torch.jit.ScriptModule):
                hook = lambda *call, path=path: see(path, *call)  # noqa: E731
                register = (
                    layer.register_forward_pre_hook if before else layer.register_forward_hook
                )
                handles.append(register(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def floating_tensors(values: Any) -> list[Tensor]:
    """Return the floating-point tensors in the inputs or outputs of a module."""
    leaves = torch.utils._pytree.tree_leaves(values)
    return [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]


def layer_of(error: BaseException, network: Network) -> str | None:
    """Return the path of the innermost submodule whose call raised an error, None if none did."""
    paths = {id(layer): path for path, layer in network.module.named_modules()}
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        found = paths.get(id(frame.f_locals.get("self")), found)
    return found


def name_layer(network: Network, path: str | None) -> str:
    """Return the path and the class of a submodule, for error messages."""
    if not path:
        return f"the model's own forward ({type(network.module).__name__})"
    return f"{path!r} ({type(network.module.get_submodule(path)).__name__})"


def _first_layer(network: Network, x: Any, differs: Callable[[Tensor, Tensor], bool]) -> str:
    """Return the name of the first submodule whose outputs, but not inputs, satisfy a test in two passes."""
    passes: list[list[tuple[str, list[list[Tensor]]]]] = [[], []]
    for calls in passes:

        def see(
            path: str, layer: Any, args: Any, kwargs: Any, output: Any, calls: Any = calls
        ) -> None:
            both = [floating_tensors((args, kwargs)), floating_tensors(output)]
            calls.append((path, [[tensor.clone() for tensor in some] for some in both]))

        with hooked(network.module, see):
            network.outputs(x)
    for (path, first), (_, again) in zip(*passes):
        at_fault = [
            any(a.shape == b.shape and differs(a, b) for a, b in zip(*both))
            for both in zip(first, again)
        ]
        if at_fault == [False, True]:
            return name_layer(network, path)
    return name_layer(network, None)


@contextmanager
def explained(network: Network, x: Any) -> Iterator[None]:
    """Raise an error with a remedy if a network fails on inputs of another dtype or width."""
    try:
        yield
    except RuntimeError as error:
        own = {p.dtype for p in network.module.parameters() if p.is_floating_point()}
        given = {tensor.dtype for tensor in tensors_in(x)} - own
        words = str(error).splitlines()[0] if str(error) else ""
        if "shapes cannot be multiplied" in words:
            shapes = ", ".join(str(tuple(tensor.shape[1:])) for tensor in tensors_in(x))
            raise RuntimeError(
                f"The inputs have shape {shapes} per example, and the forward pass failed in "
                f"{name_layer(network, layer_of(error, network))}: {words}. Pass as many features as "
                "the network was trained with, in the same order."
            ) from error
        if len(own) != 1 or not given or "type" not in words:
            raise
        dtype = own.pop()
        raise TypeError(
            f"The inputs are {', '.join(sorted(map(str, given)))}, but the network's weights are "
            f"{dtype}, and the forward pass failed ({words}). Convert the inputs: x.to({dtype}), "
            f"or for arrays x.astype({str(dtype).removeprefix('torch.')!r})."
        ) from error


def require_rows(f: Tensor, x: Any) -> None:
    """Raise an error for the outputs of a single example; one number per example, (B,), is fine."""
    flat = f.dim() == 1 and any(t.dim() > 1 and len(t) == len(f) for t in tensors_in(x))
    if f.dim() < 2 and not flat:
        raise ValueError(
            f"The network returned outputs of shape {tuple(f.shape)} for these inputs, but "
            "predictions are for batches of examples, with outputs (B, ..., C): for a single "
            "example pass x[None]."
        )
