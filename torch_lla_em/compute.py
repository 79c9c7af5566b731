"""How products are computed and where vectors live: nothing that changes what is computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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

    compile: bool = False
    """Compile a batch's products; kept if they agree with eager ones and take less time."""

    keep_data: bool = True
    """Keep the batches on the device after the third pass, if a quarter of its memory holds them."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                expected = ", ".join(map(repr, choices))
                raise ValueError(f"{name}={getattr(self, name)!r}: choose one of {expected}.")
        for name in ("columns", "rows"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a whole number of 1 or more, not {value!r}.")


@contextmanager
def tf32(device: torch.device, allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 in products of matrices and convolutions on a CUDA device."""
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
