"""A trained network as a pure function of its parameters, whose tensors are restored after a call."""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from operator import is_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from torch_lla_em.data import copied, default_forward
from torch_lla_em.jacobian.state import ONE_AT_A_TIME
from torch_lla_em.runtime import tf32

ForwardFn = Callable[[nn.Module, Any], Tensor]
WeightFunction = Callable[[dict[str, Tensor]], Tensor]

_OF_MODULES = vars(nn.Module()).keys()
# entries of a container beyond which it takes too long to look through
_ENTRIES = 256


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
        # the functions that multi-head attention calls do not come here
        count = {F.linear: 1, F.multi_head_attention_forward: 3}.get(func, 0)
        copies: dict[int, Tensor] = {}  # equal arguments stay one tensor
        for tensor in args[:count]:
            if tensor.dim() > 2 and not tensor.is_contiguous():
                copies.setdefault(id(tensor), tensor.contiguous())
        self.needed = self.needed or bool(copies)
        return func(*(copies.get(id(argument), argument) for argument in args), **(kwargs or {}))


class _Called(nn.Module):
    """The network with its ``forward_fn``, as ``torch.func.functional_call`` takes it."""

    def __init__(self, module: nn.Module, forward_fn: ForwardFn):
        super().__init__()
        self.module, self.forward = module, partial(forward_fn, module)


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
        _refuse(module)
        self.module = module
        self.forward_fn = forward_fn or default_forward
        self.class_dim = class_dim
        self.precision = "float32"
        """Precision of matrix products, from ``Compute``."""

        self._contiguous: ContiguousInputs | None = ContiguousInputs()
        self._called = _Called(module, self.forward_fn)
        self._layers: dict[str, nn.Module] = {}
        self._forget()

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
        own = {name: self._tensors[name].clone() for name in self._written}
        placed = {**self._tensors, **own}
        for name, weight in (weights or {}).items():
            placed[name] = weight.clone() if name in self._written else weight
        tensors = {f"module.{place}": placed[name] for place, name in self._places.items()}
        try:
            with self._contiguous or nullcontext():
                # tensors for each place of tied weights, as torch.func looks for these each time, and
                # does not restore a module with two names (pytorch#164759); a copy of the inputs,
                # since a layer that works in place writes to them
                outputs = functional_call(self._called, tensors, (copied(x),), tie_weights=False)
        finally:
            self._restore()
        if self._contiguous and not self._contiguous.needed:
            self._contiguous = None  # it takes microseconds of every call
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
                stack.enter_context(self._set_flags())
            yield

    @contextmanager
    def _set_flags(self) -> Iterator[None]:
        """Set flags of the process: fused kernels have no second derivative or no forward mode."""
        mha, flags = torch.backends.mha, [(parametrize, "_cache_enabled", 0)]
        # inside parametrize.cached(), weights computed elsewhere would be taken
        if any(isinstance(layer, nn.RNNBase) for layer in self._layers.values()):
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
        """Set eval mode, and note where the layers have tensors and attributes, anew after a change."""
        with ExitStack() as stack:
            self._set_eval(stack)
            if not self._is_current():
                self._layers = dict(self.module.named_modules())  # each once, whatever its names
                self._set_eval(stack)
                self._look_through()
            stack.callback(self._restore)
            stack.callback(setattr, self, "_held", False)
            self._held = True
            yield

    def _set_eval(self, stack: ExitStack) -> None:
        for layer in self._layers.values():
            for name in ("training", "sparse")[: 1 + isinstance(layer, nn.Embedding)]:
                if getattr(layer, name):
                    # a third of the time of nn.Module's own; scripted layers have no such entry
                    own = vars(layer)
                    put = own.__setitem__ if name in own else partial(setattr, layer)
                    stack.callback(put, name, True)
                    put(name, False)

    def _forget(self) -> None:
        """Forget the tensors and attributes of the module."""
        self._held = False
        """Whether this thread is inside ``guarded()``."""

        self._tensors: dict[str, Tensor] = {}
        """All tensors by name, detached."""

        self._places: dict[str, str] = {}
        """The name of the tensor at each place, which is the same for all places of tied weights."""

        self._written: set[str] = set()
        """Tensors that a call can change."""

        self._noted: list[tuple[Any, Any, bool]] = []
        """Attributes and containers of the layers, with copies of them, and whether they are attributes."""

        self._addresses: list[Any] | None = None
        """Where tensors are; None if that is not known."""

    def _is_current(self) -> bool:
        """Whether no layer, tensor or attribute has been replaced since they were noted."""
        known = self._addresses
        return (
            known is not None
            and not any(_differ(now, before) for now, before, _ in self._noted)
            and [tensor.data_ptr() for tensor in self._objects] == known
        )

    def _look_through(self) -> None:
        """Note where the layers have tensors and attributes."""
        layers = self._layers
        self._forget()
        names = {id(p): name for name, p in self.module.named_parameters()}
        parameters, self._objects = set(names.values()), list[Tensor]()
        for path, layer in layers.items():
            own = vars(layer)
            dicts = [own]
            for name, value in own.items():
                listed = name not in _OF_MODULES and isinstance(value, (dict, list, set, deque))
                if listed and len(value) <= _ENTRIES:
                    self._noted.append((value, copy.copy(value), False))
            if not isinstance(layer, torch.jit.ScriptModule):  # whose tensors cannot be replaced
                dicts += [layer._parameters, layer._buffers, layer._modules]
                for holder in (layer._parameters, layer._buffers, own):
                    for key, tensor in holder.items():
                        if isinstance(tensor, Tensor):
                            place = f"{path}.{key}" if path else key
                            name = self._places[place] = names.setdefault(id(tensor), place)
                            self._tensors.setdefault(name, tensor.detach())
                            self._objects.append(tensor)
            self._noted += [(entries, entries.copy(), True) for entries in dicts]
            # a lookup with max_norm shrinks the rows it reads, in the weights themselves
            if getattr(layer, "max_norm", None) is not None and "weight" in layer._parameters:
                parameters.discard(names[id(layer.weight)])
        self._written = self._tensors.keys() - parameters
        scripted = any(isinstance(layer, torch.jit.ScriptModule) for layer in layers.values())
        if not scripted and all(tensor.layout == torch.strided for tensor in self._objects):
            self._addresses = [tensor.data_ptr() for tensor in self._objects]

    def _restore(self) -> None:
        """Restore all attributes, and the entries of containers that hold tensors; others may count."""
        for now, before, always in self._noted:
            if not _differ(now, before):
                continue
            if always or any(isinstance(leaf, Tensor) for leaf in tree_leaves((now, before))):
                now.clear()
                (now.extend if hasattr(now, "extend") else now.update)(before)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the tensors of the module, which are those of another one in a copy."""
        other = copy.copy(self.__dict__)
        other.update(_held=False, _layers={}, _tensors={}, _places={}, _written=set(), _noted=[])
        return {**other, "_objects": [], "_addresses": None}

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


def _differ(now: Any, before: Any) -> bool:
    """Whether the values of a dict, or the entries of another container, are other objects."""
    if isinstance(now, dict):
        return len(now) != len(before) or not all(map(is_, now.values(), before.values()))
    return len(now) != len(before) or not all(map(is_, now, before))


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
