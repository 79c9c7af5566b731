"""Networks trained on digits, and on made-up images of MNIST's, CIFAR's and ImageNet's shapes."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional

from methods.learning import descend

Batches = list[tuple[Tensor, Tensor]]


class Recipe(NamedTuple):
    """How a network is trained."""

    epochs: int
    rate: float = 2e-3
    smoothing: float = 0.0
    """Of the labels, for networks that learn their few images by heart."""


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
        x = functional.pad(x[..., :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra))
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


def lenet(channels: tuple[int, int], widths: tuple[int, ...]) -> nn.Module:
    """Return two convolutions with pooling, then layers of these widths, for images of 28 x 28."""
    first, second = channels
    layers = [nn.Conv2d(1, first, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(first, second, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    for inputs, outputs in zip((25 * second, *widths), widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10))


def convolutional(channels: list[int], sizes: list[int]) -> nn.Module:
    """Return convolutions with pooling between these channels, then layers of these sizes."""
    layers, width = [], channels[0]
    for outputs in channels[1:]:
        layers += [nn.Conv2d(width, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        width = outputs
    layers.append(nn.Flatten())
    for inputs, outputs in zip(sizes, sizes[1:]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def digits(rows: int | None) -> tuple[nn.Module, Tensor, Tensor]:
    from sklearn.datasets import load_digits

    x = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(load_digits().target)
    order = torch.randperm(len(x))[: rows or 1200]
    return convolutional([1, 12, 24], [96, 32, 10]), x[order], y[order]


def pictured(
    make: Callable[[], nn.Module], shape: tuple[int, ...], usual: int, rows: int | None
) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network, and noisy, shifted copies of one smooth picture per class."""
    network, rows = make(), rows or usual
    pictures = functional.interpolate(torch.randn(10, shape[0], 5, 5), shape[1:], mode="bicubic")
    y = torch.randint(10, (rows,))
    shifts = torch.randint(-3, 4, (rows, 2)).tolist()
    x = torch.stack([pictures[c].roll(s, (1, 2)) for c, s in zip(y, shifts)])
    return network, x + 0.7 * torch.randn_like(x), y


MNIST, CIFAR, PHOTOGRAPH = (1, 28, 28), (3, 32, 32), (3, 224, 224)
PROBLEMS = {
    "digits": digits,
    "lenet": partial(pictured, partial(convolutional, [1, 6, 16], [784, 60, 10]), MNIST, 1000),
    "resnet20": partial(pictured, resnet20, CIFAR, 200),
    "resnet18": partial(pictured, resnet18, CIFAR, 200),
    "resnet50": partial(pictured, resnet50, PHOTOGRAPH, 8),
    "vit_s": partial(pictured, vit_s, PHOTOGRAPH, 8),
}
RECIPES = {
    "digits": Recipe(40),
    "lenet": Recipe(40),
    "resnet20": Recipe(8),
    "resnet18": Recipe(20),
    "resnet50": Recipe(20, smoothing=0.1),
    "vit_s": Recipe(40, 5e-4, smoothing=0.1),
}


def trained(
    name: str, rows: int | None = None, epochs: int | None = None
) -> tuple[nn.Module, Batches]:
    """Return a trained network and its data in batches of 100."""
    torch.manual_seed(0)
    model, x, y = PROBLEMS[name](rows)
    recipe = RECIPES[name]
    optimiser = torch.optim.Adam(model.parameters(), recipe.rate, weight_decay=1e-4)
    loss = partial(functional.cross_entropy, label_smoothing=recipe.smoothing)
    descend(model, (x, y), epochs or recipe.epochs, optimiser, 50, loss)
    return model, list(zip(x.split(100), y.split(100)))
