"""A trained network as a pure function of its parameters, whose tensors are restored after a call."""

from __future__ import annotations

import copy
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from operator import is_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from torch_lla_em.data import copied, default_forward
from torch_lla_em.runtime import tf32

ForwardFn = Callable[[nn.Module, Any], Tensor]
WeightFunction = Callable[[dict[str, Tensor]], Tensor]

# entries of a container beyond which it takes too long to look through
_ENTRIES = 256
_OF_MODULES = vars(nn.Module()).keys()

ONE_AT_A_TIME = threading.RLock()
"""Held during a call: other threads would see replaced weights, and flags of the whole process."""

if hasattr(os, "register_at_fork"):
    # a fork waits for other threads, as the child would inherit replaced weights
    os.register_at_fork(
        before=ONE_AT_A_TIME.acquire,
        after_in_parent=ONE_AT_A_TIME.release,
        after_in_child=ONE_AT_A_TIME.release,
    )


class Attributes:
    """The attributes of a module's layers at one time, which can be restored.

    The entries of lists, dicts, sets and deques are restored too if they hold tensors; other
    containers may count calls.
    """

    def __init__(self, module: nn.Module):
        self._dicts: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        self.layers = list(module.modules())
        for layer in self.layers:
            self._dicts.append((vars(layer), dict(vars(layer))))
            others = [value for name, value in vars(layer).items() if name not in _OF_MODULES]
            for value in others:
                if isinstance(value, (dict, list, set, deque)) and len(value) <= _ENTRIES:
                    self._containers.append((value, copy.copy(value)))

    @property
    def differ(self) -> bool:
        """Whether any of them has changed."""
        return any(differ(*pair) for pair in (*self._dicts, *self._containers))

    def restore(self) -> None:
        """Restore all of them."""
        for now, before in self._dicts:
            if differ(now, before):
                if list(now) != list(before):
                    now.clear()
                now.update(before)
        for container, entries in self._containers:
            if differ(container, entries) and any(
                isinstance(leaf, Tensor) for leaf in tree_leaves((container, entries))
            ):
                container.clear()
                refill = container.extend if hasattr(container, "extend") else container.update
                refill(entries)


