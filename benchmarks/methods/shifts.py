"""Images that are unlike the training set: turned, or corrupted at five severities."""

from collections.abc import Callable
from math import cos, radians, sin
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

Change = Callable[[Tensor, torch.Generator], Tensor]


class Shift(NamedTuple):
    """One way to change images (B, channels, height, width) in [0, 1], at one strength."""

    name: str
    level: float
    """0: as they are."""

    change: Change

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        return self.change(x, generator).clamp(0, 1)


def rotations(step: float) -> list[Shift]:
    """Return turns by ``step`` to 180 degrees."""
    angles = [step * i for i in range(1, int(180 / step) + 1)]
    return [Shift("rotation", angle, _turned(angle)) for angle in angles]


def corruptions() -> list[Shift]:
    """Return five corruptions at severities 1 to 5, own ones: not the files of CIFAR-100-C."""
    kinds = {
        "Gaussian noise": (_noised, (0.03, 0.06, 0.09, 0.13, 0.18)),
        "blur": (_blurred, (0.5, 0.7, 0.9, 1.2, 1.6)),
        "contrast": (_flattened, (0.8, 0.6, 0.4, 0.25, 0.15)),
        "brightness": (_brightened, (0.06, 0.12, 0.18, 0.25, 0.33)),
        "pixelate": (_pixelated, (0.85, 0.7, 0.55, 0.45, 0.35)),
    }
    return [
        Shift(name, severity, make(strength))
        for name, (make, strengths) in kinds.items()
        for severity, strength in enumerate(strengths, 1)
    ]


def unchanged() -> Shift:
    return Shift("none", 0, lambda x, generator: x)


def _turned(angle: float) -> Change:
    c, s = cos(radians(angle)), sin(radians(angle))

    def change(x: Tensor, generator: torch.Generator) -> Tensor:
        turn = torch.tensor([[c, -s, 0], [s, c, 0]]).to(x).expand(len(x), 2, 3)
        grid = functional.affine_grid(turn, list(x.shape), align_corners=False)
        return functional.grid_sample(x, grid, align_corners=False)

    return change


def _noised(sd: float) -> Change:
    def change(x: Tensor, generator: torch.Generator) -> Tensor:
        return x + sd * torch.randn(x.shape, generator=generator).to(x)

    return change


def _blurred(width: float) -> Change:
    def change(x: Tensor, generator: torch.Generator) -> Tensor:
        reach = int(3 * width) + 1
        offsets = torch.arange(-reach, reach + 1).to(x)
        weights = (-0.5 * (offsets / width) ** 2).exp()
        weights = (weights / weights.sum()).expand(x.shape[1], 1, 1, -1)
        padded = functional.pad(x, (reach,) * 4, mode="replicate")
        for kernel in (weights, weights.mT):
            padded = functional.conv2d(padded, kernel, groups=x.shape[1])
        return padded

    return change


def _flattened(factor: float) -> Change:
    def change(x: Tensor, generator: torch.Generator) -> Tensor:
        mean = x.mean((2, 3), keepdim=True)
        return mean + factor * (x - mean)

    return change


def _brightened(added: float) -> Change:
    return lambda x, generator: x + added


def _pixelated(factor: float) -> Change:
    def change(x: Tensor, generator: torch.Generator) -> Tensor:
        coarse = [max(1, round(factor * side)) for side in x.shape[2:]]
        small = functional.interpolate(x, coarse, mode="area")
        return functional.interpolate(small, x.shape[2:], mode="nearest")

    return change
