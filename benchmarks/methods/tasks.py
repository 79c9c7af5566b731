"""Data sets that come with scikit-learn, their networks, and how these are trained."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from sklearn import datasets
from torch import Tensor, nn
from torch.nn import functional as F


class Rows(NamedTuple):
    """Inputs and targets."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Task:
    """One data set, split, with inputs that are unlike it."""

    name: str
    regression: bool
    train: Rows
    val: Rows
    test: Rows
    shifted: dict[str, Tensor]
    network: Callable[[float], nn.Module]
    """Dropout rate -> an untrained network."""

    epochs: int
    grid: Tensor | None = None
    """Where pictures are drawn."""

    weight_decay: float = 1e-4

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        return F.mse_loss(f, y) if self.regression else F.cross_entropy(f, y)


class Loader:
    """Batches of rows; counts the passes over them."""

    def __init__(self, rows: Rows, batch_size: int = 64, generator: torch.Generator | None = None):
        self.rows, self.batch_size, self.generator = rows, batch_size, generator
        self.dataset = torch.utils.data.TensorDataset(*rows)
        self.passes = 0

    def __len__(self) -> int:
        return -(-len(self.rows.x) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.passes += 1
        order = torch.arange(len(self.rows.x))
        if self.generator is not None:
            order = torch.randperm(len(order), generator=self.generator)
        for index in order.split(self.batch_size):
            yield self.rows.x[index], self.rows.y[index]


class SharedDropout(nn.Module):
    """Dropout whose mask, when predicting with ``index`` set, is one for all inputs.

    So that draws are functions, and joint predictions mean something.
    """

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate
        self.index: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return F.dropout(x, self.rate)
        if self.index is None or self.rate == 0:
            return x
        generator = torch.Generator().manual_seed(self.index)
        kept = torch.rand(x.shape[1:], generator=generator) >= self.rate
        return x * kept / (1 - self.rate)


def perceptron(sizes: list[int], activation: type[nn.Module]) -> Callable[[float], nn.Module]:
    """Return the maker of a network with a ``body`` and a linear ``head``."""

    def make(dropout: float = 0.0) -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        for i in range(len(sizes) - 2):
            layers += [nn.Linear(sizes[i], sizes[i + 1]), activation()]
            layers += [SharedDropout(dropout)] if dropout else []
        return _headed(layers, nn.Linear(sizes[-2], sizes[-1]))

    return make


def convolutional(dropout: float = 0.0) -> nn.Module:
    """Return a small convolutional network for images of 8 × 8 pixels and eight classes."""
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    layers += [SharedDropout(dropout)] if dropout else []
    layers += [nn.Linear(64, 24), nn.ReLU()]
    layers += [SharedDropout(dropout)] if dropout else []
    return _headed(layers, nn.Linear(24, 8))


def train(task: Task, network: nn.Module, loader: Loader, epochs: int) -> nn.Module:
    """Train with Adam and a small weight decay; return the network in eval mode."""
    optimiser = torch.optim.Adam(network.parameters(), 2e-3, weight_decay=task.weight_decay)
    network.train()
    for _ in range(epochs):
        for x, y in loader:
            optimiser.zero_grad()
            task.loss(network(x), y).backward()
            optimiser.step()
    return network.eval()


def make_task(name: str, seed: int) -> Task:
    """Return a task; the seed splits the data."""
    return TASKS[name](name, torch.Generator().manual_seed(seed))


def digits(name: str, generator: torch.Generator) -> Task:
    """Digits 0 to 7 of 8 × 8 pixels; 8 and 9 are never seen in training."""
    data = datasets.load_digits()
    x = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(data.target)
    unseen = x[y >= 8]
    splits = _split(Rows(x[y < 8], y[y < 8]), (700, 250), generator)
    test = splits[-1].x
    pixels = torch.rand(test.shape, generator=generator).flatten(1).argsort(1)
    shifted = {
        "rotated": test.rot90(1, (2, 3)),
        "shuffled": test.flatten(1).gather(1, pixels).view_as(test),
        "noise": torch.rand(test.shape, generator=generator),
        "unseen": unseen,
    }
    network = perceptron([64, 32, 24, 8], nn.ReLU) if name == "digits" else convolutional
    return Task(name, False, *splits, shifted, network, epochs=60)


def cancer(name: str, generator: torch.Generator) -> Task:
    """Breast cancer, 30 measurements, two classes."""
    x, y = datasets.load_breast_cancer(return_X_y=True)
    splits = _split(Rows(_standardised(x), torch.tensor(y)), (300, 100), generator)
    network = perceptron([30, 32, 24, 2], nn.ReLU)
    return Task(name, False, *splits, _shifted_columns(splits[-1].x, generator), network, 60)


def moons(name: str, generator: torch.Generator) -> Task:
    """Two half moons in the plane; far from them, a network should not be sure."""
    seed = int(torch.randint(10**6, (), generator=generator))
    x, y = datasets.make_moons(900, noise=0.15, random_state=seed)
    rows = Rows(torch.tensor(x, dtype=torch.float32), torch.tensor(y))
    splits = _split(rows, (200, 200), generator)
    far = torch.randn(500, 2, generator=generator)
    far = torch.tensor([0.5, 0.25]) + 6 * far / far.norm(dim=1, keepdim=True)
    axis = torch.linspace(-5, 5, 41)
    grid = torch.cartesian_prod(axis + 0.5, axis + 0.25)
    network = perceptron([2, 32, 32, 2], nn.ReLU)
    return Task(name, False, *splits, {"far": far}, network, 200, grid)


def diabetes(name: str, generator: torch.Generator) -> Task:
    """Progression of diabetes from ten measurements, 442 patients."""
    x, y = datasets.load_diabetes(return_X_y=True)
    rows = Rows(_standardised(x), _standardised(y[:, None]))
    splits = _split(rows, (270, 70), generator)
    network = perceptron([10, 32, 1], nn.Tanh)
    shifted = _shifted_columns(splits[-1].x, generator)
    return Task(name, True, *splits, shifted, network, 60, weight_decay=1e-3)


def gap(name: str, generator: torch.Generator) -> Task:
    """A noisy sine on two intervals, with nothing between them."""
    side = torch.rand(180, 1, generator=generator) < 0.5
    x = torch.rand(180, 1, generator=generator) * 1.4 + 0.6
    x = torch.where(side, -x, x)
    y = torch.sin(2.5 * x) + 0.5 * x + 0.15 * torch.randn(180, 1, generator=generator)
    splits = _split(Rows(x, y), (80, 40), generator)
    between = torch.rand(200, 1, generator=generator) * 0.8 - 0.4
    grid = torch.linspace(-3.5, 3.5, 141)[:, None]
    network = perceptron([1, 24, 24, 1], nn.Tanh)
    return Task(name, True, *splits, {"gap": between}, network, 800, grid)


TASKS = {
    "digits": digits,
    "digits-conv": digits,
    "cancer": cancer,
    "moons": moons,
    "diabetes": diabetes,
    "gap": gap,
}


def _split(rows: Rows, sizes: tuple[int, int], generator: torch.Generator) -> list[Rows]:
    order = torch.randperm(len(rows.x), generator=generator)
    ends = (sizes[0], sizes[0] + sizes[1])
    return [Rows(rows.x[index], rows.y[index]) for index in order.tensor_split(ends)]


def _standardised(values) -> Tensor:
    values = torch.tensor(values)
    return ((values - values.mean(0)) / values.std(0)).float()


def _shifted_columns(x: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    order = torch.rand(x.shape, generator=generator).argsort(0)
    noise = 2 * torch.randn(x.shape, generator=generator)
    return {"shuffled": x.gather(0, order), "noise": noise}


def _headed(layers: list[nn.Module], head: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(body=nn.Sequential(*layers), head=head))
