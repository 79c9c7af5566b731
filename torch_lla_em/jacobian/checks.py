"""What a forward pass must be, before derivatives of it can be trusted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from torch_lla_em.jacobian.blame import first_layer, layer_of, name_layer
from torch_lla_em.jacobian.network import Network


def checked_outputs(network: Network, x: Any) -> Tensor:
    """Return f(x), shape (B, ..., C), if it is what derivatives can be taken of."""
    try:
        with _reentrant_checkpoints_refused():
            outputs = network.substituted(lambda: network.call(x))({})
    except _ReentrantCheckpoint as error:
        raise NotImplementedError(
            f"{name_layer(network, layer_of(error, network))} uses reentrant activation "
            "checkpointing, whose derivatives leave out weights without a word. Pass "
            "use_reentrant=False to torch.utils.checkpoint, or switch it off."
        ) from None
    if not -outputs.ndim <= network.class_dim < outputs.ndim:
        raise ValueError(
            f"The outputs have shape {tuple(outputs.shape)}, so class_dim={network.class_dim} "
            f"is no axis of theirs; pass one from {-outputs.ndim} to {outputs.ndim - 1}."
        )
    if not outputs.is_floating_point():
        raise TypeError(
            f"The outputs are {outputs.dtype}, not floating point: let the model, or "
            "forward_fn, return the logits, not the decision."
        )
    if not outputs.isfinite().all():
        path = first_layer(network, x, lambda a, _: not a.isfinite().all())
        raise ValueError(
            f"The outputs are not finite on the first batch, first in "
            f"{name_layer(network, path)}. Look at the inputs and the weights there."
        )
    again = network.substituted(lambda: network.call(x))({})
    if distance(outputs, again) > math.sqrt(torch.finfo(outputs.dtype).eps):
        path = first_layer(network, x, lambda a, b: distance(a, b) > 0)
        raise ValueError(
            f"Two forward passes over the same inputs disagree, first in "
            f"{name_layer(network, path)}: it draws random numbers, or remembers, in eval "
            "mode too. F.dropout(x) needs training=self.training."
        )
    return outputs.movedim(network.class_dim, -1)


class _ReentrantCheckpoint(Exception):
    """Raised in place of a reentrant checkpoint."""


@contextmanager
def _reentrant_checkpoints_refused() -> Iterator[None]:
    def refuse(*_: Any) -> None:
        raise _ReentrantCheckpoint

    CheckpointFunction.apply = staticmethod(refuse)  # hides the inherited one
    try:
        yield
    finally:
        del CheckpointFunction.apply


def plain_gradient(
    network: Network, names: tuple[str, ...], x: Any, u: Tensor
) -> dict[str, Tensor]:
    """Return Jᵀu by name as training takes it: by backward to the module's own parameters."""
    parameters = dict(network.module.named_parameters())
    flags = {name: p.requires_grad for name, p in parameters.items()}
    try:
        with torch.enable_grad():
            for name, parameter in parameters.items():
                parameter.requires_grad_(name in names)
            # the parameters stay in place; only what a forward pass may write is copied
            f = network.substituted(lambda: network.call(x))(parameters)
            if not f.requires_grad:
                return {}
            f = f.movedim(network.class_dim, -1)
            chosen = [parameters[name] for name in names]
            grads = torch.autograd.grad(f, chosen, u, allow_unused=True)
    finally:
        for name, parameter in parameters.items():
            parameter.requires_grad_(flags[name])
    return {name: g.to_dense() for name, g in zip(names, grads) if g is not None}


def distance(a: Tensor, b: Tensor) -> float:
    """‖a - b‖ / ‖b‖."""
    a, b = a.detach().double(), b.detach().double()
    return ((a - b).norm() / b.norm().clamp(min=1e-300)).item()


def fingerprint(module: nn.Module) -> dict[str, tuple[int, int]]:
    """A mark of each tensor that any write to it changes: its version and its bits' sum."""
    marks = {}
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        version = -1 if tensor.is_inference() else tensor._version
        bits = tensor.detach()
        if bits.element_size() in integers and bits.layout is torch.strided:
            bits = bits.contiguous().view(integers[bits.element_size()])
            marks[name] = (version, bits.sum(dtype=torch.int64).item())
        else:
            marks[name] = (version, 0)
    return marks
