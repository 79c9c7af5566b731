"""Block Lanczos: an orthonormal basis Q of a Krylov space of G, and T = Q G Qᵀ, for every λ."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from torch_lla_em.slices import largest_slice
from torch_lla_em.solvers.blocks import combine, gram, orthonormalise
from torch_lla_em.solvers.solution import (
    DivergenceError,
    FaultyProductError,
    allowed_asymmetry,
)

logger = logging.getLogger("torch_lla_em")

Product = Callable[[Tensor], Tensor]

# rounding of a product and of its orthogonalisation, in units of eps ‖G‖
_NOISE = 30


class BlockLanczos:
    """G Qᵀ ≈ Qᵀ T on the Krylov space of the rows of a block; one product a step.

    T is block tridiagonal, kept in float64. While the basis fits in ``memory`` bytes, every
    new block is orthogonalised against all of it, twice; beyond that against the last two,
    as the recurrence asks, and only what T alone gives is available. Rows that become
    dependent leave.
    """

    def __init__(
        self,
        product: Product,
        start: Tensor,
        memory: float = float("inf"),
        storage: torch.dtype | None = None,
    ):
        self._product = product
        self._asymmetry = allowed_asymmetry(product)
        self._memory = memory
        self._storage = storage or start.dtype
        self.has_basis = True
        block, self.start = orthonormalise(start)
        self.basis = [block]
        """Blocks of Q, each (r_j, P); the last one has no product with G yet. All but the last
        two are in the dtype of storage, and taken out of it one by one."""

        self._diagonal: list[Tensor] = []
        self._coupling: list[Tensor] = []
        self._lost: list[Tensor] = []
        self._scale = 0.0
        self.eigenvalues = self.vectors = start.new_zeros(0, 0, dtype=torch.float64)

    @property
    def num_steps(self) -> int:
        """Products so far."""
        return len(self._diagonal)

    @property
    def exhausted(self) -> bool:
        """Whether the Krylov space is invariant: nothing is left to add."""
        return not len(self.basis[-1])

    def extend(self) -> None:
        """Take one more product, and diagonalise T."""
        if self.exhausted:
            return
        block = self.basis[-1]
        image = self._product(block)
        diagonal = gram(block, image)
        if not torch.isfinite(diagonal).all():
            raise DivergenceError("A product with G is not finite: check the model's outputs.")
        self._scale = max(self._scale, diagonal.abs().max().item())
        self._check_symmetry(diagonal)
        self._diagonal.append(0.5 * (diagonal + diagonal.T))
        image = image - combine(diagonal.T, block)
        if len(self._coupling):
            image -= combine(self._coupling[-1], self.basis[-2])
        image = self._orthogonalised(self._orthogonalised(image))
        # below rounding of the product, directions are noise: the space is invariant
        floor = _NOISE * torch.finfo(block.dtype).eps * self._scale
        block, coupling = orthonormalise(image, floor)
        if len(block) and torch.linalg.svdvals(coupling)[-1] < 1e-2 * self._scale:
            # what was small has kept, relative to its length, more of the rounding
            block, turn = orthonormalise(self._orthogonalised(block), 0.5)
            coupling = coupling @ turn
        lost = image - combine(coupling, block)
        self._lost.append(gram(lost, lost))
        self._coupling.append(coupling.T)
        self.basis.append(block)
        self._make_room()
        self.eigenvalues, self.vectors = torch.linalg.eigh(self.tridiagonal())

    def tridiagonal(self) -> Tensor:
        """Return T, shape (r, r), in float64."""
        T = torch.block_diag(*self._diagonal)
        row = 0
        for diagonal, coupling in zip(self._diagonal, self._coupling[:-1]):
            below = row + len(diagonal)
            end = below + len(coupling)
            T[below:end, row:below] = coupling
            T[row:below, below:end] = coupling.T
            row = below
        return T

    def starting_coordinates(self) -> Tensor:
        """Return the rows of the start block in Ritz coordinates, shape (m, r)."""
        return self.start @ self.vectors[: self.start.shape[1]]

    def residual_coordinates(self) -> Tensor:
        """Return L, shape (r', r): G Qᵀ y - Qᵀ T y = (next block)ᵀ L y, y in Ritz coordinates."""
        last = len(self._diagonal[-1])
        return self._coupling[-1] @ self.vectors[-last:]

    def lost(self, coordinates: Tensor) -> Tensor:
        """Return a bound on what G Qᵀ y has outside of T and the next block, (k,): rounding,
        and the directions that were too short to be told from it."""
        sizes = [len(diagonal) for diagonal in self._diagonal]
        pieces = (coordinates @ self.vectors.T).split(sizes, dim=1)
        squares = [((y @ lost) * y).sum(1) for lost, y in zip(self._lost, pieces)]
        return sum(square.clamp_min(0).sqrt() for square in squares)

    def to_weights(self, coordinates: Tensor) -> Tensor:
        """Return vectors (k, P) of Ritz coordinates (k, r); needs the basis."""
        coefficients = coordinates @ self.vectors.T
        sizes = [len(diagonal) for diagonal in self._diagonal]
        pieces = zip(coefficients.split(sizes, dim=1), self.basis)
        return sum(combine(piece, block.to(self.basis[-1].dtype)) for piece, block in pieces)

    def to_coordinates(self, rows: Tensor) -> Tensor:
        """Return Ritz coordinates (k, r) of vectors (k, P), projected; needs the basis."""
        pieces = [gram(rows, block.to(rows.dtype)) for block in self.basis[: self.num_steps]]
        return torch.cat(pieces, dim=1) @ self.vectors

    def _orthogonalised(self, rows: Tensor) -> Tensor:
        for stored in self.basis:
            earlier = stored.to(rows.dtype)
            rows = rows - combine(gram(rows, earlier), earlier)
        return rows

    def _make_room(self) -> None:
        """Keep the last two blocks only, once the basis has outgrown its memory."""
        if len(self.basis) > 2:
            self.basis[-3] = self.basis[-3].to(self._storage)
        held = sum(block.nbytes for block in self.basis)
        if self.has_basis and largest_slice(held) > self._memory:
            logger.info(
                "The Krylov basis has outgrown its %.1f GB: λ and the evidence go on without "
                "it, samples will take a solve of their own.",
                self._memory / 1e9,
            )
            self.has_basis = False
        if not self.has_basis:
            self.basis = self.basis[-2:]

    def _check_symmetry(self, diagonal: Tensor) -> None:
        if (diagonal - diagonal.T).abs().max() > self._asymmetry * self._scale:
            raise FaultyProductError(
                "The product with G is not symmetric: the model's J and Jᵀ disagree, or its "
                "outputs change from call to call (dropout, random augmentation). Fix the "
                "model or the loader."
            )
        if torch.linalg.eigvalsh(0.5 * (diagonal + diagonal.T))[0] < -self._asymmetry * self._scale:
            raise FaultyProductError(
                "The product with G has negative curvature: the likelihood's H is not positive "
                "semi-definite, or the model changes from call to call."
            )
