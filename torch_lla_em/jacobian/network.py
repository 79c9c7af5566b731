"""A trained network as a pure function of its parameters, whose tensors are restored after a call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from torch_lla_em.data import copied, default_forward
from torch_lla_em.jacobian.state import ONE_AT_A_TIME, NetworkState
from torch_lla_em.runtime import tf32

ForwardFn = Callable[[nn.Module, Any], Tensor]
WeightFunction = Callable[[dict[str, Tensor]], Tensor]


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


class _Called(nn.Module):
    """The network with its ``forward_fn``, as ``torch.func.functional_call`` takes it."""

    def __init__(self, module: nn.Module, forward_fn: ForwardFn):
        super().__init__()
        self.module, self.forward = module, partial(forward_fn, module)


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

        self._held: NetworkState | None = None
        self._known: NetworkState | None = None
        """The state of the module at the last call, which is used again as long as it is current."""

        self._at_rest: NetworkState | None = None
        """The same in eval mode."""

        self._contiguous: ContiguousInputs | None = ContiguousInputs()
        _refuse(self.module)
        self._called = _Called(self.module, self.forward_fn)

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
        state = self._held or NetworkState(self, compares=False)

        def f(weights: dict[str, Tensor]) -> Tensor:
            tensors = {f"module.{place}": t for place, t in state.replaced(weights).items()}
            try:
                with self._contiguous or nullcontext():
                    # tensors for each place of tied weights, as torch.func looks for these each time,
                    # and does not restore a module with two names (pytorch#164759); a copy of the
                    # inputs, since a layer that works in place writes to them
                    given = (copied(x),)
                    outputs = functional_call(self._called, tensors, given, tie_weights=False)
            finally:
                state.restore()
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
                self._at_rest = state = self._at_rest or NetworkState(self, compares=False)
            self._held = state
            yield

    def _current(self) -> NetworkState:
        """Return the state of the module, which is taken anew only after a change."""
        if self._known is None or not self._known.is_current:
            self._known, self._at_rest = NetworkState(self, compares=False), None
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
