"""Files of tensors and records, with checksums, and what they are compared with: settings as text."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sys
from functools import partial
from importlib.util import find_spec
from inspect import getclosurevars
from os import PathLike
from pathlib import Path
from types import FunctionType, ModuleType
from typing import IO, Any, Literal, NamedTuple
from uuid import uuid4
from zipfile import BadZipFile, ZipFile
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from torch_lla_em.runtime.memory import suppressed

logger = logging.getLogger("torch_lla_em")

Path_ = str | PathLike

VERSION = 2
"""Version of the file of a saved posterior."""

Kind = Literal["posterior", "ensemble", "student"]

_SAVED_BY = {
    "posterior": "LinearisedLaplace",
    "ensemble": "LaplaceEnsemble",
    "student": "Student",
}
_ADDRESS = re.compile("0x[0-9a-fA-F]+")
_DATA = Tensor, np.ndarray, bool, int, float, complex, str
"""Types of the global variables that are compared with a function: notebooks have no closures."""
_TEMPORARY = re.compile(r"\.writing-[0-9a-f]{32}")


class UnreadableError(ValueError):
    """A file is damaged, or was written by another program."""


def contents_of(path: Path_, names: tuple[str, ...] = (), remedy: str = "") -> dict[str, Any]:
    """Return the contents of a file, these names at least; no code in it is run.

    A name that ends with .safetensors is read in that format, any other in torch's. If the file
    cannot be read, the error ends with ``remedy``.
    """
    is_safe = _is_safe(path)
    failures: list[Exception] = []
    faults: list[str] = []
    with open(path, "rb") as file, suppressed(failures):
        if is_safe:
            state = _read_safe(path)
        else:
            _check_sums(file)
            with torch.serialization.safe_globals(_record_types()):
                state = torch.load(file, map_location="cpu", weights_only=True)
        faults = [f"no {name!r}" for name in names if name not in state]
    faults += [type(failure).__name__ for failure in failures]
    if faults:
        raise UnreadableError(
            f"{os.fspath(path)!r} cannot be read: it is truncated, damaged or written by another "
            f"program ({faults[0]}). {remedy}".rstrip()
        )
    return state


def write_atomically(state: dict[str, Any], path: Path_) -> None:
    """Write contents to a temporary file and rename it, so that the file is never half written."""
    path = Path(path)  # a link is replaced, not written through
    temporary, is_safe = path.parent / f".writing-{uuid4().hex}", _is_safe(path)
    try:
        own = tree_map_only(Tensor, _own, state)
        with open(temporary, "xb") as file:
            try:
                _write_safe(own, temporary) if is_safe else torch.save(own, file)
            except RuntimeError as error:  # raised by both formats if the disk is full
                raise OSError(f"{path.name!r} could not be written: {error}") from error
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        remove(temporary)
        if isinstance(error, OSError) and error.filename == str(temporary):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _record_types() -> list[Any]:
    """Return the NamedTuples of this package, the only classes that files may hold besides tensors."""
    package = __name__.partition(".")[0]
    modules = [module for name, module in sys.modules.items() if name.startswith(f"{package}.")]
    types = [kind for module in modules for kind in vars(module).values() if isinstance(kind, type)]
    return [kind for kind in types if issubclass(kind, tuple) and hasattr(kind, "_fields")]


def _own(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU; views are copied, since files would hold all of their storage."""
    own = tensor.detach().cpu()  # of any strides: those of a state decide how it is rounded later
    return own.clone() if own.untyped_storage().nbytes() != own.nbytes else own


