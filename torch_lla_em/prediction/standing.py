"""Whether a network is still the one that a posterior was fitted to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.jacobian import Network
from torch_lla_em.runtime import records

# entries of a tensor that are compared at every call
_LOOKED_AT = 16


class Standing:
    """A network's weights and running statistics at one time, to be told from later ones.

    At every call: which tensors there are and where they lie, how often torch has counted a write
    to them, the layers' kinds, and a few of the numbers, since fused optimisers and ``.data`` write
    uncounted. Where any of it has changed, or where it is asked for, every bit is compared.
    """

    def __init__(self, network: Network):
        module = network.module
        with network.alone():
            self.fingerprint = records.fingerprint(module)
            """Of every bit."""

            self._kinds = _kinds(module)
            self._marks: list[Any] | None = _marks(module)
            self._numbers: Tensor | None = _numbers(module)

    def holds(self, network: Network, surely: bool = False) -> bool:
        """Whether the network is as it was: ``surely`` looks at every bit."""
        with network.alone():
            return self._holds(network.module, surely)

    def _holds(self, module: nn.Module, surely: bool) -> bool:
        if not surely and self._marks == _marks(module):
            numbers = _numbers(module)
            if torch.equal(numbers.nan_to_num(), self._numbers.nan_to_num()):
                return True
        if _kinds(module) != self._kinds:
            return False
        if not torch.equal(records.fingerprint(module), self.fingerprint):
            return False
        self._marks, self._numbers = _marks(module), _numbers(module)
        return True

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what a copy of the network has anew."""
        return {**self.__dict__, "_marks": None, "_numbers": None}


def _tensors(module: nn.Module) -> list[Tensor]:
    buffers = [b for b in module.buffers() if b.is_floating_point() or b.is_complex()]
    return [*module.parameters(), *buffers]


def _marks(module: nn.Module) -> list[Any]:
    """Return what changes with most changes of a tensor, and costs nothing to read."""
    return [(id(t), t.dtype, t.device, t.shape, *_place(t)) for t in _tensors(module)] + _kinds(
        module
    )


def _place(tensor: Tensor) -> tuple[int, int]:
    pointer = tensor.data_ptr() if tensor.layout is torch.strided else 0
    return pointer, -1 if tensor.is_inference() else tensor._version


def _kinds(module: nn.Module) -> list[Any]:
    return [type(layer) for layer in module.modules()]


def _numbers(module: nn.Module) -> Tensor:
    """Return a few entries of every tensor, (n,)."""
    found = []
    for tensor in _tensors(module):
        if tensor.layout is torch.strided and not tensor.is_quantized and tensor.numel():
            entries = tensor.detach()
            if entries.is_complex():
                entries = torch.view_as_real(entries.resolve_conj())
            if not entries.is_contiguous():  # views, of dense tensors with any order of axes
                order = sorted(range(entries.dim()), key=entries.stride, reverse=True)
                entries = entries.permute(order)
            entries = entries.reshape(-1)
            found.append(entries[:: max(1, len(entries) // _LOOKED_AT)].double())
    return torch.cat([entries.to(found[0].device) for entries in found])
