"""Contents of files besides tensors: records, states of an iteration, fingerprints of networks."""

from __future__ import annotations

import hashlib
import json
import re
from functools import partial
from inspect import getclosurevars
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor, nn

from torch_lla_em.runtime.files import Path_, contents_of

VERSION = 2

_ADDRESS = re.compile("0x[0-9a-fA-F]+")
_DATA = Tensor, np.ndarray, bool, int, float, complex, str
"""Types of the global variables that are compared with a function: notebooks have no closures."""


def fingerprint(model: nn.Module) -> Tensor:
    """Return 32 bytes that depend on every parameter and buffer but ``num_batches_tracked``."""
    digest = hashlib.sha256()
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        if name.rpartition(".")[2] != "num_batches_tracked":
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(_raw(tensor))
    return torch.tensor(list(digest.digest()), dtype=torch.uint8, device="cpu")


def _raw(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor."""
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


def from_bytes(tensor: Tensor) -> Any:
    """Return the record of a tensor of bytes."""
    return json.loads(bytes(tensor.tolist()).decode())


def read(
    path: Path_, names: tuple[str, ...] = (), remedy: str = "Pass a file of LinearisedLaplace.save."
) -> dict[str, Any]:
    """Return the tensors of a saved posterior; raise an error if the file is none."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}.")
    state = contents_of(path, names, remedy)
    check(state)
    return state


def check(state: Any) -> None:
    """Raise an error if a state was not saved by this version of the library."""
    if not isinstance(state, dict) or "torch_lla_em_version" not in state:
        raise ValueError(
            "This is not a posterior saved by torch_lla_em: it has no version key. Pass a file of "
            "LinearisedLaplace.save, or the result of state_dict()."
        )
    version = int(state["torch_lla_em_version"])
    if version != VERSION:
        raise ValueError(
            f"The posterior was saved in format {version}, but this release reads format {VERSION}. "
            "Load it with the release that wrote it, or fit again."
        )


def plain(value: Any, around: tuple[int, ...] = ()) -> str:
    """Return a setting as text that is the same in every process: tensors by a hash of their bytes.

    ``around`` are the ids of the objects that it is in, which it may refer to.
    """
    if id(value) in around:
        return "..."
    inside = partial(plain, around=(*around, id(value)))
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"array{value.shape} {value.dtype} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, Tensor):
        return f"tensor{tuple(value.shape)} {value.dtype} {hashlib.sha256(_raw(value)).hexdigest()}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(inside, value))})"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(inside, value)))}}}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{inside(key)}: {inside(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, partial):
        return f"partial{inside((value.func, value.args, value.keywords))}"
    if isinstance(value, FunctionType):
        used = getclosurevars(value)
        data = {name: v for name, v in used.globals.items() if isinstance(v, _DATA)}
        return f"{value.__qualname__}{inside({**used.nonlocals, **data})}"
    if hasattr(value, "__dict__") and not callable(value) and not isinstance(value, ModuleType):
        return f"{type(value).__qualname__}{inside(vars(value))}"
    text = getattr(value, "__qualname__", None) or str(value)
    return text if isinstance(value, str) else _ADDRESS.sub("", text)


class Grown(NamedTuple):
    """A growing list of tensors, each of which a checkpoint writes only once."""

    key: str
    """A unique name: see ``new_key``."""

    parts: list[Any]
    """The tensors; in a file of a checkpoint the names of their blocks."""

    @classmethod
    def of(cls, *parts: Tensor) -> Grown:
        """Return a new list of these tensors."""
        return cls(new_key(), list(parts))


def new_key() -> str:
    """Return a unique name for a new ``Grown``."""
    return uuid4().hex
