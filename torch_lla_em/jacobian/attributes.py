"""Restores attributes of modules that a forward pass has changed."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

# entries of a container beyond which it takes too long to look through
_ENTRIES = 256
_OF_MODULES = vars(nn.Module()).keys()


class Attributes:
    """The attributes of modules at one time, which can be restored.

    The entries of lists, dicts, sets and deques are restored too if they hold tensors; other
    containers may count calls.
    """

    def __init__(self, layers: Iterable[nn.Module]):
        own = [vars(layer) for layer in layers]
        self._own = [(attributes, dict(attributes)) for attributes in own]
        self._containers = [
            (value, copy.copy(value))
            for attributes in own
            for name, value in attributes.items()
            if name not in _OF_MODULES and isinstance(value, (dict, list, set, deque))
            if len(value) <= _ENTRIES
        ]

    def restore(self) -> None:
        """Restore the attributes."""
        for now, before in self._own:
            if _differ(now, before):
                now.clear()
                now.update(before)
        for container, entries in self._containers:
            if _differ(container, entries) and _has_tensor((container, entries)):
                container.clear()
                refill = container.extend if hasattr(container, "extend") else container.update
                refill(entries)


def _differ(now: Any, before: Any) -> bool:
    pairs = zip(now.values(), before.values()) if isinstance(now, dict) else zip(now, before)
    return len(now) != len(before) or any(a is not b for a, b in pairs)


def _has_tensor(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(tree))
