"""Whether a network's weights and statistics are still what they were."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.jacobian.network import Network
from torch_lla_em.runtime import records

# entries of a tensor that are compared at every call
_COMPARED = 16


class NetworkState:
    """The weights and running statistics of a network at one time, to notice later changes.

    Every call compares the tensors' addresses and version counters, the types of the layers, and a
    few entries of each tensor, since fused optimisers and ``.data`` write without a new version. If
    any of these has changed, or if required, every bit is compared.
    """

    def __init__(self, network: Network, exact: bool = True):
        """``exact``: whether to take a hash of every bit; else whatever looks changed counts as it."""
        module = network.module
        with network.alone():
            self.fingerprint = records.fingerprint(module) if exact else None
            """A hash of every bit."""

            self._kinds = _kinds(module)
            self._marks: dict[str, Any] | None = _marks(module)
            self._entries: dict[str, Tensor] | None = _entries(module)

    def holds(self, network: Network, surely: bool = False) -> bool:
        """Whether the network is unchanged; ``surely`` compares every bit."""
        module = network.module
        with network.alone():
            if not surely and self._changed(module) is None:
                return True
            if _kinds(module) != self._kinds or self.fingerprint is None:
                return False
            if not torch.equal(records.fingerprint(module), self.fingerprint):
                return False
            self._marks, self._entries = _marks(module), _entries(module)
            return True

    def changed(self, network: Network) -> str | None:
        """Return the name of a parameter or statistic that looks changed, or None."""
        with network.alone():
            return self._changed(network.module)

    def _changed(self, module: nn.Module) -> str | None:
        marks, known = _marks(module), self._marks or {}
        for name in marks.keys() | known.keys():
            if marks.get(name) != known.get(name):
                return name
        now, before = _entries(module), self._entries or {}
        if torch.equal(_joined(now), _joined(before)):  # one comparison, which a GPU is waited for
            return None
        return next(n for n in now if not torch.equal(now[n].nan_to_num(), before[n].nan_to_num()))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out addresses, which differ in a copy of the network."""
        return {**self.__dict__, "_marks": None, "_entries": None}


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point() or buffer.is_complex():
            yield name, buffer


def _marks(module: nn.Module) -> dict[str, Any]:
    """Return what most changes of a tensor alter, and is free to read; and the types of the layers."""
    marks: dict[str, Any] = {
        name: (id(t), t.dtype, t.device, t.shape, *_place(t)) for name, t in _tensors(module)
    }
    return marks | {f"layer {path}": type(layer) for path, layer in module.named_modules()}


def _place(tensor: Tensor) -> tuple[int, int]:
    pointer = tensor.data_ptr() if tensor.layout is torch.strided else 0
    return pointer, -1 if tensor.is_inference() else tensor._version


def _kinds(module: nn.Module) -> list[Any]:
    return [type(layer) for layer in module.modules()]


def _entries(module: nn.Module) -> dict[str, Tensor]:
    """Return a few entries of every tensor by name."""
    found = {}
    for name, tensor in _tensors(module):
        if tensor.layout is torch.strided and not tensor.is_quantized and tensor.numel():
            entries = tensor.detach()
            if entries.is_complex():
                entries = torch.view_as_real(entries.resolve_conj())
            if not entries.is_contiguous():  # views, of dense tensors with any order of axes
                order = sorted(range(entries.dim()), key=entries.stride, reverse=True)
                entries = entries.permute(order)
            entries = entries.reshape(-1)
            some = entries[:: max(1, len(entries) // _COMPARED)]
            found[name] = some.to(torch.float64, copy=True)
    return found


def _joined(entries: dict[str, Tensor]) -> Tensor:
    every = list(entries.values())
    return torch.cat([own.to(every[0].device) for own in every]).nan_to_num()
