"""Block Lanczos: the eigenvalues of a product over the growing Krylov space of a block of vectors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torch_lla_em.solvers.solution import Operator, symmetric
from torch_lla_em.solvers.space import add_combined, gram, orthonormalise, overlap

_ROUNDING = 30
"""Rounding of a product, in units of eps ‖A‖."""


def block_lanczos(product: Operator, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the eigenvalues of A, (r,), and rows (K, P) in the eigenvectors, (K, r), after each product.

    Both are those over the Krylov space so far, in float64. It ends when the space is complete, and
    holds two blocks of K vectors at a time.
    """
    size = 0.0
    block, start = orthonormalise(rows)
    T, before, coupling = start.new_zeros(0, 0), block[:0], start.new_zeros(0, len(block))
    while len(block):
        image = product(block)
        diagonal = gram(block, image)
        size = max(size, diagonal.abs().max().item())
        allowed = product.allowed_asymmetry * size
        T = torch.block_diag(T, symmetric(diagonal, allowed, -allowed))
        end = len(T) - len(block)
        T[end - len(before) : end, end:] = coupling
        T[end:, end - len(before) : end] = coupling.T
        for earlier in (block, before, block, before):
            add_combined(image, overlap(image, earlier), earlier, -1)
        values, vectors = torch.linalg.eigh(T)
        yield values.clamp_min(0), start @ vectors[: start.shape[1]]
        # directions that are as short as the rounding of a product are dropped
        floor = _ROUNDING * torch.finfo(image.dtype).eps * size
        before, (block, coupling) = block, orthonormalise(image, floor)
