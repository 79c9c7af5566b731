"""The layers of a network as they are called: which comes last, what each is given and returns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.jacobian.bad_inputs import explained
from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.parameters import owns_weights


def called_last(network: Network, x: Any) -> str:
    """Return the path of the layer with weights that is called last in f(x).

    In the order in which calls end, a network with a class token of its own would come last.
    """
    paths: list[str] = []

    def see(path: str, layer: nn.Module, *given: Any) -> None:
        if owns_weights(layer) and "parametrizations" not in path:
            paths.append(path)

    with explained(network, x), network.guarded(), hooked(network.module, see, before=True):
        network.outputs(x)
    if not paths:
        raise ValueError(
            "No layer with weights is called in the forward pass, so there is no last layer; "
            "pass `parameters=` a list of name patterns."
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
    """Return the floating-point tensors in what a module was given or returned."""
    leaves = torch.utils._pytree.tree_leaves(values)
    return [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]
