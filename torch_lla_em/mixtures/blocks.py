"""Covariance structures, all as blocks on a diagonal, and the features of a Gaussian.

A covariance is block-diagonal, with blocks of size d that columns or components share:

    structure    blocks, shape   d   shared by
    full         (K, 1, D, D)    D
    tied         (1, 1, D, D)    D   all components
    diagonal     (K, D, 1, 1)    1
    spherical    (K, 1, 1, 1)    1   all columns

One algebra then serves all four. With Λ the precision, log N(x | μ, Λ⁻¹) is linear in
the features φ(x) = [1, x, products of columns], so data enter only through φ.
"""

import torch
from torch import Tensor

STRUCTURES = ("full", "tied", "diagonal", "spherical")


def check_structure(structure: str) -> None:
    """Refuse what is not the name of a structure."""
    if structure not in STRUCTURES:
        raise ValueError(f"covariance must be one of {STRUCTURES}, not {structure!r}.")


class Blocks:
    """The block structure of K covariances in D dimensions."""

    def __init__(self, structure: str, num_components: int, dim: int):
        self.structure, self.num_components, self.dim = structure, num_components, dim
        self.dense = structure in ("full", "tied")
        self.size = dim if self.dense else 1
        self.copies = dim if structure == "spherical" else 1
        self.shape = (
            1 if structure == "tied" else num_components,
            dim if structure == "diagonal" else 1,
            self.size,
            self.size,
        )

    @property
    def num_features(self) -> int:
        """P, the length of φ."""
        products = {"diagonal": self.dim, "spherical": 1}
        return 1 + self.dim + products.get(self.structure, self.dim * (self.dim + 1) // 2)

    def features(self, x: Tensor) -> Tensor:
        """Return φ(x), shape (P, n), of columns x (D, n)."""
        phi = x.new_empty(self.num_features, x.shape[1])
        phi[0] = 1
        phi[1 : self.dim + 1] = x
        products = phi[self.dim + 1 :]
        if self.structure == "diagonal":
            torch.mul(x, x, out=products)
        elif self.structure == "spherical":
            products[0] = torch.linalg.vecdot(x, x, dim=0)
        else:
            first = 0
            for column in range(self.dim):
                last = first + self.dim - column
                torch.mul(x[column:], x[column], out=products[first:last])
                first = last
        return phi

    def natural(self, log_weights: Tensor, means: Tensor, precision: Tensor) -> Tensor:
        """Return θ, shape (K, P): φ(x)ᵀ θ_k = log w_k − ½ (x − μ_k)ᵀ Λ_k (x − μ_k)."""
        linear = self.apply(precision, means)
        constant = log_weights - 0.5 * (linear * means).sum(1)
        products = -0.5 * precision
        if self.dense:
            row, column = self.upper(precision.device)
            products = products[:, 0, row, column] * torch.where(row == column, 1.0, 2.0)
        products = products.reshape(self.shape[0], -1).expand(self.num_components, -1)
        return torch.cat([constant[:, None], linear, products], 1)

    def moments(self, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return counts (K,), means (K, D) and scatter about the means, in blocks.

        ``sums`` are Σ_n r_nk φ(x_n), shape (K, P). Components without data get mean 0.
        """
        counts, first, second = sums[:, 0], sums[:, 1 : self.dim + 1], sums[:, self.dim + 1 :]
        means = torch.where(counts[:, None] > 0, first / counts[:, None], 0.0)
        if self.dense:
            row, column = self.upper(sums.device)
            square = sums.new_empty(self.num_components, 1, self.dim, self.dim)
            square[:, 0, row, column] = square[:, 0, column, row] = second
            second = square.sum(0, keepdim=True) if self.structure == "tied" else square
        scatter = second.reshape(self.shape) - self.outer(means, counts)
        return counts, means, scatter

    def upper(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the rows and columns of the products in φ, of dense blocks."""
        row, column = torch.triu_indices(self.dim, self.dim, device=device)
        return row, column

    def symmetric(self, products: Tensor) -> Tensor:
        """Return the matrix A (D, D) with xᵀ A x = products · (products of columns of x)."""
        row, column = self.upper(products.device)
        matrix = products.new_empty(self.dim, self.dim)
        halves = products * torch.where(row == column, 1.0, 0.5)
        matrix[row, column] = matrix[column, row] = halves
        return matrix

    def apply(self, blocks: Tensor, v: Tensor) -> Tensor:
        """Return the product of each matrix with its row of v, shape (K, D)."""
        return (blocks @ self._split(v)[..., None]).reshape(v.shape)

    def outer(self, v: Tensor, weights: Tensor) -> Tensor:
        """Return the blocks of Σ w_k v_k v_kᵀ, summed over whatever shares a block."""
        v = self._split(v)
        product = weights[:, None, None, None] * v[..., :, None] * v[..., None, :]
        if self.structure == "tied":
            return product.sum(0, keepdim=True)
        return product.sum(1, keepdim=True) if self.structure == "spherical" else product

    def _split(self, v: Tensor) -> Tensor:
        return v.reshape(len(v), -1, self.size)

    def degrees(self, counts: Tensor) -> Tensor:
        """Return how many vectors of a block's size were summed into it, (K or 1, 1)."""
        counts = counts.sum(0, keepdim=True) if self.structure == "tied" else counts
        return (counts * self.copies)[:, None]

    def log_dets(self, blocks: Tensor) -> Tensor:
        """Return log|A| of each block, shape (K or 1, number of blocks)."""
        diagonal = torch.linalg.cholesky(blocks).diagonal(dim1=-2, dim2=-1)
        return 2 * diagonal.log().sum(-1)

    def spread(self, per_block: Tensor) -> Tensor:
        """Return the sum over the blocks of each whole D × D matrix, shape (K,)."""
        return (self.copies * per_block.sum(1)).expand(self.num_components)

    def inverse(self, blocks: Tensor) -> Tensor:
        """Return the inverse of positive definite blocks."""
        return torch.cholesky_inverse(torch.linalg.cholesky(blocks))

    def floor(self, blocks: Tensor, least: float) -> Tensor:
        """Raise eigenvalues below ``least`` to it.

        Of all covariances whose eigenvalues are at least that, this one has the greatest
        likelihood, so EM keeps its promise of ascent where a component collapses.
        """
        if self.size == 1:
            return blocks.clamp(min=least)
        identity = torch.eye(self.size, dtype=blocks.dtype, device=blocks.device)
        if not torch.linalg.cholesky_ex(blocks - least * identity).info.any():
            return blocks
        values, vectors = torch.linalg.eigh(blocks)
        raised = (vectors * values.clamp(min=least)[..., None, :]) @ vectors.mT
        low = values[..., :1, None] < least
        return torch.where(low, raised, blocks)

    def pack(self, covariances: Tensor) -> Tensor:
        """Return the blocks of covariances in the user's shape."""
        return covariances.reshape(self.shape)

    def unpack(self, blocks: Tensor) -> Tensor:
        """Return (K, D, D), (D, D), (K, D) or (K,): full, tied, diagonal, spherical."""
        return blocks.reshape(self.user_shape)

    @property
    def user_shape(self) -> tuple[int, ...]:
        """The shape in which a user sees the covariances."""
        components, blocks, size, _ = self.shape
        return {
            "full": (components, size, size),
            "tied": (size, size),
            "diagonal": (components, blocks),
            "spherical": (components,),
        }[self.structure]

    def rescale(self, blocks: Tensor, scale: Tensor) -> Tensor:
        """Return S A S, for the scale S of each column, shape (D,)."""
        scale = scale[:1] if self.structure == "spherical" else scale
        scale = scale.reshape(1, -1, self.size)
        return blocks * scale[..., :, None] * scale[..., None, :]

    def from_matrix(self, matrix: Tensor) -> Tensor:
        """Return the nearest structured blocks, (1, ...), of one D × D matrix."""
        if self.dense:
            return matrix.reshape(1, 1, self.dim, self.dim)
        diagonal = matrix.diagonal()
        diagonal = diagonal.mean(0, keepdim=True) if self.copies > 1 else diagonal
        return diagonal.reshape(1, -1, 1, 1)

    def check_positive(self, covariances: Tensor, name: str) -> None:
        """Refuse covariances in the user's shape that have no Cholesky root."""
        if torch.linalg.cholesky_ex(self.pack(covariances)).info.any():
            raise ValueError(f"The {name} must be positive definite.")

    def mixture_moments(
        self, weights: Tensor, means: Tensor, covariances: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return mean and variance of each column of a mixture in the user's shapes."""
        weights, means, covariances = weights.double(), means.double(), covariances.double()
        mean = weights @ means
        variances = self.pack(covariances).diagonal(dim1=-2, dim2=-1).flatten(1)
        return mean, weights @ (variances + (means - mean).square())
