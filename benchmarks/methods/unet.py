"""A small U-Net from image to image."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class UNet(nn.Module):
    """Convolutions at three resolutions, with connections across."""

    def __init__(self, channels: tuple[int, int, int] = (8, 16, 16), dropout: float = 0.0):
        super().__init__()
        first, second, third = channels
        self.rate = dropout
        self.enter = _pair(1, first)
        self.down = nn.ModuleList([_pair(first, second), _pair(second, third)])
        self.up = nn.ModuleList([_pair(third + second, second), _pair(second + first, first)])
        self.leave = nn.Conv2d(first, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        full = self.enter(x)
        half = self._dropped(self.down[0](functional.avg_pool2d(full, 2)))
        quarter = self._dropped(self.down[1](functional.avg_pool2d(half, 2)))
        half = self._dropped(self.up[0](torch.cat([_doubled(quarter), half], 1)))
        return self.leave(self._dropped(self.up[1](torch.cat([_doubled(half), full], 1))))

    def _dropped(self, h: Tensor) -> Tensor:
        return functional.dropout2d(h, self.rate, self.training) if self.rate else h


def _pair(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (inputs, outputs):
        layers += [nn.Conv2d(width, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU()]
    return nn.Sequential(*layers)


def _doubled(x: Tensor) -> Tensor:
    return functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
