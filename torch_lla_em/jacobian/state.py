"""Detects changes of a network: of its layers, parameters and running statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.jacobian.network import Network
from torch_lla_em.runtime import ONE_AT_A_TIME, files


class NetworkState:
    """The layers, parameters and statistics of a network at one time.

    ``holds`` compares objects, addresses, version counters and sums of the bits in memory, since
    ``.data`` and fused optimisers write without a new version. If anything looks changed, a hash of
    every bit decides.
    """

    def __init__(self, network: Network, fingerprint: Tensor | None = None):
        """``fingerprint`` is the expected hash (None: the hash of the present network)."""
        with ONE_AT_A_TIME:
            module = network.module
            present = files.fingerprint(module)
            self._kinds = [type(layer) for layer in module.modules()]
            self.fingerprint = present if fingerprint is None else fingerprint
            """A hash of every bit, and of the names."""

            is_present = torch.equal(present, self.fingerprint)  # otherwise it is loaded later
            self._marks = _marks(module) if is_present else None
            self._tensors = files.tensors_of(module) if is_present else {}

    def holds(self, network: Network, surely: bool = False, or_cast: bool = False) -> bool:
        """Whether the network is unchanged, or with ``or_cast`` only cast as a whole. With
        ``surely`` every bit is compared."""
        with ONE_AT_A_TIME:
            module = network.module
            marks = _marks(module)
            if not surely and marks == self._marks:
                return True
            if [type(layer) for layer in module.modules()] != self._kinds:
                return False
            if not torch.equal(files.fingerprint(module), self.fingerprint):
                return or_cast and self._is_cast(files.tensors_of(module))
            self._marks, self._tensors = marks, files.tensors_of(module)
            return True

    def _is_cast(self, now: dict[str, Tensor]) -> bool:
        """Whether the tensors are the earlier ones in another dtype; the earlier tensors must be
        unchanged."""
        is_as_noted = torch.equal(files.fingerprint(self._tensors), self.fingerprint)
        if not is_as_noted or self._tensors.keys() != now.keys():
            return False
        return all(torch.equal(self._tensors[name].to(own), own) for name, own in now.items())

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the marks of this network's tensors; ``holds`` computes those of a copy."""
        return {**self.__dict__, "_marks": None, "_tensors": {}}


def _marks(module: nn.Module) -> list[Any]:
    """Return values that differ after a change of a layer or tensor, and sums of the bits in
    memory. It synchronises with a GPU once."""
    marks: list[Any] = []
    sums: list[Tensor] = []
    for layer in module.modules():
        marks.append(type(layer))
        for is_parameter, holder in ((True, layer._parameters), (False, layer._buffers)):
            for key, t in holder.items():
                # counters do not matter
                if t is None or not (is_parameter or t.is_floating_point() or t.is_complex()):
                    continue
                is_plain = t.layout is torch.strided
                version = -1 if t.is_inference() else t._version
                place = t.data_ptr() if is_plain else 0
                marks.append((key, id(t), t.dtype, t.device, t.shape, place, version))
                if is_plain and not t.is_quantized:
                    real = torch.view_as_real(t.detach()) if t.is_complex() else t.detach()
                    # the sum of integers of this size shows a change of any one number
                    sums.append(real.view(getattr(torch, f"int{8 * real.itemsize}")).sum())
    if len({each.device for each in sums}) > 1:
        sums = [each.cpu() for each in sums]
    return marks + (torch.stack(sums).tolist() if sums else [])
