"""Files of tensors and records, written as a whole or not at all, and read with their checksums."""

from __future__ import annotations

import logging
import os
import re
import sys
import uuid
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import IO, Any
from zipfile import BadZipFile, ZipFile
from zlib import crc32

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from torch_lla_em.runtime.memory import suppressed

logger = logging.getLogger("torch_lla_em")

Path_ = str | PathLike

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
    temporary, is_safe = path.parent / f".writing-{uuid.uuid4().hex}", _is_safe(path)
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

    state = {name: tensor.contiguous() for name, tensor in state.items()}
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
