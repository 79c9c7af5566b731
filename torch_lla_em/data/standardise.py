"""Inputs and targets of mean 0 and standard deviation 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Standardise(nn.Module):
    """Shift and scale inputs by the mean and standard deviation of the training data."""

    mean: Tensor
    width: Tensor

    def __init__(self, x: Tensor):
        super().__init__()
        self.register_buffer("mean", x.mean(0))
        self.register_buffer("width", width_of(x))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.width


def width_of(values: Tensor) -> Tensor:
    """Return the standard deviation of each column, 1 if it is constant, without overflow."""
    size = values.abs().amax(0)
    size = torch.where(size > 0, size, 1.0)
    width = (values / size).std(0, correction=0)
    return torch.where(width > 8 * torch.finfo(values.dtype).eps, size * width, 1.0)


def weighted_size(values: Tensor, weights: Tensor) -> float:
    """Return the root mean square of values (N, C), for a weight of each row, (N,)."""
    squares = values.square().mean(1).to(weights)
    return (weights @ squares / weights.sum()).sqrt().item()


def as_numbers(targets: Any) -> Any:
    """Return targets of a regression as they are; raise an error if they are strings."""
    values = np.asarray(targets)
    if values.dtype.kind in "US" or (values.dtype.kind == "O" and isinstance(values.flat[0], str)):
        raise ValueError(
            f"A regression needs numbers as targets, but y has strings such as {str(values.flat[0])!r}. Use "
            "LaplaceClassifier for labels, or convert y to numbers."
        )
    return targets