class Exchange(Attributes):
    """Every tensor of a module, which can be replaced by others for a call.

    ``torch.func.functional_call`` works by names and does not restore a module that is registered
    under two names (pytorch#164759). Here each module is visited only once.
    """

    def __init__(self, module: nn.Module):
        super().__init__(module)
        parameters = {id(p): name for name, p in module.named_parameters()}
        names = dict(parameters)
        self._slots: list[tuple[dict[str, Any], str, str]] = []
        """Where tensors are: a dict, its key, and the name, one for all places of tied weights."""

        self.fixed: dict[str, Tensor] = {}
        """The weights."""

        self._written: dict[str, Tensor] = {}
        """All other tensors, which a call can change."""

        for path, layer in module.named_modules():
            if isinstance(layer, torch.jit.ScriptModule):  # whose tensors cannot be replaced
                continue
            for holder in (layer._parameters, layer._buffers, vars(layer)):
                if holder is not vars(layer):
                    self._dicts.append((holder, dict(holder)))
                for key, tensor in holder.items():
                    if not isinstance(tensor, Tensor):
                        continue
                    name = names.setdefault(id(tensor), f"{path}.{key}" if path else key)
                    self._slots.append((holder, key, name))
                    kind = self.fixed if id(tensor) in parameters else self._written
                    kind.setdefault(name, tensor.detach())
            # a lookup with max_norm shrinks the rows it reads, in the weights themselves
            if getattr(layer, "max_norm", None) is not None and "weight" in layer._parameters:
                name = names[id(layer.weight)]
                self._written[name] = self.fixed[name]
        self.is_at_rest = not any(map(_is_in_training, self.layers))
        """Whether all layers are in eval mode, and no embedding has sparse gradients."""

        self.has_recurrent = any(isinstance(layer, nn.RNNBase) for layer in self.layers)
        self._children = [(layer._modules, dict(layer._modules)) for layer in self.layers]
        self._places = self._addresses()

    @property
    def is_current(self) -> bool:
        """Whether this is the module still: no layer, tensor or attribute has been replaced."""
        if self._places is None or self.differ or any(differ(*pair) for pair in self._children):
            return False
        return self._addresses() == self._places

    def _addresses(self) -> list[tuple[int, torch.Size]] | None:
        """Return where the tensors are in memory, or None if that is not known."""
        if any(isinstance(layer, torch.jit.ScriptModule) for layer in self.layers):
            return None
        tensors = [holder[key] for holder, key, _ in self._slots]
        if any(tensor.layout != torch.strided for tensor in tensors):
            return None
        return [(tensor.data_ptr(), tensor.shape) for tensor in tensors]

    @contextmanager
    def exchanged(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Replace weights, and tensors that a call can change by copies; restore all on exit."""
        placed: dict[str, Tensor] = {}
        try:
            for holder, key, name in self._slots:
                if name not in placed:
                    tensor = weights.get(name, self.fixed.get(name))
                    if name in self._written:
                        tensor = (self._written[name] if tensor is None else tensor).clone()
                    placed[name] = tensor
                holder[key] = placed[name]
            yield
        finally:
            self.restore()


def differ(now: Any, before: Any) -> bool:
    """Whether the values of a dict, or the entries of another container, are other objects."""
    if isinstance(now, dict):
        return len(now) != len(before) or not all(map(is_, now.values(), before.values()))
    return len(now) != len(before) or not all(map(is_, now, before))


def _is_in_training(layer: nn.Module) -> bool:
    return layer.training or (isinstance(layer, nn.Embedding) and layer.sparse)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the network inside ``torch.compile``, ``DataParallel`` or DDP wrappers."""
    while True:
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            module = module.module
        elif isinstance(module, nn.Module) and "_orig_mod" in module._modules:
            module = module.get_submodule("_orig_mod")
        else:
            return module


class ContiguousInputs(TorchFunctionMode):
    """Copies inputs of linear layers that are not contiguous.

    ``torch.func`` multiplies a contiguous (B, L, E) by the weight in one product. For other layouts,
    such as the transposed outputs of attention, it takes one product for each of the B or L entries,
    and a gradient of the weight's size for each. For a ViT this takes four to six times as long.
    """

    def __init__(self) -> None:
        super().__init__()
        self.needed = False
        """Whether anything had to be copied."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear:
            args = self._contiguous(args, 1)
        elif func is F.multi_head_attention_forward:  # the functions it calls do not come here
            args = self._contiguous(args, 3)
        return func(*args, **(kwargs or {}))

    def _contiguous(self, args: tuple[Any, ...], count: int) -> tuple[Any, ...]:
        """Return the first ``count`` arguments as contiguous tensors; equal arguments stay one tensor."""
        copies: dict[int, Any] = {}
        for tensor in args[:count]:
            if tensor.dim() > 2 and not tensor.is_contiguous():
                copies.setdefault(id(tensor), tensor.contiguous())
        self.needed = self.needed or bool(copies)
        return tuple(copies.get(id(argument), argument) for argument in args)


class NoJacobianError(NotImplementedError):
    """Neither forward nor reverse mode gives the Jacobian of a model."""


class Network:
    """f(x; w) of a module, whose weights, buffers, mode and attributes are not changed.

    The axis of the classes is moved last, so that outputs are (B, ..., C) throughout.
    """

    def __init__(self, module: nn.Module, forward_fn: ForwardFn | None = None, class_dim: int = -1):
        self.module = unwrap(module)
        self.forward_fn = forward_fn or default_forward
        self.class_dim = class_dim
        self.precision = "float32"
        """Precision of matrix products, from ``Compute``."""

        self._held: Exchange | None = None
        self._known: Exchange | None = None
        """The state of the module at the last call, which is used again as long as it is current."""

        self._at_rest: Exchange | None = None
        """The same in eval mode."""

        self._contiguous: ContiguousInputs | None = ContiguousInputs()
        _refuse(self.module)

    def use(self, precision: str) -> None:
        """Compute matrix products in another precision from now on."""
        self.precision = precision

    def weights(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Return the named parameters, detached."""
        if self._held is not None:
            return {name: self._held.fixed[name] for name in names}
        with ONE_AT_A_TIME:
            parameters = dict(self.module.named_parameters())
            return {name: parameters[name].detach() for name in names}

    def function(self, x: Any, in_order: bool = True) -> WeightFunction:
        """Return the map from named weights to f(x), shape (B, ..., C), or in the module's own shape."""
        state = self._held or Exchange(self.module)

        def f(weights: dict[str, Tensor]) -> Tensor:
            with state.exchanged(weights), self._contiguous or nullcontext():
                # a copy of the inputs, since a layer that works in place writes to them
                outputs = self.forward_fn(self.module, copied(x))
            if self._contiguous and not self._contiguous.needed:
                self._contiguous = None  # it takes microseconds of every call
            outputs = outputs.float() if self.precision == "bfloat16" else outputs
            return outputs.movedim(self.class_dim, -1) if in_order else outputs

        return f

    def outputs(self, x: Any, weights: dict[str, Tensor] | None = None) -> Tensor:
        """Return the outputs with some weights replaced, in the module's own shape."""
        return self.function(x, in_order=False)(weights or {})

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Make calls safe for torch.func, in eval mode; restore everything on exit.

        Attributes that a forward pass sets on its modules are restored too. Only one thread at a time
        can enter, because flags of the module and of the process are changed.
        """
        with ExitStack() as stack:
            stack.enter_context(ONE_AT_A_TIME)
            if self._held is not None:
                stack.enter_context(torch.no_grad())
                yield
                return
            stack.callback(setattr, self, "_held", None)
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            # inside parametrize.cached(), weights computed elsewhere would be taken
            stack.callback(setattr, parametrize, "_cache_enabled", parametrize._cache_enabled)
            parametrize._cache_enabled = 0
            stack.callback(
                torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled()
            )
            torch.backends.mha.set_fastpath_enabled(False)
            stack.enter_context(self.computing(self.precision))
            if "torch._dynamo" in sys.modules:  # a compiled layer has no second derivative
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            state = self._current()
            stack.callback(state.restore)
            if state.has_recurrent:
                backends: tuple[Any, ...] = torch.backends.mkldnn, torch.backends.cudnn
                for backend in backends:
                    stack.callback(setattr, backend, "enabled", backend.enabled)
                    backend.enabled = False
            if not state.is_at_rest:
                for layer in state.layers:
                    # Attributes does not restore the mode of a scripted layer
                    stack.callback(setattr, layer, "training", layer.training)
                    layer.training = False
                    if isinstance(layer, nn.Embedding):
                        layer.sparse = False
                self._at_rest = state = self._at_rest or Exchange(self.module)
            self._held = state
            yield

    def _current(self) -> Exchange:
        """Return the state of the module, which is taken anew only after a change."""
        if self._known is None or not self._known.is_current:
            self._known, self._at_rest = Exchange(self.module), None
        return self._known

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the state of the module, which is that of another one in a copy."""
        return {**self.__dict__, "_held": None, "_known": None, "_at_rest": None}

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
        weights = self.module.parameters() if self._held is None else self._held.fixed.values()
        return next((weight.device for weight in weights), torch.device("cpu"))


def _refuse(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"The model is a {type(module).__name__}. Pass an nn.Module.")
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            "The model is a scripted or traced module (torch.jit), whose weights cannot be "
            "replaced. Pass the Python module that it was made from."
        )
    for name, parameter in module.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"The parameter {name!r} has no shape yet: call the model once on a batch."
            )
        if parameter.is_inference():
            raise ValueError(
                f"The parameter {name!r} was created in torch.inference_mode and cannot be "
                "differentiated. Pass copy.deepcopy(model), made outside of inference mode."
            )
        if type(parameter).__name__ in ("DTensor", "FlatParameter"):
            raise TypeError(
                f"The parameter {name!r} is sharded over processes (FSDP); pass the whole "
                "module, and give each process its share of the data."
            )
