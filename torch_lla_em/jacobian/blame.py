"""Which submodule is at fault, for error messages."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.jacobian.last_layer import floating_tensors, hooked
from torch_lla_em.jacobian.network import Network
from torch_lla_em.runtime import is_shortage


def name_layer(network: Network, path: str | None) -> str:
    """Return how a message names the submodule at a path: its path and its class."""
    if not path:
        return f"the model's own forward ({type(network.module).__name__})"
    return f"{path!r} ({type(network.module.get_submodule(path)).__name__})"


def layer_of(error: BaseException, network: Network) -> str | None:
    """Return the path of the innermost submodule whose call raised an error."""
    paths = {id(layer): path for path, layer in network.module.named_modules()}
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        found = paths.get(id(frame.f_locals.get("self")), found)
    return found


def first_layer(network: Network, x: Any, differs: Callable[[Tensor, Tensor], bool]) -> str | None:
    """Return the first submodule to finish whose outputs in two passes satisfy a test.

    One whose inputs satisfy it already is not at fault.
    """
    for (path, given, got), (_, *again) in zip(_record(network, x), _record(network, x)):
        at_fault = [
            any(a.shape == b.shape and differs(a, b) for a, b in zip(*pair))
            for pair in zip((given, got), again)
        ]
        if at_fault == [False, True]:
            return path
    return None


def _record(network: Network, x: Any) -> list[tuple[str, list[Tensor], list[Tensor]]]:
    """Return what each submodule's call in f(x) was given and returned, as they finished."""
    calls: list[tuple[str, list[Tensor], list[Tensor]]] = []

    def see(path: str, layer: Any, *call: Any) -> None:
        given, got = floating_tensors(call[:2]), floating_tensors(call[2])
        calls.append((path, [t.clone() for t in given], [t.clone() for t in got]))

    with hooked(network.module, see):
        network.substituted(lambda: network.call(x))({})
    return calls


def layer_at_fault(network: Network, names: tuple[str, ...], x: Any) -> str | None:
    """Return the first submodule to finish that two reverse passes do not go through."""
    calls: list[tuple[str, list[Tensor], list[Tensor]]] = []
    leaves = {n: w.detach().requires_grad_() for n, w in network.weights(names).items()}

    def see(path: str, layer: Any, args: tuple, kwargs: dict, output: Any) -> None:
        inputs = [t for t in floating_tensors((args, kwargs)) if t.requires_grad]
        outputs = [t for t in floating_tensors(output) if t.requires_grad]
        calls.append((path, [*inputs, *leaves.values()], outputs))

    with torch.enable_grad(), hooked(network.module, see):
        network.substituted(lambda: network.call(x))(leaves)
        for path, inputs, outputs in calls:
            if outputs and not _twice_differentiable(outputs, inputs):
                return path
    return None


def _twice_differentiable(outputs: list[Tensor], inputs: list[Tensor]) -> bool:
    """Whether u -> Jᵀu can be differentiated in u, and its derivative is J."""
    generator = torch.Generator().manual_seed(0)
    try:
        u = [torch.randn(f.shape, generator=generator).to(f).requires_grad_() for f in outputs]
        grads = torch.autograd.grad(outputs, inputs, u, create_graph=True, allow_unused=True)
        known = [g for g in grads if g is not None]
        v = [torch.randn(g.shape, generator=generator).to(g) for g in known]
        Jv = torch.autograd.grad(known, u, v, retain_graph=True, allow_unused=True)
    except Exception as error:  # whatever the layer's backward does not know how to do
        if is_shortage(error):
            raise
        return False
    left = sum((a * b).sum() for a, b in zip(u, Jv) if b is not None)
    right = sum((a * b).sum() for a, b in zip(known, v))
    return bool(abs(left - right) <= 1e-2 * abs(right))
