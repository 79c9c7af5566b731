"""Detects changes of a network's weights and running statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.jacobian.network import ONE_AT_A_TIME, Network, differ
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
        with ONE_AT_A_TIME:
            if self._same_objects() and torch.equal(self._read(), self._entries):
                return None
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
        layers = dict(module.named_modules())
        kinds: dict[str, Any] = {f"layer {path}": type(layer) for path, layer in layers.items()}
        self._marks = kinds | {name: _mark(tensor) for name, tensor in tensors.items()}
        self._layers = [(layer, type(layer)) for layer in layers.values()]
        self._tensors = [(tensor, _mark(tensor)) for tensor in tensors.values()]
        self._dicts: list[tuple[dict[str, Any], dict[str, Any]]] | None = None
        if not any(isinstance(layer, torch.jit.ScriptModule) for layer, _ in self._layers):
            held = [(m._modules, m._parameters, m._buffers) for m, _ in self._layers]
            self._dicts = [(own, dict(own)) for each in held for own in each]

        self._views: list[Tensor] = []
        self._names: list[str] = []
        """The name of the tensor that each entry belongs to."""

        for name, tensor in tensors.items():
            if tensor.layout is torch.strided and not tensor.is_quantized and tensor.numel():
                entries = _some(tensor.detach())
                self._views.append(entries)
                self._names += [name] * len(entries)
                if entries.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
                    self._dicts = None  # they are copies, which do not show changes
        self._entries = self._read()
        self._dtypes = {name: tensor.dtype for name, tensor in tensors.items()}

    def _same_objects(self) -> bool:
        """Whether layers and tensors are the same objects, at the same place and version."""
        return (
            self._dicts is not None
            and not any(differ(*pair) for pair in self._dicts)
            and all(type(layer) is kind for layer, kind in self._layers)
            and all(_mark(tensor) == mark for tensor, mark in self._tensors)
        )

    def _read(self) -> Tensor:
        """Return the entries in one tensor, so that a comparison waits for a GPU only once."""
        if not self._views:
            return torch.zeros(0, dtype=torch.float64, device="cpu")
        views = self._views
        if len({(view.dtype, view.device) for view in views}) > 1:
            views = [view.to(views[-1].device, torch.float64) for view in views]
        return torch.cat(views).double().nan_to_num()

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
        """Leave out addresses and tensors, which differ in a copy of the network."""
        of_one_network: dict[str, Any] = {
            "_layers": [],
            "_tensors": [],
            "_views": [],
            "_dicts": None,
        }
        return {**self.__dict__, "_marks": {}, **of_one_network}


def _mark(tensor: Tensor) -> tuple[Any, ...]:
    version = -1 if tensor.is_inference() else tensor._version
    place = tensor.data_ptr() if tensor.layout is torch.strided else 0
    return id(tensor), tensor.dtype, tensor.device, tensor.shape, place, version


def _some(tensor: Tensor) -> Tensor:
    """Return a view of a few entries."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_contiguous():  # views, of dense tensors with any order of axes
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    entries = tensor.reshape(-1)
    return entries[:: max(1, len(entries) // _COMPARED)]


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
