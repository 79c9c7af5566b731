"""What is done at each torch function of a forward pass: J w carried along, or copies that save time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# with their derivatives as functions of the value, if these are faster than autograd's
_ELEMENTWISE: dict[Callable[..., Any], Callable[[Tensor], Tensor] | None] = {
    **dict.fromkeys((F.leaky_relu, F.elu, F.selu, F.gelu, F.silu, F.mish, F.softplus, F.dropout)),
    **dict.fromkeys((F.relu, torch.relu), lambda z: z > 0),
    torch.tanh: lambda z: 1 - z * z,
    torch.sigmoid: lambda z: z - z * z,
}


class Intercepted(TorchFunctionMode):
    """Gives every torch function of a forward pass to another function, with its arguments."""

    def __init__(self, call: Callable[[Callable[..., Any], tuple, dict[str, Any]], Any]):
        super().__init__()
        self._call = call

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        return self._call(func, args, kwargs or {})


def carried(
    function: Callable[[dict[str, Tensor]], Tensor],
    leaves: dict[str, Tensor],
    directions: dict[str, Tensor],
) -> tuple[Tensor, Tensor] | None:
    """Return f and J w, (K, *f.shape), of directions (K, *shape); None if weights act by other functions.

    The functions are linear layers and elementwise ones. For one input and 33 columns of an MLP with 2,953 weights
    this takes .14 ms, by factors .31 ms and by ``torch.func.jvp`` .44 ms; with 55,000 weights .4, 1.1 and 2.1 ms.
    """
    # tensors, their versions and their directions
    known = {id(w): (w, w._version, directions[name].to(w)) for name, w in leaves.items()}

    def direction(tensor: Any) -> Tensor | None:
        if not isinstance(tensor, Tensor) or not tensor.requires_grad:
            return None
        own = known.get(id(tensor))
        if own is None or tensor._version != own[1]:
            raise NotImplementedError
        return own[2]

    def see(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        z = func(*args, **kwargs)
        if not isinstance(z, Tensor) or not z.requires_grad:
            return z
        h = args[0] if args else None
        if not isinstance(h, Tensor):
            raise NotImplementedError
        with torch.no_grad():
            along = direction(h)
            if z is h:  # as dropout returns it
                return z
            if func is F.linear and h.dim() == 2:
                W, b = (*args[1:], *kwargs.values(), None)[:2]
                by_W, by_b = direction(W), direction(b)
                along = z.new_zeros(()) if along is None else along @ W.mT
                along = along if by_b is None else along + by_b[:, None].expand(-1, *z.shape)
                if by_W is not None:
                    along = torch.baddbmm(along, h.expand(len(by_W), -1, -1), by_W.mT)
            elif func in _ELEMENTWISE and along is not None:
                slope = _ELEMENTWISE[func]
                if slope is None:
                    grad = torch.autograd.grad(z, h, torch.ones_like(z), True)[0]
                along = along * (grad if slope is None else slope(z))
            else:
                raise NotImplementedError
        known[id(z)] = z, z._version, along
        return z

    try:
        with torch.enable_grad(), Intercepted(see):
            f = function(leaves)
        Jw = direction(f)
    except NotImplementedError:
        return None
    return None if Jw is None else (f.detach(), Jw)


def contiguous(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Copy inputs of linear layers that are not contiguous, and give padding of a table no derivative.

    For other layouts of (B, L, E), such as the transposed outputs of attention, ``torch.func`` takes a product, and
    a gradient of the weight's size, for each of B or L entries: four to six times as long for a ViT.
    """
    # the functions that multi-head attention calls do not come here
    count = {F.linear: 1, F.multi_head_attention_forward: 3}.get(func, 0)
    copies: dict[int, Tensor] = {}  # equal arguments stay one tensor
    for tensor in args[:count]:
        if tensor.dim() > 2 and not tensor.is_contiguous():
            copies.setdefault(id(tensor), tensor.contiguous())
    z = func(*(copies.get(id(own), own) for own in args), **kwargs)
    padding = kwargs.get("padding_idx", args[2] if len(args) > 2 else None)
    if func is not F.embedding or padding is None:
        return z
    # the row of padding gets no gradient in training, but one by forward mode
    ids, table = args[0], args[1]
    return torch.where((ids == padding % len(table))[..., None], z.detach(), z)
