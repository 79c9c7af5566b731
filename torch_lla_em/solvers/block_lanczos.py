"""Block Lanczos: an orthonormal basis Q of a Krylov space of G, and T = Q G Qᵀ, for every λ."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.runtime import Grown, new_key
from torch_lla_em.solvers.operator import Operator
from torch_lla_em.solvers.solution import symmetric
from torch_lla_em.solvers.space import add_combined

logger = logging.getLogger("torch_lla_em")

_STATE = (
    *("start", "has_basis", "_memory", "_diagonal", "_coupling", "_lost", "_scale"),
    *("eigenvalues", "vectors"),
)

# rounding of a product and of its orthogonalisation, in units of eps ‖G‖
_NOISE = 30
_WITHOUT = "λ and the evidence go on without a basis, samples will take a solve of their own."


class BlockLanczos:
    """G Qᵀ ≈ Qᵀ T on the Krylov space of the rows of a block; one product a step.

    T is block tridiagonal, kept in float64. While the basis fits in ``memory`` bytes, every
    new block is orthogonalised against all of it; beyond that, and where memory ends
    before, against the last two, as the recurrence asks, and only what T alone gives is
    available. Rows that become dependent leave.
    """

    def __init__(
        self,
        product: Operator,
        start: Tensor,
        memory: float = float("inf"),
        storage: torch.dtype | None = None,
    ):
        self._product = product
        self.space = product.space
        self._memory = memory
        self._storage = storage or start.dtype
        self.has_basis = True
        self._ended = False
        self._key = new_key()
        block, self.start = self.space.orthonormalise(start)
        self.basis = [block]
        """Blocks of Q, each (r_j, P); the last one has no product with G yet. All but the last
        two are in the dtype of storage, and taken out of it one by one."""

        self._diagonal: list[Tensor] = []
        self._coupling: list[Tensor] = []
        self._lost: list[Tensor] = []
        self._scale = 0.0
        self.eigenvalues = self.vectors = start.new_zeros(0, 0, dtype=torch.float64)

    def state(self) -> dict[str, Any]:
        """Return all that it goes on with."""
        state = {name: getattr(self, name) for name in _STATE}
        return {**state, "basis": Grown(self._key, self.basis)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        for name in _STATE:
            setattr(self, name, state[name])
        self._key, self.basis = state["basis"]
        for number, block in enumerate(self.basis[:-2]):
            self.basis[number] = block.to(self._storage)

    @property
    def num_steps(self) -> int:
        """Products so far."""
        return len(self._diagonal)

    @property
    def held(self) -> float:
        """Bytes of the basis, where vectors are in slices that of the largest one."""
        return self.space.largest(sum(block.nbytes for block in self.basis))

    @property
    def exhausted(self) -> bool:
        """Whether the Krylov space is invariant: nothing is left to add."""
        return not len(self.basis[-1])

    def grow(self) -> None:
        """Take one more product; where memory ends, without what more than T needs of the basis."""
        if not self.has_basis or len(self.basis) <= 2:
            self.extend()
        elif self._product.attempt(self.extend)[1]:
            logger.warning("Out of memory at %d blocks: %s", len(self.basis), _WITHOUT)
            self.drop_basis()
            self.extend()

    def extend(self) -> None:
        """Take one more product, and diagonalise T."""
        if self.exhausted:
            return
        block, gram = self.basis[-1], self.space.gram
        image = self._product(block)
        diagonal = gram(block, image)
        self._scale = max(self._scale, diagonal.abs().max().item())
        allowed = self._product.allowed_asymmetry * self._scale
        exact = symmetric(diagonal, allowed, -allowed)
        image = torch.addmm(image, diagonal.T.to(image), block, alpha=-1)
        if len(self._coupling):
            add_combined(image, self._coupling[-1], self.basis[-2], -1)
        # of the last two blocks the recurrence has left rounding alone, as of all others
        self._orthogonalise(image)
        block, coupling = self._next_block(image)
        add_combined(image, coupling, block, -1)
        lost = gram(image, image)
        if len(self.basis) > 1:
            self.basis[-2] = self.basis[-2].to(self._storage)
        self._lost.append(lost)
        self._diagonal.append(exact)
        self._coupling.append(coupling.T)
        self.basis.append(block)
        self._make_room()
        self.eigenvalues, self.vectors = torch.linalg.eigh(self.tridiagonal())

    def _next_block(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the image adds to the basis, (r, P), and its coefficients, (m, r)."""
        # below rounding of the product, directions are noise: the space is invariant
        floor = _NOISE * torch.finfo(image.dtype).eps * self._scale
        block, coupling = self.space.orthonormalise(image, floor)
        if len(block) and torch.linalg.svdvals(coupling)[-1] < 1e-2 * self._scale:
            # what was small has kept, relative to its length, more of the rounding
            self._orthogonalise(block)
            block, turn = self.space.orthonormalise(block, 0.5)
            coupling = coupling @ turn
        return block, coupling

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
        total = self.basis[-1].new_zeros(len(coordinates), self.basis[-1].shape[1])
        for piece, block in zip(coefficients.split(sizes, dim=1), self.basis):
            add_combined(total, piece, block)
        return total

    def drop_basis(self) -> None:
        """Keep what the next step needs only."""
        last = self.basis[-1]
        self.has_basis, self._key = False, new_key()
        self.basis = [last.new_empty(0, last.shape[1])] if self._ended else self.basis[-2:]

    def end(self) -> None:
        """Take no more steps: without a basis, T alone is left."""
        self._ended = True
        if not self.has_basis:
            self.drop_basis()

    def _orthogonalise(self, rows: Tensor) -> None:
        for earlier in self.basis:
            add_combined(rows, self.space.overlap(rows, earlier), earlier, -1)

    def _make_room(self) -> None:
        """Keep the last two blocks only, once the basis has outgrown its memory."""
        if self.has_basis and self.held > self._memory:
            logger.info("The Krylov basis has outgrown %.1f GB: %s", self._memory / 1e9, _WITHOUT)
            self.has_basis = False
        if not self.has_basis:
            self.drop_basis()
