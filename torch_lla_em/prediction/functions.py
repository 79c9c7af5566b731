"""More functions out of K samples: with their own covariance, and a mean that is exact."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

FUNCTIONS = 256
"""How many functions an average is taken over, at least."""

# outputs of one row beyond which K samples and their mirror images have to do
_LARGE_ROW = 2**10


def functions_of(deviations: Tensor) -> Tensor:
    """Return S ≥ 2 K zero-mean functions, shape (S, B, ...), of deviations (K, B, ...).

    Samples, and random rotations among them, each with its mirror image. All sets have the
    samples' covariance Σ_k d_k d_kᵀ / K, and all together the mean 0, so that what is left of
    the error of averages is mostly that of the covariance. What is drawn depends on K and on
    nothing else.
    """
    sets = _sets(deviations)
    if sets > 1:
        Q = _rotations(len(deviations), sets - 1)
        turned = torch.tensordot(Q.to(deviations), deviations, dims=1)
        deviations = torch.cat([deviations, turned])
    return torch.cat([deviations, -deviations])


def number_of_functions(deviations: Tensor) -> int:
    """Return S without drawing them."""
    return 2 * len(deviations) * _sets(deviations)


def _sets(deviations: Tensor) -> int:
    count, row = len(deviations), deviations[0, :1].numel()
    return -(-FUNCTIONS // (2 * count)) if count > 1 and row <= _LARGE_ROW else 1


@lru_cache(maxsize=8)
def _rotations(count: int, sets: int) -> Tensor:
    """Return random orthogonal matrices, stacked to (sets × K, K)."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(sets, count, count, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(normal).Q.flatten(0, 1)
