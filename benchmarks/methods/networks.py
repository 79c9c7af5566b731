"""Networks trained on digits, and on images of MNIST's, CIFAR's and ImageNet's shapes, with their data."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from methods.large_networks import resnet18, resnet50, vit_s

Batches = list[tuple[Tensor, Tensor]]


class Source(NamedTuple):
    """Where the images come from, and how many."""

    synthetic: bool = True
    """Images of the right shape, where a download is not wanted."""

    folder: Path = Path("data")
    """Where MNIST and CIFAR-10 are kept."""

    rows: int | None = None
    """N; None: each problem's own."""


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


def digits(source: Source) -> tuple[nn.Module, Tensor, Tensor]:
    from sklearn.datasets import load_digits

    x = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(load_digits().target)
    order = torch.randperm(len(x))[: source.rows or 1200]
    return convolutional([1, 12, 24], [96, 32, 10]), x[order], y[order]


def lenet(source: Source) -> tuple[nn.Module, Tensor, Tensor]:
    return convolutional([1, 6, 16], [784, 60, 10]), *_images("MNIST", (1, 28, 28), 1000, source)


def cifar(make: Callable[[], nn.Module], source: Source) -> tuple[nn.Module, Tensor, Tensor]:
    return make(), *_images("CIFAR10", (3, 32, 32), 200, source)


def photographs(make: Callable[[], nn.Module], source: Source) -> tuple[nn.Module, Tensor, Tensor]:
    """Pictures of ImageNet's shape, of the first ten of its classes."""
    if not source.synthetic:
        raise SystemExit("Photographs are not at hand: use --synthetic.")
    return make(), *_synthetic((3, 224, 224), source.rows or 8)


PROBLEMS = {
    "digits": digits,
    "lenet": lenet,
    "resnet20": partial(cifar, resnet20),
    "resnet18": partial(cifar, resnet18),
    "resnet50": partial(photographs, resnet50),
    "vit_s": partial(photographs, vit_s),
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
    name: str, source: Source = Source(), epochs: int | None = None
) -> tuple[nn.Module, Batches]:
    """Return a trained network and its data in batches of 100."""
    torch.manual_seed(0)
    model, x, y = PROBLEMS[name](source)
    recipe = RECIPES[name]
    optimiser = torch.optim.Adam(model.parameters(), recipe.rate, weight_decay=1e-4)
    for _ in range(epochs or recipe.epochs):
        for rows in torch.randperm(len(x)).split(50):
            optimiser.zero_grad()
            functional.cross_entropy(
                model(x[rows]), y[rows], label_smoothing=recipe.smoothing
            ).backward()
            optimiser.step()
    return model.eval(), list(zip(x.split(100), y.split(100)))


def _images(name: str, shape: tuple[int, ...], rows: int, source: Source) -> tuple[Tensor, Tensor]:
    rows = source.rows or rows
    return _synthetic(shape, rows) if source.synthetic else _real(name, shape, rows, source.folder)


def _synthetic(shape: tuple[int, ...], rows: int) -> tuple[Tensor, Tensor]:
    """Return noisy, shifted copies of one smooth picture per class."""
    pictures = functional.interpolate(torch.randn(10, shape[0], 5, 5), shape[1:], mode="bicubic")
    y = torch.randint(10, (rows,))
    shifts = torch.randint(-3, 4, (rows, 2)).tolist()
    x = torch.stack([pictures[c].roll(s, (1, 2)) for c, s in zip(y, shifts)])
    return x + 0.7 * torch.randn_like(x), y


def _real(name: str, shape: tuple[int, ...], rows: int, folder: Path) -> tuple[Tensor, Tensor]:
    import torchvision

    try:
        data = getattr(torchvision.datasets, name)(folder, train=True)
    except RuntimeError:
        raise SystemExit(
            f"No {name} in {folder}: put torchvision's files there, or use --synthetic."
        ) from None
    order = torch.randperm(len(data.data))[:rows]
    x = torch.as_tensor(data.data)[order].float().view(rows, *shape[1:], shape[0])
    return x.movedim(-1, 1) / 255 - 0.5, torch.as_tensor(data.targets)[order]
