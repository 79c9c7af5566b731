"""Files of tensors that are there whole or not at all, and are read with their checksums."""

from __future__ import annotations

import logging
import os
import re
import shutil
import uuid
from contextlib import suppress
from math import inf
from os import PathLike
from pathlib import Path
from typing import IO
from zipfile import BadZipFile, ZipFile

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

# what this process has taken, by its open handle
_taken: dict[Path, int] = {}


class UnreadableError(ValueError):
    """A file is damaged, or not one of ours."""


def tensors_of(
    path: Path_, names: tuple[str, ...] = (), remedy: str = "", device: str | torch.device = "cpu"
) -> dict[str, Tensor]:
    """Return what a file holds, these names at least, or say what to do; no code in it is run."""
    with open(path, "rb") as file:
        try:
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


def _write(state: dict[str, Tensor], path: Path) -> None:
    name = _stump(path.parent)
    try:
        handle = os.open(
            name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666
        )
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    try:
        with os.fdopen(handle, "wb") as file:
            try:
                torch.save(state, file)
            except RuntimeError as error:  # what torch makes of a disk that is full
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
    """Take a file for this process, until ``leave`` or its end; False if another one has it."""
    leave(path)
    try:
        handle = os.open(path, os.O_RDWR)
        _taken[path] = handle
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        leave(path)
        return False
    except (OSError, AttributeError):  # nothing can be taken there
        leave(path)
    return True


def leave(path: Path) -> None:
    """Have others take a file."""
    if (handle := _taken.pop(path, None)) is not None:
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
