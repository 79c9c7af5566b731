"""Checks of the forward pass, before derivatives are computed."""

from __future__ import annotations

import logging
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import map_tensors
from torch_lla_em.jacobian.calls import nodes_of
from torch_lla_em.jacobian.layers import first_layer
from torch_lla_em.jacobian.network import Network, NoJacobianError

logger = logging.getLogger("torch_lla_em")


def checked_outputs(network: Network, names: tuple[str, ...], x: Any) -> Tensor:
    """Return f(x), shape (B, ..., C), after checks that it can be differentiated."""
    first, again = _traced(network, names, x), _traced(network, names, x)
    _check_outputs(network, first.outputs, x)
    _refuse_unexchanged(first, again)
    if distance(first.outputs, again.outputs) > math.sqrt(torch.finfo(first.outputs.dtype).eps):
        raise ValueError(
            "Two forward passes over the same inputs disagree, first in "
            f"{first_layer(network, x, lambda a, b: distance(a, b) > 0)}: it draws random numbers "
            "or keeps state in eval mode. F.dropout(x) needs training=self.training."
        )
    if not again.reached:
        raise NoJacobianError(
            "The outputs do not depend on the parameters in the posterior: autograd records no "
            f"operation on {names[0]!r} or any other of them. Look for no_grad, detach or another "
            "copy of the model in the forward pass, or change `parameters`."
        )
    unused = sorted(set(names) - again.reached)
    if unused:
        logger.warning(
            "The outputs do not depend on %d of %d parameter tensors in the posterior, for "
            "example on %r. Exclude them with `parameters`. If the outputs should depend on them, "
            "the model has cached a tensor computed from them (in an attribute, functools.cache, "
            "a global): clear that first.",
            *(len(unused), len(names), unused[0]),
        )
    return first.outputs.movedim(network.class_dim, -1)


def distance(a: Tensor, b: Tensor) -> float:
    """‖a - b‖ / ‖b‖."""
    a, b = a.detach().double(), b.detach().double()
    return ((a - b).norm() / b.norm().clamp(min=1e-300)).item()


class _Traced(NamedTuple):
    """The outputs, and the parameters in their graph."""

    outputs: Tensor
    reached: set[str]
    """Parameters in the graph that can be replaced."""

    elsewhere: set[str]
    """Parameters that the graph reaches directly, although they were replaced in the module."""


def _traced(network: Network, names: tuple[str, ...], x: Any) -> _Traced:
    """Return f(x), and the parameters that its graph reaches."""
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
    variables = {id(getattr(node, "variable", None)) for node in nodes}
    return _Traced(
        outputs.detach(),
        {name for name in names if id(weights[name]) in variables},
        {name for name in names if id(parameters[name]) in variables},
    )


def _check_outputs(network: Network, f: Tensor, x: Any) -> None:
    if not -f.ndim <= network.class_dim < f.ndim:
        raise ValueError(
            f"The outputs have shape {tuple(f.shape)}, so they have no axis "
            f"class_dim={network.class_dim}. Pass a class_dim from {-f.ndim} to {f.ndim - 1}."
        )
    if not f.is_floating_point():
        raise TypeError(
            f"The outputs are {f.dtype}, not floating point: the model, or forward_fn, must "
            "return logits, not class labels."
        )
    if not f.isfinite().all():
        raise ValueError(
            "The outputs are not finite on the first batch, first in "
            f"{first_layer(network, x, lambda a, _: not a.isfinite().all())}. Check the inputs "
            "and the weights of that layer."
        )


def _refuse_unexchanged(first: _Traced, again: _Traced) -> None:
    """Raise an error if outputs depend on weights in another way than through the module."""
    if again.elsewhere:
        raise RuntimeError(
            f"The parameter {min(again.elsewhere)!r} is also used outside of the module's "
            "registered parameters, where it cannot be replaced (in a list, a closure or a "
            "second model). Register it as a parameter, or leave it out of `parameters`."
        )
    lost = first.reached - again.reached
    if lost:
        raise RuntimeError(
            f"The parameter {min(lost)!r} is used in the first forward pass only: the model "
            "caches a tensor computed from it (in an attribute, functools.cache or a global), so "
            "there is no derivative in later passes. Clear the cache, and compute the tensor in "
            "every forward pass."
        )
