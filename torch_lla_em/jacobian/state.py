"""What a network was at one time, and whether it still is: its layers, parameters and statistics."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.runtime import Turns, files

ONE_AT_A_TIME = Turns()
"""Held during a call: other threads would see replaced weights, and flags of the whole process."""

if hasattr(os, "register_at_fork"):
    # a fork waits for other threads, as the child would inherit replaced weights
    os.register_at_fork(
        before=ONE_AT_A_TIME.acquire,
        after_in_parent=ONE_AT_A_TIME.release,
        after_in_child=ONE_AT_A_TIME.release_in_child,
    )

# integers of the same size, whose sum shows a change of any one number
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class NetworkState:
    """The layers, parameters and statistics of a network at one time.

    ``holds`` compares objects, addresses and version counters, and the sums of the bits in memory,
    since ``.data`` and fused optimisers write without a new version. If anything looks changed, a
    hash of every bit decides.
    """

    def __init__(self, network: Any, fingerprint: Tensor | None = None):
        """``fingerprint``: the hash that is expected; None: that of the present network."""
        self.fingerprint = fingerprint
        """A hash of every bit, and of the names."""

        self._marks: list[Any] | None = None
        with ONE_AT_A_TIME:
            self._kinds = [type(layer) for layer in network.module.modules()]
            if fingerprint is None:
                self.fingerprint = files.fingerprint(network.module)
                self._note(network.module)

    def _note(self, module: nn.Module) -> None:
        self._marks, self._words = _look_at(module)
        self._sums = _sums(self._words)

    def holds(self, network: Any, surely: bool = False) -> bool:
        """Whether the network is unchanged; ``surely`` compares every bit."""
        with ONE_AT_A_TIME:
            module = network.module
            looks_the_same = self._marks is not None and self._marks == _look_at(module)[0]
            if not surely and looks_the_same and _sums(self._words) == self._sums:
                return True
            if [type(layer) for layer in module.modules()] != self._kinds:
                return False
            if not torch.equal(files.fingerprint(module), self.fingerprint):
                return False
            self._note(module)
            return True

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this network, which a copy of it does not have."""
        return {"fingerprint": self.fingerprint, "_kinds": self._kinds, "_marks": None}


def _look_at(module: nn.Module) -> tuple[list[Any], list[Tensor]]:
    """Return what a change of a layer or tensor alters, and the memory of tensors as integers."""
    marks: list[Any] = []
    words: list[Tensor] = []
    for layer in module.modules():
        marks.append(type(layer))
        for is_parameter, holder in ((True, layer._parameters), (False, layer._buffers)):
            for key, t in holder.items():
                # counters are no statistics
                if t is None or not (is_parameter or t.is_floating_point() or t.is_complex()):
                    continue
                is_plain = t.layout is torch.strided
                version = -1 if t.is_inference() else t._version
                place = t.data_ptr() if is_plain else 0
                marks.append((key, id(t), t.dtype, t.device, t.shape, place, version))
                if is_plain and not t.is_quantized:
                    real = torch.view_as_real(t) if t.is_complex() else t
                    words.append(real.detach().view(_INTEGERS[real.itemsize]))
    return marks, words


def _sums(words: list[Tensor]) -> list[int]:
    """Return the sums of integers; a GPU is waited for once."""
    sums = [part.sum() for part in words]
    if len({each.device for each in sums}) > 1:
        sums = [each.cpu() for each in sums]
    return torch.stack(sums).tolist() if sums else []
