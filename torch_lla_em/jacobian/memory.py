"""What a forward pass keeps in a module's attributes: every call starts without it.

Modules cache weights that they computed (``self.w = None`` at first, a dict): a derivative through
the cached tensor is none of the weights. So each call begins with what an attribute held before
the first call that wrote to it, and the user's own value is put back afterwards.
"""

from __future__ import annotations

import copy
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

# entries of a container beyond which it is no cache of weights, and too slow to look through
_ENTRIES = 256
_OF_MODULES = vars(nn.Module()).keys()


class _Missing:
    """In the place of an attribute that was not there: copies and pickles of a class are the same."""


Place = tuple[str, str]
"""The path of a module, and the name of its attribute."""


class _Held(NamedTuple):
    """A container in an attribute."""

    name: str
    """Of the attribute."""

    now: Any
    contents: Any
    """A copy of it, made before the call."""


class _Attributes(NamedTuple):
    """One module's attributes before a call."""

    path: str
    own: dict[str, Any]
    before: dict[str, Any]
    containers: list[_Held]

    def changed(self) -> set[str]:
        """Return the attributes that are others now, or gone."""
        if _same(self.own.values(), self.before.values()):
            return set()
        names = {*self.own, *self.before}
        return {n for n in names if self.own.get(n, _Missing) is not self.before.get(n, _Missing)}


def attributes_of(layers: Iterable[tuple[str, nn.Module]]) -> list[_Attributes]:
    """Return the attributes of modules, by their paths, whose forward pass may set some."""
    return [
        _Attributes(path, vars(layer), dict(vars(layer)), list(_containers(layer)))
        for path, layer in layers
        if not type(layer).__module__.startswith("torch.nn.modules")
    ]


class Memory:
    """The attributes that calls of a module have written to, with what they held before."""

    def __init__(self) -> None:
        self.first: dict[Place, Any] = {}
        """What each call begins with, by place."""

    def begin(self, every: list[_Attributes]) -> None:
        """Put what calls begin with in the place of what earlier ones have left."""
        for each in every if self.first else ():
            for (path, name), value in self.first.items():
                if path == each.path and value is _Missing:
                    each.own.pop(name, None)
                elif path == each.path:
                    each.own[name] = _copied(value)

    def end(self, every: list[_Attributes]) -> None:
        """Put attributes back as they were before the call; note what went with tensors in them.

        Containers stay as they are where no tensor was written, as of one that counts calls.
        """
        for each in every:
            changed = each.changed()
            written = [held for held in each.containers if not _same(held.now, held.contents)]
            if not (changed or written):
                continue
            values = [*(each.own.get(name) for name in changed), *(held.now for held in written)]
            if any(any(_tensors_in(value)) for value in values):
                for held in written:
                    held.now.clear()
                    _refill(held.now, held.contents)
                for name in {*changed, *(held.name for held in written)} - _OF_MODULES:
                    before = _copied(each.before.get(name, _Missing))
                    self.first.setdefault((each.path, name), before)
            each.own.clear()
            each.own.update(each.before)

    def forget_filled(self, module: nn.Module, is_cache: Callable[[], bool]) -> None:
        """Find caches that were filled before the first call, which then begins without them."""
        for path, layer in module.named_modules():
            for name, value in list(vars(layer).items()):
                if name in _OF_MODULES or not any(_tensors_in(value)):
                    continue
                empty = (None, _Missing) if isinstance(value, Tensor) else (_emptied(value),)
                for start in empty:
                    self.first[path, name] = start
                    if is_cache():
                        break
                    del self.first[path, name]


def _containers(layer: nn.Module) -> Iterator[_Held]:
    for name, value in vars(layer).items():
        if name not in _OF_MODULES:
            for container in _within(value):
                yield _Held(name, container, copy.copy(container))


def _is_container(value: Any) -> bool:
    return isinstance(value, (dict, list, set, deque)) and len(value) <= _ENTRIES


def _within(value: Any, around: tuple[int, ...] = ()) -> Iterator[Any]:
    """Yield a container and those inside of it."""
    if id(value) in around:
        return
    if _is_container(value):
        yield value
    if _is_container(value) or isinstance(value, tuple):
        for entry in _entries(value):
            yield from _within(entry, (*around, id(value)))


def _entries(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container


def _tensors_in(value: Any) -> Iterator[bool]:
    yield isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
    for container in _within(value):
        yield any(isinstance(entry, Tensor) for entry in _entries(container))


def _same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(map(operator.is_, _entries(a), _entries(b)))


def _refill(container: Any, contents: Any) -> None:
    if isinstance(container, (list, deque)):
        container.extend(contents)
    else:
        container.update(contents)


def _copied(value: Any) -> Any:
    """Return containers anew, with the same entries."""
    if not _is_container(value):
        return value
    other = copy.copy(value)
    if isinstance(value, dict):
        other.update({key: _copied(entry) for key, entry in value.items()})
    elif isinstance(value, (list, deque)):
        other.clear()
        other.extend(map(_copied, value))
    return other


def _emptied(value: Any) -> Any:
    """Return a container without the tensors in it, and in containers inside of it."""
    other = copy.copy(value)
    if not _is_container(other):
        return other
    other.clear()
    if isinstance(value, dict):
        kept = {k: _emptied(v) for k, v in value.items() if not isinstance(v, Tensor)}
        other.update(kept)
    else:
        _refill(other, [_emptied(entry) for entry in value if not isinstance(entry, Tensor)])
    return other
