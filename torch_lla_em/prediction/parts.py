"""The parts of a prediction: a table of weights, means and scales, as fitted or calibrated.

A row is a part of the mixture: its weight, how much of J w_lin and how much of f it is around, and
the scale τ of the posterior's variance. The first has the samples' deviations, the others none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood, Regression
from torch_lla_em.prediction.prediction import Prediction

WEIGHT, MODE, NETWORK, SCALE = range(4)
"""The columns."""


def posterior_alone(
    mean: str = "network", factor: float | Tensor = 1.0, scale: float | Tensor = 1.0
) -> Tensor:
    """Return the table of √τ J w_k around one mean times a factor."""
    row = torch.zeros(1, 4, dtype=torch.float64, device="cpu")
    row[0, WEIGHT], row[0, SCALE] = 1.0, float(scale)
    row[0, MODE if mean == "linear" else NETWORK] = float(factor)
    return row


def mean_of(table: Tensor) -> str:
    """Return what the posterior's functions are mostly around."""
    return "linear" if table[0, MODE].abs() > table[0, NETWORK].abs() else "network"


def is_around(table: Tensor, mean: str) -> bool:
    """Return whether all parts are around the network, or the linear mode, alone."""
    return not table[:, NETWORK if mean == "linear" else MODE].any()


def predicted(
    likelihood: Likelihood, f: Tensor, Jw: Tensor, table: Tensor, class_dim: int = -1
) -> Prediction:
    """Return the prediction out of f, (B, ..., C), and J w of w_lin and the samples."""
    table = table.to(f)
    columns = table.view(*table.shape, *(1,) * f.dim()).unbind(1)
    centres = columns[MODE] * Jw[0] + columns[NETWORK] * f
    deviations = table[0, SCALE].sqrt() * Jw[1:]
    if len(table) == 1:
        return Prediction(likelihood, centres[0], deviations, class_dim)
    weights = table[:, WEIGHT]
    return Prediction(likelihood, centres[0], deviations, class_dim, centres[1:], weights)


class Pushed(NamedTuple):
    """Examples pushed through the linear model, with their targets; classes last."""

    likelihood: Likelihood
    f: Tensor
    """The network's outputs, (B, ..., C)."""

    Jw: Tensor
    """J w of w_lin and the samples, (1 + K, B, ..., C)."""

    y: Tensor

    def prediction(self, table: Tensor, noise: Tensor | None = None) -> Prediction:
        """Return the prediction of the examples, of a regression with σ times ``noise``."""
        likelihood = self.likelihood
        if noise is not None and isinstance(likelihood, Regression):
            likelihood = likelihood.at_noise(likelihood.sigma_noise.to(noise) * noise)
        return predicted(likelihood, self.f, self.Jw, table)

    def double(self) -> Pushed:
        """Return the examples in double precision."""
        return self._replace(f=self.f.double(), Jw=self.Jw.double())

    def part(self, examples: slice | Tensor) -> Pushed:
        """Return some of the examples."""
        return Pushed(self.likelihood, self.f[examples], self.Jw[:, examples], self.y[examples])

    def split(self, size: int) -> Iterator[Pushed]:
        """Yield ``size`` examples at a time."""
        for start in range(0, len(self.f), size):
            yield self.part(slice(start, start + size))


def joined(parts: Iterable[Pushed]) -> Pushed:
    """Return the examples of several batches, one after the other."""
    likelihoods, f, Jw, y = zip(*parts)
    return Pushed(likelihoods[0], torch.cat(f), torch.cat(Jw, 1), torch.cat(y))
