"""How small networks are trained, and their outputs tempered."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Loss = Callable[[Tensor, Tensor], Tensor]


def descend(
    network: nn.Module,
    rows: tuple[Tensor, Tensor],
    epochs: int,
    optimiser: torch.optim.Optimizer,
    batch: int | None = None,
    loss: Loss = F.cross_entropy,
) -> nn.Module:
    """Train a network on (x, y) in shuffled batches, or on all rows at once; return it in eval mode."""
    x, y = rows
    network.train()
    for _ in range(epochs):
        for part in (slice(None),) if batch is None else torch.randperm(len(x)).split(batch):
            optimiser.zero_grad()
            loss(network(x[part]), y[part]).backward()
            optimiser.step()
    return network.eval()


def best_temperature(f: Tensor, y: Tensor) -> float:
    """Return the temperature that held-out rows like best."""
    return min(
        torch.logspace(-1, 1.5, 251).tolist(), key=lambda t: F.cross_entropy(f / t, y).item()
    )
