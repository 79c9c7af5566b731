"""States of an iteration: nested tuples, lists and dicts of tensors and numbers, for a file."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple
from uuid import uuid4

from torch import Tensor


class Grown(NamedTuple):
    """Tensors to which others are only ever added, so that a checkpoint writes each of them once."""

    key: str
    """A name that nothing else has: see ``new_key``."""

    parts: list[Tensor]

    @classmethod
    def of(cls, *parts: Tensor) -> Grown:
        """Return one that begins with these."""
        return cls(new_key(), list(parts))


def new_key() -> str:
    """Return a name for a ``Grown`` that begins."""
    return uuid4().hex


def pack(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return a state as what JSON holds, with names in the place of its tensors, and the tensors.

    The parts of a ``Grown`` keep their names, which contain a "-", from one state to the next.
    """
    tensors: dict[str, Tensor] = {}

    def plain(value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, Tensor):
            name = str(len(tensors))
            tensors[name] = value
            return {"tensor": name}
        if isinstance(value, Grown):
            names = [f"{value.key}-{number}" for number in range(len(value.parts))]
            tensors.update(zip(names, value.parts))
            return {"grown": value.key, "parts": names}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            kind = f"{type(value).__module__}:{type(value).__qualname__}"
            return {"type": kind, "fields": [plain(part) for part in value]}
        if isinstance(value, (list, tuple)):
            return [plain(part) for part in value]
        if isinstance(value, dict):
            return {"items": [[plain(key), plain(part)] for key, part in value.items()]}
        raise TypeError(f"A state holds tensors, numbers and words, not {type(value).__name__}.")

    return plain(state), tensors


def unpack(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the state of which ``pack`` made these; plain tuples come back as lists."""
    if isinstance(tree, list):
        return [unpack(part, tensors) for part in tree]
    if not isinstance(tree, dict):
        return tree
    if "tensor" in tree:
        return tensors[tree["tensor"]]
    if "grown" in tree:
        return Grown(tree["grown"], [tensors[name] for name in tree["parts"]])
    if "items" in tree:
        return {unpack(key, tensors): unpack(part, tensors) for key, part in tree["items"]}
    return _kind(tree["type"])(*(unpack(part, tensors) for part in tree["fields"]))


def _kind(name: str) -> type:
    """Return a NamedTuple of this package by its name; nothing else is ever made."""
    module, _, known_as = name.partition(":")
    kind = None
    if module.startswith(f"{__name__.partition('.')[0]}."):
        kind = getattr(import_module(module), known_as, None)
    if not (isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")):
        raise ValueError(f"A state of another version of the program: it has no {name!r}.")
    return kind
