"""The layers and tensors of a network at one time: replaced for a call, restored, and compared."""

from __future__ import annotations

import copy
import os
from collections import deque
from collections.abc import Mapping
from operator import is_
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torch_lla_em.runtime import Turns, files

# entries of a container beyond which it takes too long to look through
_ENTRIES = 256
_OF_MODULES = vars(nn.Module()).keys()
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}

ONE_AT_A_TIME = Turns()
"""Held during a call: other threads would see replaced weights, and flags of the whole process."""

if hasattr(os, "register_at_fork"):
    # a fork waits for other threads, as the child would inherit replaced weights
    os.register_at_fork(
        before=ONE_AT_A_TIME.acquire,
        after_in_parent=ONE_AT_A_TIME.release,
        after_in_child=ONE_AT_A_TIME.release_in_child,
    )


class HasModule(Protocol):
    """A network."""

    module: nn.Module


class NetworkState:
    """The layers, tensors and attributes of a network at one time.

    ``holds`` compares it with the present one: objects, addresses and version counters, and the sum
    of the bits of each tensor, since ``.data`` and fused optimisers write without a new version. A
    change of any one number changes its sum. For a perceptron of 45,405 weights this takes 20 µs
    (a prediction .8 ms), and 1.1 ms for 9.5 million. If anything looks changed, a hash of every bit
    decides. For a call, ``replaced`` has the tensors that are put into the module, and ``restore``
    takes back what the call has set.
    """

    def __init__(
        self, network: HasModule, fingerprint: Tensor | None = None, compares: bool = True
    ):
        """``fingerprint``: the hash that is expected; ``compares``: False for calls alone."""
        with ONE_AT_A_TIME:
            self._look_through(network.module)
            self.fingerprint = fingerprint
            """A hash of every bit, and of the names."""

            self._is_read = fingerprint is None and compares
            if self._is_read:
                self.fingerprint = files.fingerprint(network.module)
                self._read(network.module)

    def _look_through(self, module: nn.Module) -> None:
        """Note where the layers have tensors and attributes."""
        self.layers = list(module.modules())
        self._kinds = [type(layer) for layer in self.layers]
        self._scripted = any(isinstance(layer, torch.jit.ScriptModule) for layer in self.layers)
        parameters = {id(p): name for name, p in module.named_parameters()}
        names = dict(parameters)
        self._registered: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._slots: dict[str, tuple[Tensor, str]] = {}
        """The tensor of each place, and a name, which is the same for all places of tied weights."""

        self.fixed: dict[str, Tensor] = {}
        """The weights."""

        self._written: dict[str, Tensor] = {}
        """All other tensors, which a call can change."""

        for path, layer in module.named_modules():  # each once, whatever its names
            self._attributes.append((vars(layer), dict(vars(layer))))
            others = [value for name, value in vars(layer).items() if name not in _OF_MODULES]
            for value in others:
                if isinstance(value, (dict, list, set, deque)) and len(value) <= _ENTRIES:
                    self._containers.append((value, copy.copy(value)))
            if isinstance(layer, torch.jit.ScriptModule):  # whose tensors cannot be replaced
                continue
            registered = layer._parameters, layer._buffers, layer._modules
            self._registered += [(own, dict(own)) for own in registered]
            for holder in (layer._parameters, layer._buffers, vars(layer)):
                for key, tensor in holder.items():
                    if not isinstance(tensor, Tensor):
                        continue
                    place = f"{path}.{key}" if path else key
                    name = names.setdefault(id(tensor), place)
                    self._slots[place] = tensor, name
                    kind = self.fixed if id(tensor) in parameters else self._written
                    kind.setdefault(name, tensor.detach())
            # a lookup with max_norm shrinks the rows it reads, in the weights themselves
            if getattr(layer, "max_norm", None) is not None and "weight" in layer._parameters:
                name = names[id(layer.weight)]
                self._written[name] = self.fixed[name]
        self.is_at_rest = not any(map(_is_in_training, self.layers))
        """Whether all layers are in eval mode, and no embedding has sparse gradients."""

        self.has_recurrent = any(isinstance(layer, nn.RNNBase) for layer in self.layers)
        self._places = self._addresses()

    @property
    def is_current(self) -> bool:
        """Whether this is the module still: no layer, tensor or attribute has been replaced."""
        if self._scripted or self._places is None:
            return False
        known = self._registered, self._attributes, self._containers
        same = not any(_differ(*pair) for kind in known for pair in kind)
        return same and self._addresses() == self._places

    def _addresses(self) -> list[tuple[int, torch.Size]] | None:
        """Return where the tensors are in memory, or None if that is not known."""
        tensors = [tensor for tensor, _ in self._slots.values()]
        if any(tensor.layout != torch.strided for tensor in tensors):
            return None
        return [(tensor.data_ptr(), tensor.shape) for tensor in tensors]

    def replaced(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensor for each place in the module: given weights, and copies if a call writes."""
        placed = {**self.fixed, **weights}
        for name, tensor in self._written.items():
            placed[name] = placed.get(name, tensor).clone()
        return {place: placed[name] for place, (_, name) in self._slots.items()}

    def restore(self) -> None:
        """Restore all attributes, and the entries of containers that hold tensors; others may count."""
        for now, before in (*self._attributes, *self._registered):
            if _differ(now, before):
                if list(now) != list(before):
                    now.clear()
                now.update(before)
        for container, entries in self._containers:
            if _differ(container, entries) and any(
                isinstance(leaf, Tensor) for leaf in tree_leaves((container, entries))
            ):
                container.clear()
                refill = container.extend if hasattr(container, "extend") else container.update
                refill(entries)

    def _read(self, module: nn.Module) -> None:
        """Note what a change of a tensor or of a layer alters."""
        self._tensors = dict(module.named_parameters()) | {
            name: buffer
            for name, buffer in module.named_buffers()
            if buffer.is_floating_point() or buffer.is_complex()
        }
        self._marks: dict[str, Any] = {n: _mark(tensor) for n, tensor in self._tensors.items()}
        self._marks |= {f"layer {path}": type(own) for path, own in module.named_modules()}
        self._bits = [(n, bits) for n, t in self._tensors.items() for bits in _bits(t)]
        self._sums = self._added()
        # the bits of views with gaps are copies, which show no changes
        place = lambda tensor: tensor.untyped_storage().data_ptr()  # noqa: E731
        self._is_seen = all(place(bits) == place(self._tensors[n]) for n, bits in self._bits)
        self._sizes = {name: _size(tensor) for name, tensor in self._tensors.items()}

    def _added(self) -> list[int]:
        """Return the sums of the bits; a GPU is waited for once."""
        sums = [bits.sum() for _, bits in self._bits]
        if len({each.device for each in sums}) > 1:
            sums = [each.cpu() for each in sums]
        return torch.stack(sums).tolist() if sums else []

    def _looks_the_same(self) -> bool:
        return (
            self._is_read
            and self._is_seen
            and not self._scripted
            and not any(_differ(*pair) for pair in self._registered)
            and all(type(layer) is kind for layer, kind in zip(self.layers, self._kinds))
            and all(_mark(tensor) == self._marks[name] for name, tensor in self._tensors.items())
            and self._added() == self._sums
        )

    def changed(self, network: HasModule) -> str | None:
        """Return the name of a parameter, statistic or layer that looks changed, or None."""
        with ONE_AT_A_TIME:
            if self._looks_the_same():
                return None
            now = NetworkState(network)
        for name in now._marks.keys() | self._marks.keys():
            if now._marks.get(name) != self._marks.get(name):
                return name
        before, after = (zip(each._bits, each._sums) for each in (self, now))
        return next((old[0][0] for old, new in zip(before, after) if old[1] != new[1]), None)

    def holds(self, network: HasModule, surely: bool = False) -> bool:
        """Whether the network is unchanged; ``surely`` compares every bit."""
        with ONE_AT_A_TIME:
            if not surely and self._looks_the_same():
                return True
            if [type(layer) for layer in network.module.modules()] != self._kinds:
                return False
            if not torch.equal(files.fingerprint(network.module), self.fingerprint):
                return False
            self._look_through(network.module)
            self._read(network.module)
            self._is_read = True
            return True

    def holds_but_for_dtype(self, network: HasModule) -> bool:
        """Whether the network is unchanged, or was only cast or moved, as by ``module.to``."""
        if self.holds(network):
            return True
        if not self._sizes or [type(m) for m in network.module.modules()] != self._kinds:
            return False
        now = dict(network.module.named_parameters()) | dict(network.module.named_buffers())
        return all(n in now and _is_cast(now[n], size) for n, size in self._sizes.items())

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this network, which a copy of it does not have."""
        kept = "fingerprint", "_kinds", "_sizes"
        return {name: self.__dict__.get(name) for name in kept} | {"_is_read": False}


def _differ(now: Any, before: Any) -> bool:
    """Whether the values of a dict, or the entries of another container, are other objects."""
    if isinstance(now, dict):
        return len(now) != len(before) or not all(map(is_, now.values(), before.values()))
    return len(now) != len(before) or not all(map(is_, now, before))


def _is_in_training(layer: nn.Module) -> bool:
    return layer.training or (isinstance(layer, nn.Embedding) and layer.sparse)


def _mark(tensor: Tensor) -> tuple[Any, ...]:
    version = -1 if tensor.is_inference() else tensor._version
    place = tensor.data_ptr() if tensor.layout is torch.strided else 0
    return id(tensor), tensor.dtype, tensor.device, tensor.shape, place, version


def _bits(tensor: Tensor) -> list[Tensor]:
    """Return views of all numbers as integers, of 64 bits where possible."""
    if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
        return []
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_contiguous():  # views, of dense tensors with any order of axes
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    flat, size = tensor.reshape(-1), tensor.element_size()
    whole = len(flat) - len(flat) % (8 // size)
    if flat.storage_offset() * size % 8:
        whole = 0
    parts = (flat[:whole], torch.int64), (flat[whole:], _INTEGERS[size])
    return [part.view(kind) for part, kind in parts if len(part)]


def _size(tensor: Tensor) -> tuple[float, float, torch.dtype] | None:
    """Return the sum of the numbers, that of their absolute values, and the dtype."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_complex():
        return None
    wide = tensor.detach().double().nan_to_num()
    return wide.sum().item(), wide.abs().sum().item(), tensor.dtype


def _is_cast(tensor: Tensor, before: tuple[float, float, torch.dtype] | None) -> bool:
    """Whether a tensor differs from a former one by rounding at most, as far as the sums show it."""
    now = _size(tensor)
    if now is None or before is None:
        return now is before
    eps = max(torch.finfo(dtype).eps for dtype in (now[2], before[2]))
    return all(abs(a - b) <= eps * (before[1] + 1e-30) for a, b in zip(now[:2], before[:2]))
