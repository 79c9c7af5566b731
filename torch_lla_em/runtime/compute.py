"""How products are computed and where vectors are stored, which does not change the result."""

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
    """How a fit uses its device; the defaults are right if the model fits into memory.

    Example:
        >>> la = LinearisedLaplace(model, "classification", compute=Compute(vectors="cpu"))
    """

    precision: str = "float32"
    """Precision of matrix products inside the network: "float32" (or the model's own), "tf32" on
    CUDA, "bfloat16" by autocast. The error of products is measured on the first batch and logged.
    Solvers compute in float32 at least."""

    vectors: str = "auto"
    """Where samples, directions and the Krylov basis are stored: on the model's "device", or on the
    "cpu", from which a few columns at a time are copied to the device; "auto": wherever they fit."""

    columns: int | None = None
    """Largest number of columns that are multiplied at once; None: as many as fit."""

    rows: int | None = None
    """Largest number of examples of a batch that are used at once; None: as many as fit."""

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
    """Raise an error if a value is none of the choices."""
    if value not in choices:
        expected = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name}={value!r} is not known: choose one of {expected}.")


@contextmanager
def tf32(device: torch.device, allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 in matrix products and convolutions on a CUDA device."""
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
    """Return the flags for TF32 of torch 2.9 and later, each with the one that it inherits from."""
    if not hasattr(torch.backends, "fp32_precision"):
        return []
    cudnn: Any = torch.backends.cudnn
    mkldnn: Any = torch.backends.mkldnn
    cuda = [(flag, cudnn) for flag in (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)]
    return [*cuda, (mkldnn.matmul, mkldnn)]  # which the older names set as well


def _precisions() -> list[str]:
    """Return the precision of every flag, "none" if it is inherited."""
    found = [(flag.fp32_precision, parent.fp32_precision) for flag, parent in _flags()]
    return ["none" if own == inherited else own for own, inherited in found]


def _legacy() -> tuple[str, bool]:
    """Return the flags by their older names, which torch refuses if the newer ones disagree."""
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
    """Ignore warnings of deprecated names, which are the only ones in older releases."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
