"""A trained network as a pure function of its random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

ForwardFn = Callable[[nn.Module, Any], Tensor]


def default_forward(module: nn.Module, inputs: Any) -> Tensor:
    """Call a network on a tensor, a tuple or a dict; return its tensor or ``.logits``."""
    if isinstance(inputs, Mapping):
        outputs = module(**inputs)
    elif isinstance(inputs, (tuple, list)):
        outputs = module(*inputs)
    else:
        outputs = module(inputs)
    outputs = getattr(outputs, "logits", outputs)
    if not isinstance(outputs, Tensor):
        raise TypeError(
            f"The model returned {type(outputs).__name__}, not a tensor or an object with "
            "`.logits`. Pass forward_fn=lambda model, inputs: ... that returns one tensor."
        )
    return outputs


class _Forward(nn.Module):
    """A module whose forward is ``forward_fn(network, inputs)``, for functional_call."""

    def __init__(self, network: nn.Module, forward_fn: ForwardFn):
        super().__init__()
        self.network = network
        self.forward_fn = forward_fn

    def forward(self, inputs: Any) -> Tensor:
        return self.forward_fn(self.network, inputs)


class Network:
    """f(x; w) of a module whose weights, buffers, mode and attributes stay as they are.

    The axis of the classes is moved last, so that outputs are (B, ..., C) throughout.
    """

    def __init__(
        self, module: nn.Module, forward_fn: ForwardFn | None = None, class_dim: int = -1
    ):
        self.module = module
        self.class_dim = class_dim
        self._forward = _Forward(module, forward_fn or default_forward)

    def weights(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Return the named parameters, detached."""
        parameters = dict(self.module.named_parameters())
        return {name: parameters[name].detach() for name in names}

    def function(self, x: Any, names: tuple[str, ...]) -> Callable[[dict[str, Tensor]], Tensor]:
        """Return the map from the named weights to f(x), shape (B, ..., C)."""
        fixed = {
            name: tensor.detach()
            for name, tensor in self.module.named_parameters()
            if name not in set(names)
        }
        buffers = dict(self.module.named_buffers())

        def forward(weights: dict[str, Tensor]) -> Tensor:
            # clones: a forward may write its buffers, which torch.func forbids outside
            copies = {name: buffer.detach().clone() for name, buffer in buffers.items()}
            state = {**fixed, **copies, **weights}
            state = {f"network.{name}": tensor for name, tensor in state.items()}
            outputs = torch.func.functional_call(self._forward, state, (x,))
            return outputs.movedim(self.class_dim, -1)

        return forward

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Make calls safe for torch.func, in eval mode; restore everything on exit."""
        modes = {layer: layer.training for layer in self.module.modules()}
        with ExitStack() as stack:
            stack.callback(_restore_modes, modes)
            stack.enter_context(torch.no_grad())
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(_fastpath_off())
            for device_type in {"cpu", self.device.type}:
                stack.enter_context(torch.autocast(device_type, enabled=False))
            if any(isinstance(layer, nn.RNNBase) for layer in modes):
                stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
                stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            for layer in modes:
                layer.training = False
            yield

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.module.parameters()).device


def _restore_modes(modes: Mapping[nn.Module, bool]) -> None:
    for layer, training in modes.items():
        layer.training = training


@contextmanager
def _fastpath_off() -> Iterator[None]:
    """Run attention layers by their plain code, which torch.func can differentiate."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
