"""A trained network as a pure function of its parameters, whose tensors are restored after a
call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize

from torch_lla_em.data import Inputs, copied, default_forward, tensors_in
from torch_lla_em.runtime import ONE_AT_A_TIME, is_shortage, tf32, without_autocast

ForwardFn = Callable[[nn.Module, Any], Tensor]


class _Inside(NamedTuple):
    """The tensors and attributes of a network inside ``guarded()``."""

    tensors: dict[str, Tensor]  # parameters and buffers, detached, tied ones once
    places: dict[str, str]  # the name of the tensor at every place of the network
    written: list[str]  # names of those that a call may write to
    attributes: list[tuple[dict[str, Any], dict[str, Any]]]  # of each layer, and a copy


class Network:
    """f(x; w) of a module, which is not changed, with the axis of the classes last. Call it inside
    ``guarded()``."""

    def __init__(
        self,
        module: nn.Module,
        forward_fn: ForwardFn | None = None,
        class_dim: int = -1,
        precision: str = "float32",
    ):
        """``precision`` is that of matrix products, from ``Compute``."""
        wrappers = nn.DataParallel, nn.parallel.DistributedDataParallel
        while isinstance(module, wrappers) or "_orig_mod" in getattr(module, "_modules", ()):
            module = next(module.children())  # a wrapper, also of torch.compile, has one child
        if not isinstance(module, nn.Module):
            raise TypeError(f"The model is a {type(module).__name__}. Pass an nn.Module.")
        if any(isinstance(layer, torch.jit.ScriptModule) for layer in module.modules()):
            raise TypeError(
                "The model, or a part of it, is a scripted or traced module (torch.jit), whose "
                "weights cannot be replaced. Pass the Python module that it was made from."
            )
        self.module, self.class_dim, self.precision = module, class_dim, precision
        self.forward_fn: ForwardFn = forward_fn or default_forward
        self._called = nn.Module()  # calls ``forward_fn``, as functional_call takes it
        self._called.add_module("module", module)
        vars(self._called)["forward"] = partial(self.forward_fn, module)
        self._inside = _Inside({}, {}, [], [])

    def weights(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Return the named parameters, detached."""
        with self.guarded() as inside:
            return {name: inside.tensors[name] for name in names}

    def leaves(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Return the named parameters as leaves of a new graph, inside ``guarded()``."""
        tensors = self._inside.tensors
        return {name: tensors[name].detach().requires_grad_() for name in names}

    def outputs(self, x: Inputs, weights: dict[str, Tensor] | None = None) -> Tensor:
        """Return f(x), shape (B, ..., C), with some weights replaced; call it inside
        ``guarded()``."""
        tensors, places, written, attributes = self._inside
        assert attributes, "outside of guarded()"
        placed = {**tensors, **(weights or {})}
        for name in written:
            placed[name] = placed[name].clone()
        at = {place: placed[name] for place, name in places.items()}
        try:
            # tied weights are passed at each of their places, since torch.func searches for these
            # in each call, and does not restore a module with two names (pytorch#164759); inputs
            # are copied, since a layer that works in place writes to them
            f: Tensor = functional_call(self._called, at, (copied(x),), tie_weights=False)
        except RuntimeError as error:
            self._explain(error, x)
            raise
        finally:
            _restore(attributes)
        f = f if self.class_dim == -1 else f.movedim(self.class_dim, -1)
        return f.float() if self.precision == "bfloat16" else f

    def _explain(self, error: RuntimeError, x: Inputs) -> None:
        """Raise an error if the inputs have another floating-point dtype than the weights."""
        given = {t.dtype for t in tensors_in(x) if t.is_floating_point()}
        expected = {p.dtype for p in self.module.parameters() if p.is_floating_point()}
        if not given or not expected or given & expected or is_shortage(error):
            return
        (one, *_), (other, *_) = given, expected
        raise TypeError(
            f"Inputs have the dtype {one}, but the network's weights {other} ({error}). Pass "
            f"inputs.to({other}). If the network was converted after fit, it no longer has the "
            "dtype of the training data: pass these in the new dtype, too."
        ) from error

    @contextmanager
    def guarded(self) -> Iterator[_Inside]:
        """Make calls safe for torch.func, in eval mode. Everything is restored on exit, including
        attributes of layers.

        One thread at a time can enter, because flags of the module and of the process are changed.
        """
        with ONE_AT_A_TIME, torch.inference_mode(False), torch.no_grad():
            if self._inside.attributes:
                yield self._inside
                return
            layers = dict(self.module.named_modules())  # a module with several names occurs once
            before = [(layer.__dict__, layer.__dict__.copy()) for layer in layers.values()]
            # flags of the process; inside parametrize.cached(), cached weights would be used
            flags: list[tuple[Any, str]] = [(parametrize, "_cache_enabled")]
            flags += [(torch.backends.mha, "_is_fastpath_enabled")]
            if any(isinstance(layer, nn.RNNBase) for layer in layers.values()):
                flags += [(torch.backends.mkldnn, "enabled"), (torch.backends.cudnn, "enabled")]
            values = [getattr(*flag) for flag in flags]
            compiles = "torch._dynamo" in sys.modules
            # a compiled layer has no second derivative, a fused kernel none or no forward mode
            with (
                torch.compiler.set_stance("force_eager") if compiles else nullcontext(),
                sdpa_kernel(SDPBackend.MATH),
                self.computing(self.precision),
            ):
                try:
                    for flag in flags:
                        setattr(*flag, False)
                    for layer in layers.values():
                        layer.__dict__["training"] = False
                        if isinstance(layer, nn.Embedding):  # scaled gradients are no derivatives
                            layer.__dict__.update(sparse=False, scale_grad_by_freq=False)
                    self._inside = _noted(layers)
                    yield self._inside
                finally:
                    self._inside = _Inside({}, {}, [], [])
                    _restore(before)
                    for flag, value in zip(flags, values, strict=True):
                        setattr(*flag, value)

    @contextmanager
    def computing(self, precision: str) -> Iterator[None]:
        """Compute matrix products in the chosen precision, independent of global settings."""
        here = self.device
        of_network = without_autocast(here)
        if precision == "bfloat16":
            of_network = torch.autocast(here.type, torch.bfloat16, cache_enabled=False)
        of_gpu = tf32(precision == "tf32") if here.type == "cuda" else nullcontext()
        with of_gpu, without_autocast(torch.device("cpu")), of_network:
            yield

    @property
    def device(self) -> torch.device:
        """The device of the weights; the CPU for a network without any."""
        return next((weight.device for weight in self.module.parameters()), torch.device("cpu"))


def _noted(layers: dict[str, nn.Module]) -> _Inside:
    """Return the tensors of layers, and the layers' attributes."""
    inside, names = _Inside({}, {}, [], []), dict[int, str]()
    for path, layer in layers.items():
        inside.attributes.append((layer.__dict__, layer.__dict__.copy()))
        # a lookup with max_norm shrinks the rows it reads, in the weights themselves
        is_written = getattr(layer, "max_norm", None) is not None
        for holder in (layer._parameters, layer._buffers):
            for key, tensor in holder.items():
                if tensor is None:
                    continue
                place = f"{path}.{key}" if path else key
                name = inside.places[f"module.{place}"] = names.setdefault(id(tensor), place)
                if name not in inside.tensors:
                    # a tensor made in inference mode cannot be differentiated, but its copy can
                    is_plain = not tensor.is_inference()
                    inside.tensors[name] = tensor.detach() if is_plain else tensor.clone()
                    if is_written or holder is layer._buffers:
                        inside.written.append(name)
    return inside


def _restore(attributes: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Restore the attributes of layers."""
    for now, before in attributes:
        if len(now) != len(before) or not all(map(is_, now.values(), before.values())):
            now.clear()
            now.update(before)
