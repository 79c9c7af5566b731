"""Detects changes of a network's weights and running statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.jacobian.network import ONE_AT_A_TIME, Network
from torch_lla_em.runtime import files

# entries of a tensor that are compared at every call
_COMPARED = 16


class Snapshot:
    """What most changes of a network alter, quick to compare.

    These are the tensors' addresses and version counters, the types of the layers, and a few entries
    of each tensor, since fused optimisers and ``.data`` write without a new version.
    """

    def __init__(self, network: Network):
        with ONE_AT_A_TIME:
            self._take(network.module)

    def changed(self, network: Network) -> str | None:
        """Return the name of a parameter, statistic or layer that looks changed, or None."""
        now = Snapshot(network)
        for name in now._marks.keys() | self._marks.keys():
            if now._marks.get(name) != self._marks.get(name):
                return name
        if torch.equal(now._entries, self._entries):
            return None
        return now._names[int((now._entries != self._entries).nonzero()[0])]

    def _take(self, module: nn.Module) -> None:
        tensors = dict(module.named_parameters()) | {
            name: buffer
            for name, buffer in module.named_buffers()
            if buffer.is_floating_point() or buffer.is_complex()
        }
        self._marks: dict[str, Any] = {
            f"layer {path}": type(layer) for path, layer in module.named_modules()
        }
        entries = [torch.zeros(0, dtype=torch.float64, device="cpu")]
        self._names: list[str] = []
        """The name of the tensor that each entry belongs to."""

        for name, tensor in tensors.items():
            plain = tensor.layout is torch.strided
            version = -1 if tensor.is_inference() else tensor._version
            place = tensor.data_ptr() if plain else 0
            kind = tensor.dtype, tensor.device, tensor.shape
            self._marks[name] = id(tensor), *kind, place, version
            if plain and not tensor.is_quantized and tensor.numel():
                entries.append(_some(tensor.detach()))
                self._names += [name] * len(entries[-1])
        # one tensor, so that a comparison waits for a GPU only once
        self._entries = torch.cat([own.to(entries[-1].device) for own in entries]).nan_to_num()
        self._dtypes = {name: tensor.dtype for name, tensor in tensors.items()}

    def is_cast(self, network: Network) -> bool:
        """Whether the network looks as before, but for the dtypes and the device of its tensors."""
        with ONE_AT_A_TIME:
            now = Snapshot(network)
        if now._names != self._names:
            return False
        before = self._entries.cpu()
        dtypes = [now._dtypes[name].to_real() for name in now._names]
        for dtype in set(dtypes):
            rounded = before.to(dtype).double().nan_to_num()
            chosen = torch.tensor([own == dtype for own in dtypes], device="cpu")
            before = torch.where(chosen, rounded, before)
        return torch.equal(before, now._entries.cpu())

    def __getstate__(self) -> dict[str, Any]:
        """Leave out addresses, which differ in a copy of the network."""
        return {**self.__dict__, "_marks": {}}


def _some(tensor: Tensor) -> Tensor:
    """Return a few entries, in double precision."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_contiguous():  # views, of dense tensors with any order of axes
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    entries = tensor.reshape(-1)
    return entries[:: max(1, len(entries) // _COMPARED)].to(torch.float64, copy=True)


class NetworkState:
    """The weights and running statistics of a network at one time, by a hash of every bit.

    If the network looks unchanged (``Snapshot``), the hash is not computed again. A ``fingerprint``
    is the hash that the network is expected to have when it is compared.
    """

    def __init__(self, network: Network, fingerprint: Tensor | None = None):
        with ONE_AT_A_TIME:
            known = fingerprint is not None
            self.fingerprint = fingerprint if known else files.fingerprint(network.module)
            """A hash of every bit."""

            self._kinds = [type(layer) for layer in network.module.modules()]
            self._snapshot: Snapshot | None = None if known else Snapshot(network)

    def holds(self, network: Network, surely: bool = False) -> bool:
        """Whether the network is unchanged; ``surely`` compares every bit."""
        with ONE_AT_A_TIME:
            known = self._snapshot
            if not surely and known is not None and known.changed(network) is None:
                return True
            if [type(layer) for layer in network.module.modules()] != self._kinds:
                return False
            if not torch.equal(files.fingerprint(network.module), self.fingerprint):
                return False
            self._snapshot = Snapshot(network)
            return True

    def holds_but_for_dtype(self, network: Network) -> bool:
        """Whether the network looks unchanged, or was only cast or moved, as by ``module.to``."""
        if self.holds(network):
            return True
        known, kinds = self._snapshot, [type(layer) for layer in network.module.modules()]
        return known is not None and kinds == self._kinds and known.is_cast(network)
