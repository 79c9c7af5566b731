"""Which weights the outputs depend on, by their graph, and what hides some of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_lla_em.data import map_tensors
from torch_lla_em.jacobian.calls import nodes_of
from torch_lla_em.jacobian.layers import floating_tensors, hooked
from torch_lla_em.jacobian.network import Network
from torch_lla_em.runtime import is_shortage

logger = logging.getLogger("torch_lla_em")

# by which outputs without a cache may differ, relative
_ROUNDING = 1e-3


class Traced(NamedTuple):
    """The outputs, and the parameters in their graph."""

    outputs: Tensor
    reached: set[str]
    """Those that can be exchanged."""

    elsewhere: list[str]
    """Those that the graph reaches as the module's own, in the place of what was exchanged."""


def traced(network: Network, names: tuple[str, ...], x: Any) -> Traced:
    """Return f(x), and which of these parameters its graph reaches; refuse what hides some."""
    parameters = dict(network.module.named_parameters())
    own = {id(parameters[name]): name for name in names}
    weights = {
        name: p.detach().requires_grad_() for name, p in parameters.items() if p.is_floating_point()
    }
    x = map_tensors(_differentiable, x)  # checkpoints hide what their inputs do not ask for
    with asking(parameters, names):
        outputs = network.outputs(x, weights)
        nodes = list(nodes_of(outputs))
        if any(map(_is_checkpoint, nodes)):
            raise NotImplementedError(
                f"{name_layer(network, _layer_of_checkpoint(network, x, weights))} uses reentrant "
                "activation checkpointing, whose derivatives leave out weights without a word. "
                "Pass use_reentrant=False to torch.utils.checkpoint, or switch it off."
            )
    leaves = {id(weight): name for name, weight in weights.items()}
    variables = [id(getattr(node, "variable", None)) for node in nodes]
    elsewhere = [own[leaf] for leaf in variables if leaf in own]
    return Traced(outputs.detach(), {leaves.get(v) for v in variables} & set(names), elsewhere)


def begin_without_caches(network: Network, names: tuple[str, ...], x: Any, found: Traced) -> None:
    """Have calls begin without weights that the module has computed and cached before."""
    reached = found.reached

    def is_cache() -> bool:
        nonlocal reached
        try:
            outputs, more, _ = traced(network, names, x)
        except Exception as error:  # whatever a module does without what it needs
            if is_shortage(error):
                raise
            return False
        known = found.outputs
        if outputs.shape != known.shape or distance(outputs, known) > _ROUNDING:
            return False
        is_more, reached = more > reached, more | reached
        return is_more

    network.memory.forget_filled(network.module, is_cache)


def refuse_unexchanged(first: Traced, again: Traced) -> None:
    """Raise where outputs depend on weights in another way than through the module."""
    if again.elsewhere:
        raise RuntimeError(
            f"The parameter {again.elsewhere[0]!r} is used in a place where it cannot be exchanged: "
            "the model, or forward_fn, also keeps it outside of the module's parameters (in a "
            "list, a closure or a second model). Register it there, or leave it out of "
            "`parameters`."
        )
    lost = first.reached - again.reached
    if lost:
        raise RuntimeError(
            f"The parameter {min(lost)!r} takes part in the first forward pass alone: the model "
            "keeps what it computed of it then, where it cannot be taken back (functools.cache, a "
            "global, an object of its own). Clear that, and compute it anew in every forward pass."
        )


def warn_of_unused(names: tuple[str, ...], reached: set[str]) -> None:
    """Name parameters that the outputs do not depend on."""
    unused = [name for name in names if name not in reached]
    if unused:
        logger.warning(
            "The outputs do not depend on %d of %d parameter tensors in the posterior, as on %r: "
            "leave them out by `parameters`. If they should, the model has kept what it computed of "
            "them earlier (functools.cache, a global): clear that first.",
            *(len(unused), len(names), unused[0]),
        )


def _differentiable(tensor: Tensor) -> Tensor:
    """Return a tensor that gradients are asked for."""
    return tensor.clone().requires_grad_() if tensor.is_floating_point() else tensor


def _is_checkpoint(node: Any) -> bool:
    return type(node).__name__ == "CheckpointFunctionBackward"


def _layer_of_checkpoint(network: Network, x: Any, weights: dict[str, Tensor]) -> str | None:
    found: list[str | None] = []

    def see(path: str, layer: Any, *call: Any) -> None:
        if any(_is_checkpoint(node) for t in floating_tensors(call[2]) for node in nodes_of(t)):
            found.append(path)

    with hooked(network.module, see):
        network.outputs(x, weights)
    return next(iter(found), None)


@contextmanager
def asking(parameters: dict[str, nn.Parameter], names: tuple[str, ...]) -> Iterator[None]:
    """Ask for gradients of the module's own parameters of these names alone."""
    flags = {name: p.requires_grad for name, p in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in names)
        with torch.enable_grad():
            yield
    finally:
        for name, parameter in parameters.items():
            parameter.requires_grad_(flags[name])


def name_layer(network: Network, path: str | None) -> str:
    """Return how a message names the submodule at a path: its path and its class."""
    if not path:
        return f"the model's own forward ({type(network.module).__name__})"
    return f"{path!r} ({type(network.module.get_submodule(path)).__name__})"


def distance(a: Tensor, b: Tensor) -> float:
    """‖a - b‖ / ‖b‖."""
    a, b = a.detach().double(), b.detach().double()
    return ((a - b).norm() / b.norm().clamp(min=1e-300)).item()
