"""k-means with the k-means++ start, from which EM begins."""

import torch
from torch import Tensor


def kmeans(x: Tensor, num_clusters: int, generator: torch.Generator, max_steps: int = 20) -> Tensor:
    """Return the cluster of each row of x (n, D), shape (n,), by Lloyd's iteration."""
    centres = plus_plus(x, num_clusters, generator)
    nearest = torch.cdist(x, centres).argmin(1)
    for _ in range(max_steps):
        members = torch.nn.functional.one_hot(nearest, num_clusters).to(x)
        sizes = members.sum(0)[:, None]
        centres = torch.where(sizes > 0, members.T @ x / sizes.clamp(min=1), centres)
        before, nearest = nearest, torch.cdist(x, centres).argmin(1)
        if torch.equal(before, nearest):
            break
    return nearest


def plus_plus(x: Tensor, num_clusters: int, generator: torch.Generator) -> Tensor:
    """Return rows of x as centres, each drawn in proportion to its squared distance to the others."""
    first = torch.randint(len(x), (1,), generator=generator, device=generator.device)
    centres = x[first.to(x.device)]
    distance = (x - centres).square().sum(1)
    for _ in range(num_clusters - 1):
        # if every row is a centre already, all are drawn with equal probability
        odds = distance if distance.sum() > 0 else torch.ones_like(distance)
        drawn = torch.multinomial(odds.to(generator.device), 1, generator=generator)
        centre = x[drawn.to(x.device)]
        centres = torch.cat([centres, centre])
        distance = torch.minimum(distance, (x - centre).square().sum(1))
    return centres
