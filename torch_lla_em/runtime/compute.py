"""Options for the precision of products, the place of vectors, and limits on memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import InitVar, dataclass
from typing import Any, Literal

import torch

_CHOICES = {
    "precision": ("float32", "tf32", "bfloat16"),
    "vectors": ("auto", "device", "cpu"),
}


@dataclass(frozen=True)
class Compute:
    """Precision and memory of a fit. The defaults choose what fits into memory.

    Example:
        >>> la = LinearisedLaplace(model, "classification", compute=Compute(vectors="cpu"))
    """

    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    """Precision of matrix products inside the network: "float32" (default: the dtype of the model),
    "tf32" on CUDA, or "bfloat16" by autocast. The error of the products is measured on the first
    batch and logged. Solvers always use float32 or higher."""

    vectors: Literal["auto", "device", "cpu"] = "auto"
    """Where samples and directions are stored: on the model's "device", or on the "cpu", from which
    a few at a time are copied to the device. Default "auto": on the device if they fit."""

    columns: int | None = None
    """Largest number of columns that are multiplied at once. Default None: as many as fit."""

    rows: int | None = None
    """Largest number of examples that are processed at once. Default None: as many as fit."""

    keep_data: bool = True
    """Whether to join small batches, and to keep the batches on the device if they fit into a quarter
    of its memory. Default True. False takes the batches from the loader in every pass."""

    graphs: InitVar[bool] = False

    def __post_init__(self, graphs: bool) -> None:
        if graphs:
            raise TypeError(
                "Compute(graphs=True) is no longer supported, because CUDA graphs did not make fits "
                "faster. Leave `graphs` out. If small batches leave the GPU idle, use larger "
                "ones, or keep_data=True, which joins small batches."
            )
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        for name in ("columns", "rows"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a whole number of 1 or more, not {value!r}.")


def check_choice(name: str, value: object, choices: tuple[str | None, ...]) -> None:
    """Raise an error if a value is not among the choices."""
    if value not in choices:
        expected = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name}={value!r} is not known: choose one of {expected}.")


@contextmanager
def tf32(device: torch.device, allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 in matrix products and convolutions on a CUDA device."""
    if device.type != "cuda":
        yield
        return
    flags = _tf32_flags()
    before = [getattr(flag, name) for flag, name, _ in flags]
    # inherited values stay inherited
    before = [own if own != inherited else "none" for own, (_, _, inherited) in zip(before, flags)]
    for flag, name, inherited in flags:
        setattr(flag, name, allowed if inherited is None else ("tf32" if allowed else "ieee"))
    try:
        yield
    finally:
        for (flag, name, _), value in zip(flags, before):
            setattr(flag, name, value)


def _tf32_flags() -> list[tuple[Any, str, str | None]]:
    """Return the flags of TF32, each with the value that it would inherit; before torch 2.9 none does."""
    cudnn: Any = torch.backends.cudnn
    if not hasattr(torch.backends, "fp32_precision"):
        return [(part, "allow_tf32", None) for part in (torch.backends.cuda.matmul, cudnn)]
    flags = [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn]
    return [(flag, "fp32_precision", cudnn.fp32_precision) for flag in flags]
