"""Saving: tensors only, versioned, with a fingerprint of the network they belong to."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.files import Path_, tensors_of

VERSION = 1


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
