"""Files of tensors and records with checksums, and settings as text for comparisons."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from contextlib import suppress
from errno import EIO
from functools import partial
from inspect import getclosurevars
from os import PathLike
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any
from uuid import uuid4
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from torch_lla_em.runtime.memory import suppressed

VERSION = 2
"""Version of the file of a saved posterior."""

_SAVED_BY = {"posterior": "LinearisedLaplace", "ensemble": "LaplaceEnsemble", "student": "Student"}
_ADDRESS = re.compile("0x[0-9a-fA-F]+")


def contents_of(path: str | PathLike[str], names: tuple[str, ...], remedy: str) -> dict[str, Any]:
    """Return the contents of a file, which must have these names. No code in the file is run.

    If the file cannot be read, the error ends with ``remedy``.
    """
    failures: list[Exception] = []
    faults: list[str] = []
    with open(path, "rb") as file, suppressed(failures):
        if torch.serialization.get_crc32_options():  # torch does not check them itself
            with ZipFile(file) as archive:
                if damaged := archive.testzip():
                    raise BadZipFile(damaged)
            file.seek(0)
        with torch.serialization.safe_globals(_record_types()):
            state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        faults = [f"no {name!r}" for name in names if name not in state]
    faults += [type(failure).__name__ for failure in failures]
    if faults:
        raise ValueError(
            f"{os.fspath(path)!r} cannot be read: it is truncated, damaged or written by another "
            f"program ({faults[0]}). {remedy}"
        )
    return state


def write_atomically(state: dict[str, Any] | bytes, path: str | PathLike[str]) -> None:
    """Write contents to a temporary file and rename it, so that the file is never half written."""
    path = Path(path)  # a link is replaced, and its target is not changed
    temporary = path.parent / f".writing-{uuid4().hex}"
    try:
        with open(temporary, "xb") as file:
            if isinstance(state, bytes):
                file.write(state)
            else:
                torch.save(tree_map_only(Tensor, _own, state), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        remove(path.parent, temporary.name)
        if isinstance(error, (OSError, RuntimeError)):  # torch raises these, as for a full disk
            words = getattr(error, "strerror", None) or f"could not be written: {error}"
            raise OSError(getattr(error, "errno", None) or EIO, words, str(path)) from error
        raise


def _record_types() -> list[Any]:
    """Return the NamedTuples of this package, the only classes that files may contain besides
    tensors."""
    package = __name__.partition(".")[0]
    modules = [module for name, module in sys.modules.items() if name.startswith(f"{package}.")]
    types = [kind for module in modules for kind in vars(module).values() if isinstance(kind, type)]
    return [kind for kind in types if issubclass(kind, tuple) and hasattr(kind, "_fields")]


def _own(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU; views are copied, since files would contain their whole
    storage."""
    copy = tensor.detach().cpu()  # strides are kept, since later rounding depends on them
    return copy.clone() if copy.untyped_storage().nbytes() != copy.nbytes else copy


def remove(folder: Path, pattern: str) -> None:
    """Remove files that are no longer needed, if this is possible."""
    for path in folder.glob(pattern):
        with suppress(OSError):
            path.unlink()


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer by name, detached, except ``num_batches_tracked``."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {n: t.detach() for n, t in tensors if n.rpartition(".")[2] != "num_batches_tracked"}


def fingerprint(model: nn.Module | dict[str, Tensor]) -> Tensor:
    """Return 32 bytes that depend on every tensor of a network, and on their names."""
    digest = hashlib.sha256()
    tensors = tensors_of(model) if isinstance(model, nn.Module) else model
    for name, tensor in tensors.items():
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(_raw(tensor))
    return torch.tensor(list(digest.digest()), dtype=torch.uint8, device="cpu")


def _raw(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor."""
    tensor = tensor.detach().cpu()
    if tensor.layout != torch.strided:
        entries = tensor.to_sparse_coo().coalesce()
        return _raw(entries.indices()) + _raw(entries.values())
    tensor = tensor.int_repr() if tensor.is_quantized else tensor.resolve_conj().resolve_neg()
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def to_bytes(record: object) -> Tensor:
    """Return a JSON record as a tensor of bytes."""
    return torch.tensor(list(json.dumps(record).encode()), dtype=torch.uint8, device="cpu")


def from_bytes(tensor: Tensor) -> Any:
    """Return the record of a tensor of bytes."""
    return json.loads(bytes(tensor.tolist()).decode())


def read(path: str | PathLike[str], kind: str) -> dict[str, Any]:
    """Return the tensors of a saved "posterior", "ensemble" or "student"; raise an error if the
    file contains none."""
    state = contents_of(path, (), f"Pass a file of {_SAVED_BY[kind]}.save.")
    check(state, kind)
    return state


def check(state: object, kind: str) -> None:
    """Raise an error if a state is not of this kind, or not of this version of the format."""
    state = state if isinstance(state, dict) else {}
    names, writer = {*state}, "posterior"
    if "student" in names or {"head.0.weight", "_extra_state"} <= names:
        writer = "student"
    elif {"0.record", "members.0.record"} & names:  # earlier versions wrote the first one
        writer = "ensemble"
    elif "torch_lla_em_version" not in names:
        writer = "another program (it has no version key)"
    if writer != kind:
        raise ValueError(
            f"This state is that of {_SAVED_BY.get(writer, writer)}, not of {_SAVED_BY[kind]}: "
            "pass a file or a state_dict() of the latter."
        )
    version = int(state["torch_lla_em_version"])
    if version != VERSION:
        raise ValueError(
            f"The {kind} was saved in format {version}, but this release reads format {VERSION}. "
            "Load it with the release that wrote it, or fit again."
        )


def plain(value: object, around: tuple[int, ...] = ()) -> str:
    """Return a setting as text that is the same in every process. Tensors are represented by a hash
    of their bytes.

    ``around`` are the ids of the objects that contain the value, since it may refer to them.
    """
    if id(value) in around:
        return "..."
    inside, head = partial(plain, around=(*around, id(value))), ""
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"array{value.shape} {value.dtype} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, Tensor):
        return f"tensor{tuple(value.shape)} {value.dtype} {hashlib.sha256(_raw(value)).hexdigest()}"
    if isinstance(value, partial):
        head, value = "partial", (value.func, value.args, value.keywords)
    elif isinstance(value, FunctionType):
        head, value = value.__qualname__, dict(getclosurevars(value).nonlocals)
    elif hasattr(value, "__dict__") and not callable(value) and not isinstance(value, ModuleType):
        head, value = type(value).__qualname__, vars(value)
    if isinstance(value, (list, tuple)):
        return f"{head}({', '.join(map(inside, value))})"
    if isinstance(value, (set, frozenset)):
        return f"{head}{{{', '.join(sorted(map(inside, value)))}}}"
    if isinstance(value, dict):
        entries = (f"{inside(key)}: {inside(entry)}" for key, entry in value.items())
        return f"{head}{{{', '.join(entries)}}}"
    text = getattr(value, "__qualname__", None) or str(value)
    return text if isinstance(value, str) else _ADDRESS.sub("", text)
