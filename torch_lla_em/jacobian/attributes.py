"""What a forward pass writes to the attributes of modules, and how that is undone."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

# entries of a container beyond which it takes too long to look through, and holds no weights
_ENTRIES = 256
# containers inside of containers
_DEPTH = 4
_OF_MODULES = vars(nn.Module()).keys()


class Attributes:
    """The attributes of modules at one time, which can be put back.

    Lists, dicts, sets and deques get their contents back too, unless there are no tensors among
    them, as where a model counts its calls.
    """

    def __init__(self, layers: Iterable[nn.Module]):
        # those of torch itself set none
        own = [vars(m) for m in layers if not type(m).__module__.startswith("torch.nn.modules")]
        self._own = [(attributes, dict(attributes)) for attributes in own]
        self._containers = [
            (container, copy.copy(container))
            for attributes in own
            for name, value in attributes.items()
            if name not in _OF_MODULES
            for container in _containers(value)
        ]

    def restore(self) -> None:
        """Put back what the attributes were."""
        for now, before in self._own:
            if len(now) != len(before) or any(now.get(k) is not v for k, v in before.items()):
                now.clear()
                now.update(before)
        for container, before in self._containers:
            if _is_other(container, before) and (_has_tensor(container) or _has_tensor(before)):
                container.clear()
                if isinstance(container, (list, deque)):
                    container.extend(before)
                else:
                    container.update(before)

    def emptied(self) -> Iterator[str]:
        """Yield the name of each attribute that holds tensors, which are taken out meanwhile."""
        for now, before in self._own:
            for name, value in before.items():
                if name in _OF_MODULES or not _has_tensor(value) or isinstance(value, tuple):
                    continue
                if not isinstance(value, Tensor):
                    value.clear()
                    yield name
                else:
                    now[name] = None
                    yield name
                    now.pop(name)
                    yield name
                self.restore()


def _is_other(a: Any, b: Any) -> bool:
    return len(a) != len(b) or any(x is not y for x, y in zip(_entries(a), _entries(b)))


def _entries(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container


def _containers(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Yield a container that can be written to, and those inside of it."""
    if isinstance(value, (dict, list, set, deque, tuple)) and len(value) <= _ENTRIES and depth:
        if not isinstance(value, tuple):
            yield value
        for entry in _entries(value):
            yield from _containers(entry, depth - 1)


def _has_tensor(value: Any) -> bool:
    """Whether a value is a tensor or holds some, parameters left aside."""
    inside = (entry for container in _containers(value) for entry in _entries(container))
    return any(isinstance(t, Tensor) and not isinstance(t, nn.Parameter) for t in (value, *inside))
