"""The tensors and attributes of a module: replaced for a call, and restored after it."""

from __future__ import annotations

import copy
import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

# entries of a container beyond which it takes too long to look through
_ENTRIES = 256
_OF_MODULES = vars(nn.Module()).keys()

ONE_AT_A_TIME = threading.RLock()
"""Held during a call: other threads would see replaced weights, and flags of the whole process."""

if hasattr(os, "register_at_fork"):
    # a fork waits for other threads, as the child would inherit replaced weights
    os.register_at_fork(
        before=ONE_AT_A_TIME.acquire,
        after_in_parent=ONE_AT_A_TIME.release,
        after_in_child=ONE_AT_A_TIME.release,
    )


class Attributes:
    """The attributes of a module's layers at one time, which can be restored.

    The entries of lists, dicts, sets and deques are restored too if they hold tensors; other
    containers may count calls.
    """

    def __init__(self, module: nn.Module):
        self._dicts: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        for layer in module.modules():
            self._dicts.append((vars(layer), dict(vars(layer))))
            others = [value for name, value in vars(layer).items() if name not in _OF_MODULES]
            for value in others:
                if isinstance(value, (dict, list, set, deque)) and len(value) <= _ENTRIES:
                    self._containers.append((value, copy.copy(value)))

    def restore(self) -> None:
        """Restore all of them."""
        for now, before in self._dicts:
            if _differ(now, before):
                if list(now) != list(before):
                    now.clear()
                now.update(before)
        for container, entries in self._containers:
            if _differ(container, entries) and _has_tensor((container, entries)):
                container.clear()
                refill = container.extend if hasattr(container, "extend") else container.update
                refill(entries)


class Exchange(Attributes):
    """Every tensor of a module, which can be replaced by others for a call.

    ``torch.func.functional_call`` works by names and does not restore a module that is registered
    under two names (pytorch#164759). Here each module is visited only once.
    """

    def __init__(self, module: nn.Module):
        super().__init__(module)
        parameters = {id(p): name for name, p in module.named_parameters()}
        names = dict(parameters)
        self._slots: list[tuple[dict[str, Any], str, str]] = []
        """Where tensors are: a dict, its key, and the name, one for all places of tied weights."""

        self.fixed: dict[str, Tensor] = {}
        """The weights."""

        self._written: dict[str, Tensor] = {}
        """All other tensors, which a call can change."""

        for path, layer in module.named_modules():
            for holder in holders(layer):
                if holder is not vars(layer):
                    self._dicts.append((holder, dict(holder)))
                for key, tensor in holder.items():
                    if not isinstance(tensor, Tensor):
                        continue
                    name = names.setdefault(id(tensor), f"{path}.{key}" if path else key)
                    self._slots.append((holder, key, name))
                    kind = self.fixed if id(tensor) in parameters else self._written
                    kind.setdefault(name, tensor.detach())
            # a lookup with max_norm shrinks the rows it reads, in the weights themselves
            if getattr(layer, "max_norm", None) is not None and "weight" in layer._parameters:
                name = names[id(layer.weight)]
                self._written[name] = self.fixed[name]

    @contextmanager
    def exchanged(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Replace weights, and tensors that a call can change by copies; restore all on exit."""
        placed: dict[str, Tensor] = {}
        try:
            for holder, key, name in self._slots:
                if name not in placed:
                    tensor = weights.get(name, self.fixed.get(name))
                    if name in self._written:
                        tensor = (self._written[name] if tensor is None else tensor).clone()
                    placed[name] = tensor
                holder[key] = placed[name]
            yield
        finally:
            self.restore()


def holders(layer: nn.Module) -> tuple[dict[str, Any], ...]:
    """Return the dicts in which a layer keeps tensors; none of a scripted layer can be replaced."""
    if isinstance(layer, torch.jit.ScriptModule):
        return ()
    return layer._parameters, layer._buffers, vars(layer)


def _differ(now: Any, before: Any) -> bool:
    pairs = zip(now.values(), before.values()) if isinstance(now, dict) else zip(now, before)
    return len(now) != len(before) or any(a is not b for a, b in pairs)


def _has_tensor(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(tree))
