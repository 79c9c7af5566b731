"""Networks for images of the shapes of MNIST, CIFAR and ImageNet, and a small U-Net."""

from itertools import pairwise

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """A basic block of a CIFAR ResNet, with the parameter-free shortcut."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.stride = 2 if outputs > inputs else 1
        self.a = nn.Conv2d(inputs, outputs, 3, self.stride, 1, bias=False)
        self.b = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)])
        self.extra = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[1](self.b(self.norms[0](self.a(x)).relu()))
        x = F.pad(x[..., :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra))
        return (x + h).relu()


def resnet20() -> nn.Module:
    blocks = [Residual(16, 16) for _ in range(3)]
    blocks += [Residual(16, 32), *(Residual(32, 32) for _ in range(2))]
    blocks += [Residual(32, 64), *(Residual(64, 64) for _ in range(2))]
    stem = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def resnet18(num_classes: int = 10) -> nn.Module:
    """Return the one for images of 32 x 32."""
    model = torchvision.models.resnet18(num_classes=num_classes)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return model


def vit_s() -> nn.Module:
    sizes = {"num_layers": 12, "num_heads": 6, "hidden_dim": 384, "mlp_dim": 1536}
    return torchvision.models.VisionTransformer(image_size=224, patch_size=16, **sizes)


resnet50 = torchvision.models.resnet50


def lenet(activation: type = nn.ReLU, pool: type = nn.MaxPool2d) -> nn.Module:
    """Return LeNet-5 for images of 28 x 28."""
    layers: list[nn.Module] = []
    for inputs, outputs, padding in ((1, 6, 2), (6, 16, 0)):
        layers += [nn.Conv2d(inputs, outputs, 5, padding=padding), activation(), pool(2)]
    layers += [nn.Flatten(), nn.Linear(400, 120), activation(), nn.Linear(120, 84), activation()]
    return nn.Sequential(*layers, nn.Linear(84, 10))


def convolutional(channels: list[int], sizes: list[int]) -> nn.Module:
    """Return convolutions with pooling between these channels, then layers of these sizes."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(channels):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers.append(nn.Flatten())
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class UNet(nn.Module):
    """Convolutions at three resolutions, with connections across, from one channel to one."""

    def __init__(self):
        super().__init__()
        self.enter = _pair(1, 8)
        self.down = nn.ModuleList([_pair(8, 16), _pair(16, 16)])
        self.up = nn.ModuleList([_pair(32, 16), _pair(24, 8)])
        self.leave = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        full = self.enter(x)
        half = self.down[0](F.avg_pool2d(full, 2))
        quarter = self.down[1](F.avg_pool2d(half, 2))
        half = self.up[0](torch.cat([_doubled(quarter), half], 1))
        return self.leave(self.up[1](torch.cat([_doubled(half), full], 1)))


def _pair(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (inputs, outputs):
        layers += [nn.Conv2d(width, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU()]
    return nn.Sequential(*layers)


def _doubled(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
