"""Where H is taken: at the network's outputs, or at what the linear model says there."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_lla_em.data import Batch
from torch_lla_em.likelihoods import Likelihood

# of J w at the points: 256 MB in float32
_OUTPUTS_KEPT = 1 << 26


class Curvature:
    """H at the network's outputs, or its mean over J w at points w.

    Of several points H is the mean, as its expectation under samples is.
    """

    def __init__(self, points: Tensor | None = None):
        self.points = points
        """(M, P), beside the network, which takes them again with every batch; or None."""

        self._known: dict[tuple[int, int], Tensor] = {}

    def columns(self, batch: Batch) -> int:
        """Return how many columns a product at this batch needs for H."""
        return 0 if self.points is None or batch.place in self._known else len(self.points)

    def outputs(self, batch: Batch) -> Tensor | None:
        """Return J w at the points, (M, B, ..., C), where it is known."""
        return self._known.get(batch.place)

    def know(self, batch: Batch, outputs: Tensor) -> None:
        """Keep J w at the points, (M, B, ..., C), for batches that come again."""
        if sum(map(torch.numel, self._known.values())) + outputs.numel() <= _OUTPUTS_KEPT:
            self._known[batch.place] = outputs.clone()


def hessian_product(likelihood: Likelihood, at: Tensor, u: Tensor) -> Tensor:
    """Return H u, the mean of H at (M, B, ..., C), for u (K, B, ..., C)."""
    total = likelihood.hessian_product(at[0], u)
    for f in at[1:]:
        total = total + likelihood.hessian_product(f, u)
    return total / len(at) if len(at) > 1 else total


def hessian_sqrt_product(likelihood: Likelihood, at: Tensor, noise: Tensor) -> Tensor:
    """Return S ε with E[S ε εᵀ Sᵀ] the mean of H at (M, B, ..., C), for noise (K, M, B, ..., C)."""
    total = likelihood.hessian_sqrt_product(at[0], noise[:, 0])
    for m in range(1, len(at)):
        total = total + likelihood.hessian_sqrt_product(at[m], noise[:, m])
    return total / len(at) ** 0.5 if len(at) > 1 else total
