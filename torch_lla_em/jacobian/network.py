"""A trained network as a pure function of its parameters, whose tensors are restored after a call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
from torch_lla_em.runtime import tf32, without_autocast

ForwardFn = Callable[[nn.Module, Any], Tensor]


class Network:
    """f(x; w) of a module, which is not changed, with the axis of the classes last. Call it inside ``guarded()``."""

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
        self._note({})

    def use(self, precision: str) -> None:
        """Compute matrix products in another precision from now on."""
        self.precision = precision

    def weights(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Return the named parameters, detached."""
        with self.guarded():
            return {name: self._tensors[name] for name in names}

    def leaves(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Return the named parameters as leaves of a new graph, inside ``guarded()``."""
        return {name: self._tensors[name].detach().requires_grad_() for name in names}

    def outputs(self, x: Any, weights: dict[str, Tensor] | None = None) -> Tensor:
        """Return f(x), shape (B, ..., C), with some weights replaced; call it inside ``guarded()``."""
        assert self._noted, "outside of guarded()"
        placed = {**self._tensors, **(weights or {})}
        for name in self._written:
            placed[name] = placed[name].clone()
        tensors = {place: placed[name] for place, name in self._places.items()}
        try:
            # tensors for each place of tied weights, as torch.func looks for these each time, and does
            # not restore a module with two names (pytorch#164759); a copy of the inputs, since a layer
            # that works in place writes to them
            f = functional_call(self._called, tensors, (copied(x),), tie_weights=False)
        finally:
            self._restore()
        if self.class_dim != -1:
            if not -f.ndim <= self.class_dim < f.ndim:
                raise ValueError(
                    f"The outputs have shape {tuple(f.shape)}, so they have no axis class_dim="
                    f"{self.class_dim}. Pass a class_dim from {-f.ndim} to {f.ndim - 1}."
                )
            f = f.movedim(self.class_dim, -1)
        return f.float() if self.precision == "bfloat16" else f

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Make calls safe for torch.func, in eval mode; restore everything on exit, also attributes of layers.

        One thread at a time can enter, because flags of the module and of the process are changed.
        """
        with ONE_AT_A_TIME, torch.inference_mode(False), torch.no_grad():
            if self._noted:
                yield
                return
            layers = dict(self.module.named_modules())  # each once, whatever its names
            compiles = "torch._dynamo" in sys.modules
            # a compiled layer has no second derivative, a fused kernel none or no forward mode
            with (
                _exchanged(list(layers.values())),
                torch.compiler.set_stance("force_eager") if compiles else nullcontext(),
                sdpa_kernel(SDPBackend.MATH),
                self.computing(self.precision),
            ):
                try:
                    self._note(layers)
                    yield
                finally:
                    self._restore()
                    self._note({})

    def _note(self, layers: dict[str, nn.Module]) -> None:
        """Note tensors by name, those that a call may write to, their places, and the layers' attributes."""
        self._tensors: dict[str, Tensor] = {}
        self._written: list[str] = []
        self._places: dict[str, str] = {}
        self._noted: list[tuple[dict[str, Any], dict[str, Any]]] = []
        names: dict[int, str] = {}
        for path, layer in layers.items():
            if isinstance(layer, torch.jit.ScriptModule):  # whose tensors cannot be replaced
                continue
            self._noted.append((vars(layer), vars(layer).copy()))
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
        here, own = self.device, without_autocast(self.device)
        if precision == "bfloat16":
            own = torch.autocast(here.type, torch.bfloat16, cache_enabled=False)
        with tf32(here, precision == "tf32"), without_autocast(torch.device("cpu")), own:
            yield

    @property
    def device(self) -> torch.device:
        """The device of the weights; the CPU for a network without any."""
        return next((weight.device for weight in self.module.parameters()), torch.device("cpu"))


@contextmanager
def _exchanged(layers: list[nn.Module]) -> Iterator[None]:
    """Give attributes of layers and of the process the values that a call needs, and set them back on exit."""
    # inside parametrize.cached(), weights computed elsewhere would be taken
    flags: list[tuple[Any, str, Any]] = [(parametrize, "_cache_enabled", 0)]
    flags += [(torch.backends.mha, "_is_fastpath_enabled", False)]
    if any(isinstance(layer, nn.RNNBase) for layer in layers):
        flags += [(b, "enabled", False) for b in (torch.backends.mkldnn, torch.backends.cudnn)]
    # with sparse gradients or scaled ones, a table's are no derivatives
    of_tables = "sparse", "scale_grad_by_freq"
    for layer in layers:
        names = ("training", *(of_tables if isinstance(layer, nn.Embedding) else ()))
        flags += [(layer, name, False) for name in names if getattr(layer, name)]
    before = [getattr(holder, name) for holder, name, _ in flags]
    try:
        for flag in flags:
            setattr(*flag)
        yield
    finally:
        for (holder, name, _), value in zip(flags, before):
            setattr(holder, name, value)
