"""The four covariance structures as blocks on a diagonal, so that one algebra serves them all.

A covariance is block-diagonal, with blocks of size d that columns or components may share:

    structure    blocks, shape   d   shared by
    full         (K, 1, D, D)    D
    tied         (1, 1, D, D)    D   all components
    diagonal     (K, D, 1, 1)    1
    spherical    (K, 1, 1, 1)    1   all columns
"""

from typing import Literal, get_args

import torch
from torch import Tensor

Structure = Literal["full", "tied", "diagonal", "spherical"]
STRUCTURES = get_args(Structure)


class Blocks:
    """The block structure of K covariances in D dimensions."""

    def __init__(self, structure: Structure, num_components: int, dim: int):
        self.structure, self.num_components, self.dim = structure, num_components, dim
        self.dense, self.tied = structure in ("full", "tied"), structure == "tied"
        self.size = dim if self.dense else 1
        self.copies = dim if structure == "spherical" else 1
        components, blocks = 1 if self.tied else num_components, dim // self.size // self.copies
        self.shape = (components, blocks, self.size, self.size)
        self.user_shape: tuple[int, ...] = {
            "full": (components, dim, dim),
            "tied": (dim, dim),
            "diagonal": (components, dim),
            "spherical": (components,),
        }[structure]

    def quadratic(self, blocks: Tensor, x: Tensor) -> Tensor:
        """Return xᵀ A_k x for columns x (D, n), shape (K or 1, n)."""
        if self.dense:
            products = (blocks.reshape(-1, self.dim) @ x).view(len(blocks), self.dim, -1)
            return products.mul_(x).sum(1)
        return blocks.reshape(len(blocks), -1) @ self._squares(x)

    def second_moments(self, r: Tensor, x: Tensor) -> Tensor:
        """Return the blocks of Σ_n r_kn x_n x_nᵀ, for r (K, n) that sums to 1 over k."""
        if self.tied:
            return (x @ x.T).view(self.shape)
        if self.dense:
            return ((r[:, None] * x).reshape(-1, x.shape[1]) @ x.T).view(self.shape)
        return (r @ self._squares(x).T).view(self.shape)

    def _squares(self, x: Tensor) -> Tensor:
        return x.square().sum(0, keepdim=True) if self.copies > 1 else x.square()

    def moments(self, sums: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Return counts (K,), means (K, D), and scatter about the means, in blocks.

        Components without data get mean 0.
        """
        counts, first, second = sums
        means = torch.where(counts[:, None] > 0, first / counts[:, None], 0.0)
        return counts, means, (second + second.mT) / 2 - self.outer(means, counts)

    def apply(self, blocks: Tensor, v: Tensor) -> Tensor:
        """Return the product of each matrix with its row of v, shape (K, D)."""
        return (blocks @ self._cut(v)[..., None]).reshape(v.shape)

    def outer(self, v: Tensor, weights: Tensor) -> Tensor:
        """Return the blocks of Σ w_k v_k v_kᵀ, summed over whatever shares a block."""
        v = self._cut(v)
        product = weights[:, None, None, None] * v[..., :, None] * v[..., None, :]
        if self.tied:
            return product.sum(0, keepdim=True)
        return product.sum(1, keepdim=True) if self.copies > 1 else product

    def _cut(self, v: Tensor) -> Tensor:
        return v.reshape(len(v), -1, self.size)

    def degrees(self, counts: Tensor) -> Tensor:
        """Return how many vectors of a block's size were summed into it, (K or 1,)."""
        return self.copies * (counts.sum(0, keepdim=True) if self.tied else counts)

    def over_columns(self, per_block: Tensor) -> Tensor:
        """Return the sum over the blocks of each whole D × D matrix, shape (K,)."""
        return (self.copies * per_block.sum(1)).expand(self.num_components)

    def rescale(self, blocks: Tensor, scale: Tensor) -> Tensor:
        """Return S A S, for the scale S of each column, shape (D,)."""
        scale = (scale[:1] if self.copies > 1 else scale).reshape(1, -1, self.size)
        return blocks * scale[..., :, None] * scale[..., None, :]

    def of_matrix(self, matrix: Tensor) -> Tensor:
        """Return the blocks of this shape that are nearest to one D × D matrix."""
        if not self.dense:
            matrix = matrix.diagonal()
            matrix = matrix.mean(0, keepdim=True) if self.copies > 1 else matrix
        return matrix.reshape(1, *self.shape[1:]).expand(self.shape)


def log_dets(blocks: Tensor) -> Tensor:
    """Return log|A| of each block, shape (K or 1, number of blocks)."""
    return 2 * torch.linalg.cholesky(blocks).diagonal(dim1=-2, dim2=-1).log().sum(-1)


def inverse(blocks: Tensor) -> Tensor:
    """Return the inverse of positive definite blocks."""
    return torch.cholesky_inverse(torch.linalg.cholesky(blocks))


def with_floor(blocks: Tensor, least: float) -> Tensor:
    """Raise eigenvalues below ``least`` to it.

    Of all covariances whose eigenvalues are at least that, the result has the greatest
    likelihood, so the bound does not fall where a component collapses.
    """
    if blocks.shape[-1] == 1:
        return blocks.clamp(min=least)
    identity = torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device)
    if not torch.linalg.cholesky_ex(blocks - least * identity).info.any():
        return blocks
    values, vectors = torch.linalg.eigh(blocks)
    raised = (vectors * values.clamp(min=least)[..., None, :]) @ vectors.mT
    return torch.where(values[..., :1, None] < least, raised, blocks)
