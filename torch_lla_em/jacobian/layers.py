"""Inputs and outputs of the layers of a network, to find the layer that causes an error."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.data import tensors_in
from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.parameters import owns_weights


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
def hooked(module: nn.Module, see: Any, before: bool = False) -> Iterator[None]:
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


def first_layer(network: Network, x: Any, differs: Callable[[Tensor, Tensor], bool]) -> str:
    """Return the name of the first submodule whose outputs in two passes satisfy a test.

    A submodule whose inputs already satisfy the test is skipped.
    """
    for (path, given, got), (_, *again) in zip(_record(network, x), _record(network, x)):
        at_fault = [
            any(a.shape == b.shape and differs(a, b) for a, b in zip(*pair))
            for pair in zip((given, got), again)
        ]
        if at_fault == [False, True]:
            return name_layer(network, path)
    return name_layer(network, None)


def _record(network: Network, x: Any) -> list[tuple[str, list[Tensor], list[Tensor]]]:
    """Return the inputs and outputs of each submodule's call in f(x), in the order of their end."""
    calls: list[tuple[str, list[Tensor], list[Tensor]]] = []

    def see(path: str, layer: Any, *call: Any) -> None:
        given, got = floating_tensors(call[:2]), floating_tensors(call[2])
        calls.append((path, [t.clone() for t in given], [t.clone() for t in got]))

    with hooked(network.module, see):
        network.outputs(x)
    return calls


@contextmanager
def explained(network: Network, x: Any) -> Iterator[None]:
    """Raise a TypeError with a remedy if a network fails on inputs of another dtype."""
    try:
        yield
    except RuntimeError as error:
        own = {p.dtype for p in network.module.parameters() if p.is_floating_point()}
        given = {tensor.dtype for tensor in tensors_in(x)} - own
        words = str(error).splitlines()[0] if str(error) else ""
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
    flat = any(t.dim() > 1 and len(t) == len(f) for t in tensors_in(x)) if f.dim() == 1 else False
    if f.dim() < 2 and not flat:
        raise ValueError(
            f"The network returned outputs of shape {tuple(f.shape)} for these inputs, but "
            "predictions are for batches of examples, with outputs (B, ..., C): for a single "
            "example pass x[None]."
        )
