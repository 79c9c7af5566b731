"""How products are computed and where vectors live: nothing that changes what is computed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import InitVar, dataclass
from typing import Any

import torch

_CHOICES = {
    "precision": ("float32", "tf32", "bfloat16"),
    "vectors": ("auto", "device", "cpu"),
}


@dataclass(frozen=True)
class Compute:
    """Means of computation; the defaults suit everybody whose model fits on its device."""

    precision: str = "float32"
    """Of matrix products inside the network: "float32" (or the model's own), "tf32" on CUDA,
    "bfloat16" by autocast. The products' error is measured on the first batch and logged;
    the solvers' own arithmetic stays as it is."""

    vectors: str = "auto"
    """Where samples, directions and the Krylov basis live: on the model's "device", or on the
    "cpu", from where a few columns at a time visit the device; "auto" by what fits."""

    columns: int | None = None
    """Columns of a product at once, at most; None: as many as fit."""

    rows: int | None = None
    """Rows of a batch at once, at most; None: as many as fit."""

    keep_data: bool = True
    """Join small batches, and keep them on the device if a quarter of its memory holds them: those of
    a list at once, others once two passes were the same. False reads the loader at every pass, and
    takes its batches as they are."""

    graphs: InitVar[bool] = False

    def __post_init__(self, graphs: bool) -> None:
        if graphs:
            raise TypeError(
                "Compute(graphs=True) is no longer supported: CUDA graphs were never shown to be "
                "faster. Leave `graphs` out; where small batches keep a GPU waiting for launches, "
                "use larger ones, or keep_data=True, which joins small batches."
            )
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        for name in ("columns", "rows"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a whole number of 1 or more, not {value!r}.")


def check_choice(name: str, value: object, choices: tuple[str | None, ...]) -> None:
    """Refuse what is none of the choices."""
    if value not in choices:
        expected = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name}={value!r} is not known: choose one of {expected}.")


@contextmanager
def tf32(device: torch.device, allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 in products of matrices and convolutions on a CUDA device."""
    if device.type != "cuda":
        yield
        return
    before, legacy = _precisions(), _legacy()
    _set_legacy("high" if allowed else "highest", allowed)
    for flag, _ in _flags():
        flag.fp32_precision = "tf32" if allowed else "ieee"
    try:
        yield
    finally:
        _set_legacy(*legacy)
        for (flag, _), precision in zip(_flags(), before):
            flag.fp32_precision = precision


def _flags() -> list[tuple[Any, Any]]:
    """Return what TF32 is allowed by since torch 2.9, each with what it inherits from."""
    if not hasattr(torch.backends, "fp32_precision"):
        return []
    cudnn: Any = torch.backends.cudnn
    mkldnn: Any = torch.backends.mkldnn
    cuda = [(flag, cudnn) for flag in (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)]
    return [*cuda, (mkldnn.matmul, mkldnn)]  # which goes with CUDA's where the older names are used


def _precisions() -> list[str]:
    """Return the precision of every flag, "none" where it is inherited."""
    found = [(flag.fp32_precision, parent.fp32_precision) for flag, parent in _flags()]
    return ["none" if own == inherited else own for own, inherited in found]


def _legacy() -> tuple[str, bool]:
    """Return the flags by their older names, which torch tells where the newer ones agree."""
    try:
        with _silently():
            matmul = torch.get_float32_matmul_precision()
    except RuntimeError:
        matmul = "highest" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "high"
    try:
        with _silently():
            return matmul, torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return matmul, _flags()[1][0].fp32_precision != "tf32"


def _set_legacy(matmul: str, convolutions: bool) -> None:
    with _silently():
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = convolutions


@contextmanager
def _silently() -> Iterator[None]:
    """Leave out that these names are to go: older releases know no other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
