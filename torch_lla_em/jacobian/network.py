"""A trained network as a pure function of its parameters, whose tensors are restored after a call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize

from torch_lla_em.data import copied, default_forward
from torch_lla_em.jacobian.state import ONE_AT_A_TIME
from torch_lla_em.runtime import tf32

ForwardFn = Callable[[nn.Module, Any], Tensor]
WeightFunction = Callable[[dict[str, Tensor]], Tensor]


class Network:
    """f(x; w) of a module, whose weights, buffers, mode and attributes are not changed.

    The axis of the classes is moved last, so that outputs are (B, ..., C) throughout. Call it inside
    ``guarded()``.
    """

    def __init__(self, module: nn.Module, forward_fn: ForwardFn | None = None, class_dim: int = -1):
        while True:  # inside torch.compile, DataParallel or DDP
            if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
                module = module.module
            elif isinstance(module, nn.Module) and "_orig_mod" in module._modules:
                module = module.get_submodule("_orig_mod")
            else:
                break
        if not isinstance(module, nn.Module):
            raise TypeError(f"The model is a {type(module).__name__}. Pass an nn.Module.")
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                "The model is a scripted or traced module (torch.jit), whose weights cannot be "
                "replaced. Pass the Python module that it was made from."
            )
        self.module = module
        self.forward_fn: ForwardFn = forward_fn or default_forward
        self.class_dim = class_dim
        self.precision = "float32"
        """Precision of matrix products, from ``Compute``."""

        self._called = nn.Module()  # calls ``forward_fn``, as functional_call takes it
        self._called.add_module("module", module)
        vars(self._called)["forward"] = partial(self.forward_fn, module)
        self._leave()

    def _leave(self) -> None:
        """Forget the tensors, by name and those that a call may write to, their places, and attributes."""
        self._held = False
        self._tensors: dict[str, Tensor] = {}
        self._written: list[str] = []
        self._places: dict[str, str] = {}
        self._noted: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def use(self, precision: str) -> None:
        """Compute matrix products in another precision from now on."""
        self.precision = precision

    def weights(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Return the named parameters, detached."""
        if self._held:
            return {name: self._tensors[name] for name in names}
        with ONE_AT_A_TIME:
            parameters = dict(self.module.named_parameters())
            return {name: parameters[name].detach() for name in names}

    def function(self, x: Any) -> WeightFunction:
        """Return the map from named weights to f(x), shape (B, ..., C)."""
        return lambda weights: self.outputs(x, weights).movedim(self.class_dim, -1)

    def outputs(self, x: Any, weights: dict[str, Tensor] | None = None) -> Tensor:
        """Return the outputs with some weights replaced, in the module's own shape."""
        if not self._held:
            with self._at_rest():
                return self.outputs(x, weights)
        placed = {**self._tensors, **(weights or {})}
        for name in self._written:
            placed[name] = placed[name].clone()
        tensors = {place: placed[name] for place, name in self._places.items()}
        try:
            # tensors for each place of tied weights, as torch.func looks for these each time, and does
            # not restore a module with two names (pytorch#164759); a copy of the inputs, since a layer
            # that works in place writes to them
            outputs = functional_call(self._called, tensors, (copied(x),), tie_weights=False)
        finally:
            self._restore()
        return outputs.float() if self.precision == "bfloat16" else outputs

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Make calls safe for torch.func, in eval mode; restore everything on exit.

        Attributes that a forward pass sets on its modules are restored too. Only one thread at a time
        can enter, because flags of the module and of the process are changed.
        """
        with ExitStack() as stack:
            stack.enter_context(ONE_AT_A_TIME)
            if not self._held and torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            if not self._held:
                stack.enter_context(self._at_rest())
                stack.enter_context(self._flags())
            yield

    @contextmanager
    def _flags(self) -> Iterator[None]:
        """Set flags of the process: fused kernels have no second derivative or no forward mode."""
        mha, flags = torch.backends.mha, [(parametrize, "_cache_enabled", 0)]
        # inside parametrize.cached(), weights computed elsewhere would be taken
        if any(isinstance(layer, nn.RNNBase) for layer in self.module.modules()):
            flags += [(b, "enabled", False) for b in (torch.backends.mkldnn, torch.backends.cudnn)]
        with ExitStack() as stack:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
            mha.set_fastpath_enabled(False)
            stack.enter_context(self.computing(self.precision))
            if "torch._dynamo" in sys.modules:  # a compiled layer has no second derivative
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            for holder, name, value in flags:
                stack.callback(setattr, holder, name, getattr(holder, name))
                setattr(holder, name, value)
            yield

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """Set eval mode and plain gradients, and note the tensors and attributes of the layers."""
        layers = dict(self.module.named_modules())  # each once, whatever its names
        modes = [(layer, "training") for layer in layers.values() if layer.training]
        tables = [layer for layer in layers.values() if isinstance(layer, nn.Embedding)]
        others = "sparse", "scale_grad_by_freq"  # of which gradients are no derivatives
        modes += [(table, name) for table in tables for name in others if getattr(table, name)]
        try:
            for layer, name in modes:
                setattr(layer, name, False)
            self._note(layers)
            self._held = True
            yield
        finally:
            self._restore()
            self._leave()
            for layer, name in modes:
                setattr(layer, name, True)

    def _note(self, layers: dict[str, nn.Module]) -> None:
        names: dict[int, str] = {}
        for path, layer in layers.items():
            if isinstance(layer, torch.jit.ScriptModule):  # whose tensors cannot be replaced
                continue
            self._noted += [(vars(layer), vars(layer).copy())]
            # a lookup with max_norm shrinks the rows it reads, in the weights themselves
            is_written = getattr(layer, "max_norm", None) is not None
            for holder in (layer._parameters, layer._buffers):
                for key, tensor in holder.items():
                    if tensor is None:
                        continue
                    place = f"{path}.{key}" if path else key
                    name = self._places[f"module.{place}"] = names.setdefault(id(tensor), place)
                    if name not in self._tensors:
                        self._tensors[name] = tensor.detach()
                        if is_written or holder is layer._buffers:
                            self._written.append(name)

    def _restore(self) -> None:
        """Restore the attributes of all layers."""
        for now, before in self._noted:
            if len(now) != len(before) or not all(map(is_, now.values(), before.values())):
                now.clear()
                now.update(before)

    @contextmanager
    def computing(self, precision: str) -> Iterator[None]:
        """Compute matrix products in the chosen precision, independent of global settings."""
        here = self.device.type
        with ExitStack() as stack:
            if here == "cuda":
                stack.enter_context(tf32(self.device, precision == "tf32"))
            for device_type in {"cpu", here}:
                if not torch.amp.is_autocast_available(device_type):
                    continue
                low = precision == "bfloat16" and device_type == here
                if low or torch.is_autocast_enabled(device_type):
                    autocast = torch.autocast(device_type, torch.bfloat16, low, cache_enabled=False)
                    stack.enter_context(autocast)
            yield

    @property
    def device(self) -> torch.device:
        """The device of the weights; the CPU for a network without any."""
        weights = self._tensors.values() if self._held else self.module.parameters()
        return next((weight.device for weight in weights), torch.device("cpu"))
