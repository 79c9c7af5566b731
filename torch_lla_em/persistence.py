"""Saving: tensors only, versioned, with a fingerprint of the network they belong to."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import IO, Any
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor, nn

from torch_lla_em.memory import is_shortage

logger = logging.getLogger("torch_lla_em")

VERSION = 1

Path_ = str | PathLike


def fingerprint(model: nn.Module) -> Tensor:
    """Return 32 bytes that change with any parameter or floating-point buffer of a model."""
    digest = hashlib.sha256()
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        if tensor.is_floating_point():
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(raw.numpy().tobytes())
    return torch.tensor(list(digest.digest()), dtype=torch.uint8)


def to_bytes(record: Any) -> Tensor:
    """Return a JSON record as a tensor of bytes."""
    return torch.tensor(list(json.dumps(record).encode()), dtype=torch.uint8)


def plain(value: Any) -> str:
    """Return a value as text: tensors to the last digit, objects by their kind and insides."""
    if isinstance(value, Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"tensor{tuple(value.shape)} {value.dtype} {hashlib.sha256(raw).hexdigest()}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(plain, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {plain(inside)}' for key, inside in value.items())}}}"
    if type(value).__repr__ is object.__repr__ or hasattr(value, "__dict__") and not callable(value):
        return f"{type(value).__qualname__}{plain(vars(value))}"
    return getattr(value, "__qualname__", None) or str(value)


def from_bytes(tensor: Tensor) -> Any:
    """Return the record of a tensor of bytes."""
    return json.loads(bytes(tensor.tolist()).decode())


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
            damaged = archive.testzip()
        if damaged:
            raise BadZipFile(damaged)
        file.seek(0)


def read(path: Path_, names: tuple[str, ...] = (), remedy: str = "") -> dict[str, Tensor]:
    """Return the tensors of a saved posterior, or say why it is none."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}.")
    state = tensors_of(path, names, remedy or "Pass a file of LinearisedLaplace.save.")
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
    if version != VERSION:
        raise ValueError(
            f"The posterior was saved in format {version}, but this release reads format "
            f"{VERSION}. Load it with the release that wrote it, or fit again."
        )


def write_atomically(state: dict[str, Tensor], path: Path_) -> None:
    """Write tensors so that the file is there whole or not at all, also after a power failure."""
    path = Path(path).resolve()  # of a link, the file that it is for
    name = path.parent / f".writing-{uuid.uuid4().hex}"
    try:
        handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
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
    _sync_folder(path.parent)


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
