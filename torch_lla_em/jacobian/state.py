"""What a network was at one time, and whether it still is: its layers, parameters and statistics."""

from __future__ import annotations

import os
from collections.abc import Iterator
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


class NetworkState:
    """The layers, parameters and statistics of a network at one time.

    ``holds`` compares objects, addresses and version counters, and the sums of the bits in memory,
    since ``.data`` and fused optimisers write without a new version: a change of any one number
    changes a sum. If anything looks changed, a hash of every bit decides.
    """

    def __init__(self, network: Any, fingerprint: Tensor | None = None):
        """``fingerprint``: the hash that is expected; None: that of the present network."""
        self.fingerprint = fingerprint
        """A hash of every bit, and of the names."""

        self._marks: dict[str, Any] | None = None
        with ONE_AT_A_TIME:
            self._kinds = [type(layer) for layer in network.module.modules()]
            if fingerprint is None:
                self.fingerprint = files.fingerprint(network.module)
                self._note(network.module)

    def _note(self, module: nn.Module) -> None:
        """Note what a change of a tensor or of a layer alters."""
        self._marks = _marks(module)
        self._words = _words(module)
        self._sums = _sums(self._words)

    def _looks_the_same(self, module: nn.Module) -> bool:
        return (
            self._marks is not None
            and _marks(module) == self._marks
            and _sums(self._words) == self._sums
        )

    def changed(self, network: Any) -> str | None:
        """Return the name of a parameter, statistic or layer that looks changed, or None."""
        with ONE_AT_A_TIME:
            if self._looks_the_same(network.module):
                return None
            now = NetworkState(network)
        for new, old in ((now._marks, self._marks), (now._sums, self._sums)):
            for name in {**(new or {}), **(old or {})}:
                if (new or {}).get(name) != (old or {}).get(name):
                    return name.rpartition("|")[0] or name
        return None

    def holds(self, network: Any, surely: bool = False) -> bool:
        """Whether the network is unchanged; ``surely`` compares every bit."""
        with ONE_AT_A_TIME:
            module = network.module
            if not surely and self._looks_the_same(module):
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


def _parts(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield layers, parameters and statistics, but no counters, by name."""
    for path, layer in module.named_modules():
        yield f"layer {path}", layer
        for counts, holder in ((True, layer._parameters), (False, layer._buffers)):
            for key, t in holder.items():
                if t is not None and (counts or t.is_floating_point() or t.is_complex()):
                    yield f"{path}.{key}" if path else key, t


def _marks(module: nn.Module) -> dict[str, Any]:
    """Return the classes of layers, and the objects, addresses and versions of tensors."""
    found: dict[str, Any] = {}
    for name, part in _parts(module):
        if not isinstance(part, Tensor):
            found[name] = type(part)
            continue
        place = part.data_ptr() if part.layout is torch.strided else 0
        version = -1 if part.is_inference() else part._version
        found[name] = id(part), part.dtype, part.device, part.shape, place, version
    return found


def _words(module: nn.Module) -> dict[str, Tensor]:
    """Return the memory of all tensors as integers, by the name of the first tensor in it."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in _parts(module):
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen:
            continue
        seen.add(storage.data_ptr())
        every = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        whole = len(every) - len(every) % 8
        parts = every[:whole].view(torch.int64), every[whole:]
        found.update({f"{name}|{n}": part for n, part in enumerate(parts) if len(part)})
    return found


def _sums(words: dict[str, Tensor]) -> dict[str, int]:
    """Return the sums of integers; a GPU is waited for once."""
    sums = [part.sum() for part in words.values()]
    if len({each.device for each in sums}) > 1:
        sums = [each.cpu() for each in sums]
    return dict(zip(words, torch.stack(sums).tolist() if sums else []))
