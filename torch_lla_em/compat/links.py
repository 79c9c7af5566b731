"""Link approximations: class probabilities from a Gaussian over logits, and their losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

LINKS = "probit", "mc", "bridge", "bridge_norm"


def probabilities(link: str, mean: Tensor, covariance: Tensor, draws: Tensor) -> Tensor:
    """Return E[softmax(f)], (B, C), for f ~ N(mean, covariance), by samples or an approximation.

    The Laplace bridge matches a Dirichlet distribution to the Gaussian over logits that sum to 0.
    """
    if link == "mc":
        return draws.softmax(-1).mean(0)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    if link == "probit":
        return (mean / (1 + math.pi / 8 * variance).sqrt()).softmax(-1)
    C = mean.shape[-1]
    with_all, total = covariance.sum(-1), covariance.sum((-2, -1))[..., None]
    mean = mean - with_all * mean.sum(-1, keepdim=True) / total
    variance = variance - with_all.square() / total
    if link == "bridge_norm":
        size = variance.mean(-1, keepdim=True) / math.sqrt(C / 2)
        mean, variance = mean / size.sqrt(), variance / size
    alpha = (1 - 2 / C + mean.exp() / C**2 * (-mean).exp().sum(-1, keepdim=True)) / variance
    return alpha / alpha.sum(-1, keepdim=True)


class RunningLoss:
    """The mean negative log-likelihood of batches, or a loss or metric of the user."""

    def __init__(self, loss: Callable[..., Any] | None, noise: Tensor):
        self._loss, self._noise = loss, noise
        self._seen: list[tuple[Tensor, ...]] = []

    def add(self, outputs: tuple[Tensor, ...], targets: Tensor) -> None:
        """Add the outputs of a batch: probabilities, or mean and covariance of a regression."""
        self._seen.append((*outputs, targets))

    def value(self) -> float:
        """Return the loss of all batches."""
        *outputs, targets = (torch.cat(parts) for parts in zip(*self._seen))
        if self._loss is not None:
            if hasattr(self._loss, "update"):  # a metric of torchmetrics
                outputs = outputs[:1]
            return float(self._loss(*outputs, targets))
        if len(outputs) == 1:
            return float(functional.nll_loss(outputs[0].log(), targets.long()))
        mean, covariance = outputs
        variance = covariance.diagonal(dim1=1, dim2=2) + self._noise.square()
        return float(functional.gaussian_nll_loss(mean, targets.view_as(mean), variance))


def lowest(loss: Callable[[int], float], size: int) -> int:
    """Return where the loss is lowest among ``size`` values: every tenth is tried, then those around it."""
    step = max(1, size // 10)
    found: dict[int, float] = {i: loss(i) for i in {*range(0, size, step), size - 1}}
    while True:
        best: int = min(found, key=lambda i: found[i])
        if step == 1:
            return best
        step = max(1, step // 3)
        for i in (best - step, best + step):
            if 0 <= i < size and i not in found:
                found[i] = loss(i)
