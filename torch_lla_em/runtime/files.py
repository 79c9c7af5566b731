"""Files of tensors that are there whole or not at all, and are read with their checksums."""

from __future__ import annotations

import logging
import os
import re
import shutil
import uuid
from contextlib import suppress
from importlib.util import find_spec
from math import inf
from os import PathLike
from pathlib import Path
from threading import RLock, Thread, current_thread
from typing import IO
from zipfile import BadZipFile, ZipFile
from zlib import crc32

import torch
from torch import Tensor

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

from torch_lla_em.runtime.memory import is_shortage

logger = logging.getLogger("torch_lla_em")

Path_ = str | PathLike

# names of files that are being written
_STUMP = re.compile(r"\.writing-[0-9a-f]{32}")

# what this process has taken: its open handle, if it could be locked, and by which thread
_taken: dict[Path, tuple[int | None, Thread]] = {}
_taking = RLock()


class UnreadableError(ValueError):
    """A file is damaged, or not one of ours."""


def tensors_of(
    path: Path_, names: tuple[str, ...] = (), remedy: str = "", device: str | torch.device = "cpu"
) -> dict[str, Tensor]:
    """Return what a file holds, these names at least, or say what to do; no code in it is run.

    A name that ends with .safetensors is of that format, any other of torch's.
    """
    is_safe = _is_safe(path)
    with open(path, "rb") as file:
        try:
            if is_safe:
                state = _read_safe(path, device)
            else:
                _check_sums(file)
                state = torch.load(file, map_location=device, weights_only=True)
            fault = next((f"no {name!r}" for name in names if name not in state), "")
        except Exception as error:
            if is_shortage(error):
                raise
            fault = type(error).__name__
    if fault:
        raise UnreadableError(
            f"{os.fspath(path)!r} cannot be read: it is truncated, damaged or of another program "
            f"({fault}). {remedy}".rstrip()
        )
    return state


def _check_sums(file: IO[bytes]) -> None:
    """Compare a file's bytes with the checksums in it, which torch writes and does not read."""
    if torch.serialization.get_crc32_options():
        with ZipFile(file) as archive:
            if (
                sum(entry.file_size for entry in archive.infolist())
                > os.fstat(file.fileno()).st_size
            ):
                raise BadZipFile("it claims to hold more than it does")
            damaged = archive.testzip()
        if damaged:
            raise BadZipFile(damaged)
        file.seek(0)


def write_atomically(state: dict[str, Tensor], path: Path_) -> None:
    """Write tensors so that the file is there whole or not at all, also after a power failure."""
    path = Path(path)  # a link is replaced, not written through
    try:
        _write(state, path)
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise
        _write(state, path)  # what was half written was removed meanwhile, by whoever it was
    _sync_folder(path.parent)


def _is_safe(path: Path_) -> bool:
    """Whether a file is of safetensors by its name; raise where that library is missing."""
    if Path(path).suffix != ".safetensors":
        return False
    if find_spec("safetensors") is None:
        raise ImportError(
            f"{os.fspath(path)!r} is a name for the safetensors format, which needs that library: "
            "pip install safetensors, or choose a name that ends with .pt."
        )
    return True


def _write_safe(state: dict[str, Tensor], path: Path) -> None:
    """Write safetensors with a checksum of all tensors, which the format itself has not."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    own = {}
    for name, tensor in state.items():
        tensor = tensor.detach().cpu().contiguous()
        is_part = tensor.untyped_storage().nbytes() != tensor.nbytes  # which the format refuses
        own[name] = tensor.clone() if is_part else tensor
    try:
        save_file(own, path, {"format": "pt", "crc32": _sum_of(own)})
    except SafetensorError as error:
        raise RuntimeError(str(error)) from error


def _read_safe(path: Path_, device: str | torch.device) -> dict[str, Tensor]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        known = (file.metadata() or {}).get("crc32")
    if known is not None and known != _sum_of(state):
        raise UnreadableError("checksum")
    return {name: tensor.to(device) for name, tensor in state.items()}


def _sum_of(state: dict[str, Tensor]) -> str:
    found = 0
    for name in sorted(state):
        found = crc32(state[name].reshape(-1).view(torch.uint8).numpy().data, found)
    return f"{found:08x}"


def _write(state: dict[str, Tensor], path: Path) -> None:
    name, is_safe = _stump(path.parent), _is_safe(path)
    try:
        handle = os.open(
            name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666
        )
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    try:
        with os.fdopen(handle, "wb") as file:
            try:
                _write_safe(state, name) if is_safe else torch.save(state, file)
            except RuntimeError as error:  # what both make of a disk that is full
                raise OSError(f"{path.name!r} could not be written: {error}") from error
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        remove(name)
        raise


def _stump(folder: Path) -> Path:
    """Return a name for a file that is being written."""
    return folder / f".writing-{uuid.uuid4().hex}"


def try_to_write(folder: Path) -> None:
    """Raise where no file can be written."""
    name = _stump(folder)
    _write({"nothing": torch.zeros(1, device="cpu")}, name)
    remove(name)


def remove_stumps(folder: Path) -> None:
    """Remove what was half written, where nobody else is at work."""
    for path in folder.iterdir():
        if _STUMP.fullmatch(path.name):
            remove(path)


def take(path: Path) -> bool:
    """Take a file for this thread, until ``leave`` or its end; False if another one has it.

    Threads are kept apart also where there is no such file yet; processes, where there can be locks.
    """
    with _taking:
        leave(path)
        if path in _taken:
            return False
        _taken[path] = None, current_thread()
        try:
            handle = os.open(path, os.O_RDWR)
            _taken[path] = handle, current_thread()
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            leave(path)
            return False
        except (OSError, AttributeError):  # nothing can be locked there
            pass
        return True


def leave(path: Path) -> None:
    """Have others take a file, unless another thread is at work on it."""
    with _taking:
        handle, owner = _taken.get(path, (None, current_thread()))
        if owner is not current_thread() and owner.is_alive():
            return
        _taken.pop(path, None)
        if handle is not None:
            with suppress(OSError, AttributeError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # forked processes have it open too
            os.close(handle)


def room_in(folder: Path) -> float:
    """Return the bytes that are free where a folder lies, infinity where that is not told."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return inf
    return usage.free if usage.total else inf


def _sync_folder(folder: Path) -> None:
    """Have the names of files outlive a power failure, where the platform can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove(path: Path_) -> None:
    """Remove a file that is needed no more; where it cannot be, it stays."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.info("%r stays, since it cannot be removed (%s).", os.fspath(path), error)
