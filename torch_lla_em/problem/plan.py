"""The plan of a fit: the limits of its passes, and a text on its memory and time."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import torch

from torch_lla_em.jacobian import Ways

_OF_LAST_LAYERS = (
    "The fit of a last layer takes few passes; most of its time is for products of the features "
    "with directions, and grows with examples, classes and samples. "
    "Compute(budget=seconds) limits it."
)

# number of passes of most fits: 9 of 10 networks of benchmarks/cost.py are in this range
_PASSES = 10, 40
# seconds above which the text names ways to shorten the fit
_LONG = 60.0


class Plan(NamedTuple):
    """The limits of passes, and the memory and time of a fit. A plan is never changed; if memory
    runs out, it is replaced by another one."""

    device: torch.device
    """Device on which vectors are stored."""

    rows: float = inf
    columns: int | None = None
    group: int | None = None
    """Largest number of examples, and of columns of a product, that are processed at once; and
    largest number of columns on the device at once if vectors are stored elsewhere. None: all."""

    batches: float = 0.0
    factors: float = 0.0
    """Memory in bytes for batches, and for their Jacobian factors, that are kept from pass to
    pass."""

    num_samples: int = 0
    size: int = 0
    vectors: float = 0.0
    free: float = 0.0
    """K, P, the bytes of the vectors at the peak without the span, and the free bytes of the device
    where they are stored."""

    example: Ways = Ways()
    """The costs of an example."""

    memory: tuple[float, float] | None = None
    """The peak of memory in bytes: for most such fits (within a factor of two), and for a fit with
    five times the usual passes."""

    pass_seconds: float | None = None
    is_last_layer: bool = False
    """The seconds of a pass, and whether the fit is that of a last layer, whose time is not
    dominated by passes."""

    @property
    def is_long(self) -> bool:
        """Whether the fit may take more than five minutes, or more than half of the free memory."""
        if self.pass_seconds is not None and _PASSES[1] * self.pass_seconds > 5 * _LONG:
            return True
        expected, _ = self.memory or (self.vectors, 0.0)
        return expected > self.free / 2

    def __str__(self) -> str:
        expected, most = self.memory or (self.vectors, 2 * self.vectors)
        words = (
            f"A fit of {self.num_samples} samples of {self.size:,} parameters will take about "
            f"{expected / 1e9:.2g} GB of memory on {self.device}, and up to {most / 1e9:.2g} GB if "
            f"it needs five times the usual passes; {self.free / 1e9:.3g} GB are free."
        )
        if self.pass_seconds is None:
            return words
        return f"{time_of_fit(self.pass_seconds, self.is_last_layer)} {words}"


def time_of_fit(pass_seconds: float, is_last_layer: bool, only_long: bool = False) -> str:
    """Describe how long a fit takes, from the seconds of a pass. With ``only_long`` the text is
    empty for short fits."""
    (least, most), remedy = _PASSES, ""
    if is_last_layer:  # few passes; the time is that of products of features
        return "" if only_long else _OF_LAST_LAYERS
    if most * pass_seconds > _LONG:
        remedy = ' To shorten the fit, use parameters="last_layer" or Compute(budget=seconds).'
    elif only_long:
        return ""
    return (
        f"A pass over the data takes about {duration(pass_seconds)}; most fits take {least} to "
        f"{most}.{remedy}"
    )


def duration(seconds: float) -> str:
    """Return a duration as text."""
    return f"{seconds:.3g} s" if seconds < 120 else f"{seconds / 60:,.0f} min"
