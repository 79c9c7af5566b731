"""Detects changes of a network's weights and running statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.jacobian.network import ONE_AT_A_TIME, Network
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
        """``exact``: whether to compute a hash of every bit, to decide whether a change is real."""
        module = network.module
        with ONE_AT_A_TIME:
            self.fingerprint = records.fingerprint(module) if exact else None
            """A hash of every bit."""

            self._kinds = [type(layer) for layer in module.modules()]
            self._seen: _Seen | None = _Seen(module)

    def holds(self, network: Network, surely: bool = False) -> bool:
        """Whether the network is unchanged; ``surely`` compares every bit."""
        module = network.module
        with ONE_AT_A_TIME:
            if not surely and self._changed(module) is None:
                return True
            kinds = [type(layer) for layer in module.modules()]
            if kinds != self._kinds or self.fingerprint is None:
                return False
            if not torch.equal(records.fingerprint(module), self.fingerprint):
                return False
            self._seen = _Seen(module)
            return True

    def changed(self, network: Network) -> str | None:
        """Return the name of a parameter or statistic that looks changed, or None."""
        with ONE_AT_A_TIME:
            return self._changed(network.module)

    def _changed(self, module: nn.Module) -> str | None:
        return "" if self._seen is None else _Seen(module).other_than(self._seen)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out addresses, which differ in a copy of the network."""
        return {**self.__dict__, "_seen": None}


class _Seen:
    """Addresses and version counters, which most changes alter, and a few entries of every tensor."""

    def __init__(self, module: nn.Module):
        tensors = dict(module.named_parameters()) | {
            name: buffer
            for name, buffer in module.named_buffers()
            if buffer.is_floating_point() or buffer.is_complex()
        }
        self.marks: dict[str, Any] = {
            f"layer {path}": type(layer) for path, layer in module.named_modules()
        }
        entries = [torch.zeros(0, dtype=torch.float64, device="cpu")]
        self.names: list[str] = []
        """The name of the tensor that each entry belongs to."""

        for name, tensor in tensors.items():
            plain = tensor.layout is torch.strided
            version = -1 if tensor.is_inference() else tensor._version
            place = tensor.data_ptr() if plain else 0
            self.marks[name] = id(tensor), tensor.dtype, tensor.device, tensor.shape, place, version
            if plain and not tensor.is_quantized and tensor.numel():
                entries.append(_some(tensor.detach()))
                self.names += [name] * len(entries[-1])
        # one tensor, so that a comparison waits for a GPU only once
        self.entries = torch.cat([own.to(entries[-1].device) for own in entries]).nan_to_num()

    def other_than(self, known: _Seen) -> str | None:
        """Return the name of a tensor or layer that differs, or None."""
        for name in self.marks.keys() | known.marks.keys():
            if self.marks.get(name) != known.marks.get(name):
                return name
        if torch.equal(self.entries, known.entries):
            return None
        return self.names[int((self.entries != known.entries).nonzero()[0])]


def _some(tensor: Tensor) -> Tensor:
    """Return a few entries, in double precision."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_contiguous():  # views, of dense tensors with any order of axes
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    entries = tensor.reshape(-1)
    return entries[:: max(1, len(entries) // _COMPARED)].to(torch.float64, copy=True)