def remove(path: Path_) -> None:
    """Remove a file that is not needed any more; log it if this is not possible."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.info("%r cannot be removed (%s).", os.fspath(path), error)


def remove_temporary(folder: Path) -> None:
    """Remove what a killed process had half written."""
    for path in folder.iterdir():
        if _TEMPORARY.fullmatch(path.name):
            remove(path)


def _check_sums(file: IO[bytes]) -> None:
    """Compare a file with the checksums in it, which torch writes but does not read."""
    if torch.serialization.get_crc32_options():
        with ZipFile(file) as archive:
            claimed = sum(entry.file_size for entry in archive.infolist())
            if claimed > os.fstat(file.fileno()).st_size:
                raise BadZipFile("its header promises more data than the file holds")
            damaged = archive.testzip()
        if damaged:
            raise BadZipFile(damaged)
        file.seek(0)


def _is_safe(path: Path_) -> bool:
    """Whether a file is of safetensors by its name; raise an error if that library is missing."""
    if Path(path).suffix != ".safetensors":
        return False
    if find_spec("safetensors") is None:
        raise ImportError(
            f"{os.fspath(path)!r} selects the safetensors format, which needs the package "
            "safetensors: pip install safetensors, or choose a name that ends with .pt."
        )
    return True


def _write_safe(state: dict[str, Tensor], path: Path) -> None:
    """Write safetensors with a checksum of all tensors, since the format itself has none."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # tensors may share memory here, as those of a member that is there twice do, but not in this format
    known: set[int] = set()
    for name, tensor in state.items():
        place = tensor.untyped_storage().data_ptr()
        state[name] = tensor.clone().contiguous() if place in known else tensor.contiguous()
        known.add(place)
    try:
        save_file(state, path, {"format": "pt", "crc32": _sum_of(state)})
    except SafetensorError as error:
        raise RuntimeError(str(error)) from error


def _read_safe(path: Path_) -> dict[str, Tensor]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        known = (file.metadata() or {}).get("crc32")
    if known is not None and known != _sum_of(state):
        raise UnreadableError("checksum")
    return state


def _sum_of(state: dict[str, Tensor]) -> str:
    found = 0
    for name in sorted(state):
        found = crc32(state[name].reshape(-1).view(torch.uint8).numpy().data, found)
    return f"{found:08x}"


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
    tensor = tensor.int_repr() if tensor.is_quantized else tensor.resolve_conj().resolve_neg()
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def to_bytes(record: Any) -> Tensor:
    """Return a JSON record as a tensor of bytes."""
    return torch.tensor(list(json.dumps(record).encode()), dtype=torch.uint8, device="cpu")


def from_bytes(tensor: Tensor) -> Any:
    """Return the record of a tensor of bytes."""
    return json.loads(bytes(tensor.tolist()).decode())


def read(path: Path_, kind: Kind, names: tuple[str, ...] = (), remedy: str = "") -> dict[str, Any]:
    """Return the tensors of a saved object; raise an error if the file holds none of this kind."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}.")
    state = contents_of(path, names, remedy or f"Pass a file of {_SAVED_BY[kind]}.save.")
    check(state, kind)
    return state


def check(state: Any, kind: Kind) -> None:
    """Raise an error if a state is not of this kind, or not of this version of the format."""
    names = state.keys() if isinstance(state, dict) else ()
    old_student = "head.0.weight" in names and any(name.startswith("network.") for name in names)
    found: Kind = "posterior"
    if "student" in names or old_student:
        found = "student"
    elif "0.record" in names:
        found = "ensemble"
    elif "torch_lla_em_version" not in names:
        raise ValueError(
            f"This is no {kind} saved by torch_lla_em: it has no version key. Pass a file of "
            f"{_SAVED_BY[kind]}.save, or the result of state_dict()."
        )
    if found != kind:
        articles = {"ensemble": "an ensemble"}
        raise ValueError(
            f"This state holds {articles.get(found, f'a {found}')}, not {articles.get(kind, f'a {kind}')}"
            f": use {_SAVED_BY[found]}.load, or load_state_dict of its kind."
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


class TensorList(NamedTuple):
    """A growing list of tensors, each of which a checkpoint writes only once."""

    key: str
    """A unique name: see ``new_key``."""

    parts: list[Any]
    """The tensors; in a file of a checkpoint the names of the blocks of each."""

    numbers: Tensor | None = None
    """Numbers of the examples whose rows the tensors have, which differ between ranks; None: every rank has
    the whole tensors."""

    @classmethod
    def of(cls, *parts: Tensor, numbers: Tensor | None = None) -> TensorList:
        """Return a new list of these tensors."""
        return cls(new_key(), list(parts), numbers)


def new_key() -> str:
    """Return a unique name for a new ``TensorList``."""
    return uuid4().hex
