"""Every tensor that a batch holds, inside whatever holds it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PLAIN = (str, bytes, int, float)


def contents(
    tree: Any, inside: bool = False, above: tuple[int, ...] = ()
) -> Iterator[tuple[Tensor, bool]]:
    """Yield every tensor, and whether its rows may be those of the data.

    Rows inside objects that move themselves (``.to``) may be of anything, as the nodes of
    graphs. Lists of words or numbers come as hashes of them.
    """
    if isinstance(tree, np.ndarray) and tree.dtype.kind in "biufc":
        tree = torch.from_numpy(
            tree.astype(np.complex128 if tree.dtype.kind == "c" else np.float64)
        )
    if isinstance(tree, Tensor):
        yield from ((part, whole and not inside) for part, whole in _strided(tree))
    elif id(tree) not in above:
        parts = list(_parts(tree))
        if isinstance(tree, (tuple, list)) and parts and all(isinstance(p, _PLAIN) for p in parts):
            yield torch.tensor([float(zlib.crc32(repr(part).encode())) for part in parts]), False
            return
        inside = inside or _moves_itself(tree)
        for part in parts:
            yield from contents(part, inside, (*above, id(tree)))


def _strided(tensor: Tensor) -> Iterator[tuple[Tensor, bool]]:
    if tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        return
    if tensor.layout == torch.sparse_coo:
        yield tensor.detach()._indices(), False
        yield tensor.detach()._values(), False
    elif tensor.layout == torch.strided:
        yield (tensor.detach(), True) if tensor.dim() else (tensor.detach()[None], False)


def _moves_itself(tree: Any) -> bool:
    return callable(getattr(tree, "to", None)) and not isinstance(tree, (Mapping, type))


def _parts(tree: Any) -> Iterable[Any]:
    if isinstance(tree, Mapping):
        return tree.values()
    if isinstance(tree, (tuple, list)):
        return tree
    if is_dataclass(tree) and not isinstance(tree, type):
        return [getattr(tree, field.name) for field in fields(tree)]
    return getattr(tree, "__dict__", {}).values() if _moves_itself(tree) else ()
