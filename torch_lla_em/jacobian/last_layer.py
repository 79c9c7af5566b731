"""The last layer: which it is, and a batch whose trunk has already run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.jacobian.network import Network, WeightFunction
from torch_lla_em.jacobian.parameters import owns_weights

_Script = torch.jit.ScriptModule


def called_last(network: Network, x: Any) -> str:
    """Return the path of the layer with weights that is called last in f(x)."""
    with network.guarded():
        calls = _calls(network, x)
    layers = dict(network.module.named_modules())
    paths = [path for path in calls if owns_weights(layers[path])]
    if not paths:
        raise ValueError(
            "No layer with weights is called in the forward pass, so there is no last layer; "
            "pass `parameters=` a list of name patterns."
        )
    return paths[-1]


def _calls(network: Network, x: Any) -> list[str]:
    """Paths of the modules that own parameters, in the order in which they are called.

    In the order in which calls end, a network with a class token of its own would come last.
    """
    calls: list[str] = []
    handles = []
    try:
        for path, layer in network.module.named_modules():
            parametrised = getattr(layer, "parametrizations", {})
            owns = any(True for m in (layer, *parametrised.values()) for _ in m.parameters(False))
            if owns and "parametrizations" not in path and not isinstance(layer, _Script):
                see = lambda *_, path=path: calls.append(path)  # noqa: E731
                handles.append(layer.register_forward_pre_hook(see))
        network.outputs(x)
    finally:
        for handle in handles:
            handle.remove()
    return calls


@contextmanager
def hooked(module: nn.Module, see: Any) -> Iterator[None]:
    """Call ``see(path, layer, args, kwargs, output)`` at the end of each submodule's call."""
    handles: list[Any] = []
    try:
        for path, layer in module.named_modules():
            if not isinstance(layer, _Script):
                handles.append(
                    layer.register_forward_hook(
                        lambda *call, path=path: see(path, *call), with_kwargs=True
                    )
                )
        yield
    finally:
        for handle in handles:
            handle.remove()


def floating_tensors(values: Any) -> list[Tensor]:
    """Return the floating-point tensors in what a module was given or returned."""
    leaves = torch.utils._pytree.tree_leaves(values)
    return [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]


@dataclass(frozen=True)
class HeadCall:
    """One batch after its trunk has run: the head's call, and what becomes of it."""

    f: Tensor
    """f(x), shape (B, ..., C)."""

    head: WeightFunction
    """The head's output h as a function of its weights."""

    h: Tensor | None
    """The leaf of the graph from h to f; None where f is h."""

    tail: Tensor | None
    """f(x) at the end of that graph."""


class LastLayer:
    """A submodule that holds all random weights, and alone, and is the last to be called."""

    def __init__(self, network: Network, path: str):
        self.network = network
        self.path = path
        self.module = network.module.get_submodule(path)

    @classmethod
    def find(cls, network: Network, names: tuple[str, ...], x: Any) -> LastLayer | None:
        """Return the last layer if these weights are its own, by the calls at x.

        It has to be the smaller part: the trunk's run in ``run`` is one forward pass that
        has to be won back.
        """
        path = network.owner(names).partition(".parametrizations")[0]
        if not path or path == "parametrizations":
            return None
        inside = [f"{call}.".startswith(f"{path}.") for call in _calls(network, x)]
        if not inside or not inside[-1] or sum(inside) > len(inside) / 2:
            return None
        return cls(network, path)

    def run(self, x: Any) -> HeadCall | None:
        """Run the network once at x; None where the head cannot be told apart from it."""
        calls: list[tuple] = []

        def keep(_: nn.Module, args: tuple, kwargs: dict, h: Any) -> Any:
            calls.append((args, kwargs, h))
            if not isinstance(h, Tensor) or not h.is_floating_point():
                return None
            leaf = h.detach().requires_grad_()
            # a clone: what follows may write to it, which a leaf does not allow
            calls[-1] = (args, kwargs, leaf, leaf.clone(), _versions((args, kwargs)))
            return calls[-1][3]

        outputs: list[Tensor] = []

        def forward() -> Tensor:
            outputs.append(self.network.call(x))
            return outputs[0]

        handle = self.module.register_forward_hook(keep, with_kwargs=True)
        try:
            with torch.enable_grad():
                f = self.network.substituted(forward)({})
                f = f.movedim(self.network.class_dim, -1)
        finally:
            handle.remove()
        if len(calls) != 1 or len(calls[0]) != 5 or not f.requires_grad:
            return None
        args, kwargs, leaf, seen, versions = calls[0]
        if _versions((args, kwargs)) != versions:
            return None  # the head's inputs were written to after its call
        is_output = outputs[0] is seen and seen._version == 0
        class_dim = self.network.class_dim

        def head() -> Tensor:
            h = self.module(*args, **kwargs)
            return h.movedim(class_dim, -1) if is_output else h

        function = self.network.substituted(head, self.path)
        return HeadCall(f.detach(), function, *((None, None) if is_output else (leaf, f)))


def _versions(values: Any) -> list[int]:
    """How often each tensor among the arguments of a call has been written to."""
    tensors = torch.utils._pytree.tree_leaves(values)
    return [t._version for t in tensors if isinstance(t, Tensor) and not t.is_inference()]
