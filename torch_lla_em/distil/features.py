"""The features of a network's last layer, which the head of a student reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.jacobian import Network

# width of the hidden layer of a head
_HIDDEN = 64


def head_of(features: int, outputs: int, like: Tensor) -> nn.Sequential:
    """Return a head with one hidden layer, whose outputs are 0 until it is trained."""
    to = {"device": like.device, "dtype": like.dtype}
    first = nn.utils.skip_init(nn.Linear, features, _HIDDEN, **to)
    last = nn.utils.skip_init(nn.Linear, _HIDDEN, outputs, **to)
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad():
        draws = torch.rand(_HIDDEN, features + 1, generator=generator, device="cpu")
        draws = ((2 * draws - 1) / features**0.5).to(like)
        first.weight.copy_(draws[:, :-1])
        first.bias.copy_(draws[:, -1])
        last.weight.zero_()
        last.bias.zero_()
    return nn.Sequential(first, nn.SiLU(), last)


def is_convolution(layer: nn.Module) -> bool:
    """Whether the channels of a layer's inputs come before their sites."""
    return isinstance(layer, nn.modules.conv._ConvNd)


def feature_size(network: Network, last: str, x: Any) -> int:
    """Return the number of features of the head, the inputs of the last layer."""
    seen: list[Tensor] = []
    layer = network.module.get_submodule(last)

    def see(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(next(iter((*args, *kwargs.values()))))

    hook = layer.register_forward_pre_hook(see, with_kwargs=True)
    try:
        f = network.forward_fn(network.module, x).movedim(network.class_dim, -1)
    finally:
        hook.remove()
    return features_of(seen, f, is_convolution(layer)).shape[-1]


def features_of(seen: list[Tensor], f: Tensor, channels_first: bool) -> Tensor:
    """Return the features of each site or example, (B, *sites, D), for outputs (B, *sites, C)."""
    each = [h.movedim(1, -1) if channels_first else h for h in seen]
    h = each[0] if len(each) == 1 else torch.cat(each, -1)  # a network can be called several times
    if h.dim() == f.dim() and h.shape[:-1] == f.shape[:-1]:
        return h
    if f.dim() == 2 and len(h) == len(f):
        return h.flatten(1, -2).mean(1)
    raise ValueError(
        f"The features of the last layer have shape {tuple(h.shape)}, and the outputs "
        f"{tuple(f.shape)} (classes last), so the head has no features for each output. Pass "
        "student= with a network whose last layer has the sites of the outputs."
    )
