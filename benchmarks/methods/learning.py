"""How small networks are trained, and their outputs tempered."""

import copy
from collections.abc import Callable
from math import inf

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from methods.tasks import Task

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
        order = torch.randperm(len(x), device=x.device) if batch else slice(None)
        for part in order.split(batch) if batch else (order,):
            optimiser.zero_grad()
            loss(network(x[part]), y[part]).backward()
            optimiser.step()
    return network.eval()


def train(task: Task, seed: int, epochs: int, further: int = 0) -> list[nn.Module]:
    """Return the network where its validation loss was least, at the end, and after further epochs."""
    loss = F.cross_entropy if task.classes else F.mse_loss
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network, least = task.network(), inf
        optimiser = torch.optim.Adam(network.parameters(), 2e-3)
        for epoch in range(1, epochs + further + 1):
            descend(network, task.train, 1, optimiser, 64, loss)
            if epoch <= epochs:
                with torch.no_grad():
                    now = loss(network(task.held_out.x), task.held_out.y).item()
                if now < least:
                    least, early = now, copy.deepcopy(network)
            if epoch == epochs:
                found = [early, copy.deepcopy(network)]
    return [*found, network] if further else found


def best_temperature(f: Tensor, y: Tensor) -> float:
    """Return the temperature with the least NLL on a validation set."""
    grid = torch.logspace(-1, 1.5, 251).tolist()
    return min(grid, key=lambda t: F.cross_entropy(f / t, y).item())
