"""What a forward pass must be before its derivatives can be trusted."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_lla_em.data import map_tensors
from torch_lla_em.jacobian.attributes import Attributes
from torch_lla_em.jacobian.calls import nodes_of
from torch_lla_em.jacobian.layers import first_layer
from torch_lla_em.jacobian.network import Network
from torch_lla_em.runtime import is_shortage

logger = logging.getLogger("torch_lla_em")


def checked_outputs(network: Network, names: tuple[str, ...], x: Any) -> Tensor:
    """Return f(x), shape (B, ..., C), if it is what derivatives can be taken of."""
    with network.remembering() as attributes:
        first, again = _traced(network, names, x), _traced(network, names, x)
        _check_outputs(network, first.outputs, x)
        _refuse_unexchanged(first, again)
        unused = sorted(set(names) - again.reached)
        if unused:
            attributes.restore()
            _refuse_caches(network, unused, x, attributes)
    if distance(first.outputs, network.outputs(x)) > math.sqrt(
        torch.finfo(first.outputs.dtype).eps
    ):
        raise ValueError(
            "Two forward passes over the same inputs disagree, first in "
            f"{first_layer(network, x, lambda a, b: distance(a, b) > 0)}: it draws random numbers, "
            "or remembers, in eval mode too. F.dropout(x) needs training=self.training."
        )
    if unused:
        logger.warning(
            "The outputs do not depend on %d of %d parameter tensors in the posterior, as on %r: "
            "leave them out by `parameters`. If they should, the model has kept what it computed of "
            "them earlier (functools.cache, a global): clear that first.",
            *(len(unused), len(names), unused[0]),
        )
    return first.outputs.movedim(network.class_dim, -1)


def plain_gradients(
    network: Network, names: tuple[str, ...], x: Any, u: Tensor
) -> list[dict[str, Tensor]]:
    """Return Jᵀu by name for each of several u, (K, B, ..., C), as training takes it.

    That is by backward from the module itself, to its own parameters.
    """
    parameters = dict(network.module.named_parameters())
    with _requiring_gradients(parameters, names):
        # the parameters stay in place; only what a forward pass may write is copied
        f = network.outputs(x, dict(parameters)).movedim(network.class_dim, -1)
        if not f.requires_grad:
            return [{} for _ in u]
        chosen = [parameters[name] for name in names]
        several = [
            torch.autograd.grad(f, chosen, column, retain_graph=True, allow_unused=True)
            for column in u
        ]
    return [{n: g.to_dense() for n, g in zip(names, grads) if g is not None} for grads in several]


def distance(a: Tensor, b: Tensor) -> float:
    """‖a - b‖ / ‖b‖."""
    a, b = a.detach().double(), b.detach().double()
    return ((a - b).norm() / b.norm().clamp(min=1e-300)).item()


class _Traced(NamedTuple):
    """The outputs, and the parameters in their graph."""

    outputs: Tensor
    reached: set[str]
    """Those that can be exchanged."""

    elsewhere: set[str]
    """Those that the graph reaches as the module's own, in the place of what was exchanged."""


def _traced(network: Network, names: tuple[str, ...], x: Any) -> _Traced:
    """Return f(x), and which of these parameters its graph reaches."""
    parameters = dict(network.module.named_parameters())
    weights = {
        name: p.detach().requires_grad_() for name, p in parameters.items() if p.is_floating_point()
    }
    # checkpoints hide what is inside of them where their inputs require no gradients
    x = map_tensors(lambda t: t.clone().requires_grad_() if t.is_floating_point() else t, x)
    with _requiring_gradients(parameters, names):
        outputs = network.outputs(x, weights)
        nodes = list(nodes_of(outputs))
    if any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes):
        raise NotImplementedError(
            "The model uses reentrant activation checkpointing, whose derivatives leave out weights "
            "without a word. Pass use_reentrant=False to torch.utils.checkpoint, or switch it off."
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
            f"The outputs have shape {tuple(f.shape)}, so class_dim={network.class_dim} "
            f"is no axis of theirs; pass one from {-f.ndim} to {f.ndim - 1}."
        )
    if not f.is_floating_point():
        raise TypeError(
            f"The outputs are {f.dtype}, not floating point: let the model, or forward_fn, return "
            "the logits, not the decision."
        )
    if not f.isfinite().all():
        raise ValueError(
            "The outputs are not finite on the first batch, first in "
            f"{first_layer(network, x, lambda a, _: not a.isfinite().all())}. Look at the inputs "
            "and the weights there."
        )


def _refuse_unexchanged(first: _Traced, again: _Traced) -> None:
    """Raise where outputs depend on weights in another way than through the module."""
    if again.elsewhere:
        raise RuntimeError(
            f"The parameter {min(again.elsewhere)!r} is used in a place where it cannot be "
            "exchanged: the model, or forward_fn, also keeps it outside of the module's parameters "
            "(in a list, a closure or a second model). Register it there, or leave it out of "
            "`parameters`."
        )
    lost = first.reached - again.reached
    if lost:
        raise RuntimeError(
            f"The parameter {min(lost)!r} takes part in the first forward pass alone: the model "
            "keeps what it computed of it then (in an attribute, functools.cache, a global), and "
            "derivatives are of weights that are used in every pass. Clear that, and compute it "
            "anew in every forward pass."
        )


def _refuse_caches(network: Network, unused: list[str], x: Any, attributes: Attributes) -> None:
    """Raise where outputs depend on unused weights once an attribute that holds tensors is empty."""
    for name in attributes.emptied():
        try:
            reached = _traced(network, tuple(unused), x).reached
        except Exception as error:  # whatever a module does without what it needs
            if is_shortage(error):
                raise
            continue
        if reached:
            raise RuntimeError(
                f"The outputs do not depend on the parameter {min(reached)!r}, since the model keeps "
                f"what it computed of it earlier in its attribute {name!r}. Clear that, and compute "
                "it anew in every forward pass."
            )


@contextmanager
def _requiring_gradients(
    parameters: dict[str, nn.Parameter], names: tuple[str, ...]
) -> Iterator[None]:
    """Have the module's own parameters of these names alone require gradients."""
    flags = {name: p.requires_grad for name, p in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in names)
        with torch.enable_grad():
            yield
    finally:
        for name, parameter in parameters.items():
            parameter.requires_grad_(flags[name])
