"""Saving: tensors only, versioned, with a fingerprint of the network they belong to."""

from __future__ import annotations

import hashlib
import json
import re
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torch_lla_em.runtime.files import Path_, tensors_of

VERSION = 2
_READ = 1, 2

_ADDRESS = re.compile("0x[0-9a-fA-F]+")


def fingerprint(model: nn.Module, earlier: bool = False) -> Tensor:
    """Return 32 bytes that change with any parameter or buffer but counts of batches.

    ``earlier`` is that of earlier releases, which left integers and booleans out.
    """
    digest = hashlib.sha256()
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        counts = name.rpartition(".")[2] == "num_batches_tracked"
        if tensor.is_floating_point() or not (earlier or counts):
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(_raw(tensor))
    return torch.tensor(list(digest.digest()), dtype=torch.uint8, device="cpu")


def _raw(tensor: Tensor) -> bytes:
    """Return what a tensor holds."""
    tensor = tensor.detach().cpu()
    if tensor.layout != torch.strided:
        entries = tensor.to_sparse_coo().coalesce()
        return _raw(entries.indices()) + _raw(entries.values())
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    return (
        tensor.resolve_conj()
        .resolve_neg()
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )


def to_bytes(record: Any) -> Tensor:
    """Return a JSON record as a tensor of bytes."""
    return torch.tensor(list(json.dumps(record).encode()), dtype=torch.uint8, device="cpu")


def plain(value: Any, around: tuple[int, ...] = ()) -> str:
    """Return a value as text: tensors to the last digit, objects by their kind and insides.

    Every process makes the same text of it. ``around`` are the objects that it is in, by ``id``.
    """
    if id(value) in around:
        return "..."
    inside = partial(plain, around=(*around, id(value)))
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"array{value.shape} {value.dtype} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, Tensor):
        return f"tensor{tuple(value.shape)} {value.dtype} {hashlib.sha256(_raw(value)).hexdigest()}"
    if isinstance(value, torch.Generator):  # its state is another after every draw
        return f"Generator({value.device}, {value.initial_seed()})"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(inside, value))})"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(inside, value)))}}}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{inside(key)}: {inside(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, partial):
        return f"partial{inside((value.func, value.args, value.keywords))}"
    if isinstance(value, ModuleType):
        return value.__name__
    if type(value).__repr__ is object.__repr__ or (
        hasattr(value, "__dict__") and not callable(value)
    ):
        return f"{type(value).__qualname__}{inside(_attributes(value))}"
    text = getattr(value, "__qualname__", None) or str(value)
    return text if isinstance(value, str) else _ADDRESS.sub("", text)


def _attributes(value: Any) -> dict[str, Any]:
    slots = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
    names = [name for own in slots for name in ((own,) if isinstance(own, str) else own)]
    given = {
        name: getattr(value, name) for name in names if name != "__dict__" and hasattr(value, name)
    }
    return {**getattr(value, "__dict__", {}), **given}


def from_bytes(tensor: Tensor) -> Any:
    """Return the record of a tensor of bytes."""
    return json.loads(bytes(tensor.tolist()).decode())


def read(
    path: Path_, names: tuple[str, ...] = (), remedy: str = "Pass a file of LinearisedLaplace.save."
) -> dict[str, Tensor]:
    """Return the tensors of a saved posterior, or say why it is none."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}.")
    state = tensors_of(path, names, remedy)
    check(state)
    return state


def check(state: Any) -> None:
    """Raise unless a state is one of ours, of this version."""
    if not isinstance(state, dict) or "torch_lla_em_version" not in state:
        raise ValueError(
            "This is not a posterior saved by torch_lla_em: it has no version key. Pass what "
            "LinearisedLaplace.save or state_dict() wrote."
        )
    version = int(state["torch_lla_em_version"])
    if version not in _READ:
        raise ValueError(
            f"The posterior was saved in format {version}, but this release reads formats "
            f"{_READ}. Load it with the release that wrote it, or fit again."
        )
