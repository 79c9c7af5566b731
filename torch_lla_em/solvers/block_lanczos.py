"""Block Lanczos: an orthonormal basis Q of a Krylov space of G, and T = Q G Qᵀ, for every λ."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from torch_lla_em.solvers.operator import Operator
from torch_lla_em.solvers.solution import relative_error, symmetric
from torch_lla_em.solvers.space import add_combined
from torch_lla_em.solvers.spectrum import Spectrum

logger = logging.getLogger("torch_lla_em")

# rounding of a product and of its orthogonalisation, in units of eps ‖G‖
_NOISE = 30


class BlockLanczos:
    """G Qᵀ ≈ Qᵀ T on the Krylov space of the rows of a block; one product a step.

    T is block tridiagonal, kept in float64. While the basis fits in ``memory`` bytes, every
    new block is orthogonalised against all of it; beyond that against the last two, as the
    recurrence asks, and only what T alone gives is available. Rows that become dependent leave.
    """

    def __init__(
        self,
        product: Operator,
        start: Tensor,
        memory: float = float("inf"),
    ):
        self._product = product
        self.space = product.space
        self._memory = memory
        self.has_basis = True
        block, self.start = self.space.orthonormalise(start)
        self.basis = [block]
        """Blocks of Q, each (r_j, P); the last one has no product with G yet."""

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
    def held(self) -> float:
        """Bytes of the basis, where vectors are in slices that of the largest one."""
        return self.space.largest(sum(block.nbytes for block in self.basis))

    @property
    def exhausted(self) -> bool:
        """Whether the Krylov space is invariant: nothing is left to add."""
        return not len(self.basis[-1])

    def grow(self) -> None:
        """Take one more product; out of memory, keep only the last two blocks of the basis."""
        if not self.has_basis or len(self.basis) <= 2:
            self.extend()
        elif self._product.attempt(self.extend)[1]:
            logger.warning("Out of memory at %d Krylov blocks: keeping two.", len(self.basis))
            self.has_basis = False
            self.basis = self.basis[-2:]
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

    def _orthogonalise(self, rows: Tensor) -> None:
        for earlier in self.basis:
            add_combined(rows, self.space.overlap(rows, earlier), earlier, -1)

    def _make_room(self) -> None:
        """Keep what the next step needs only, once the basis has outgrown its memory."""
        if self.has_basis and self.held > self._memory:
            logger.info("The Krylov basis has outgrown %.1f GB.", self._memory / 1e9)
            self.has_basis = False
        if not self.has_basis:
            self.basis = self.basis[-2:]


class KrylovPosterior:
    """γ, certificates, the log det and samples for any λ, from one Krylov space.

    Rows of the start block are [ξ; η] (2K). All vectors are in scaled coordinates, where the prior
    is N(0, I / λ).
    """

    def __init__(self, lanczos: BlockLanczos, num_samples: int):
        self.lanczos = lanczos
        self.num_samples = num_samples

    @property
    def spectrum(self) -> Spectrum:
        """What γ and the log det at any λ follow from."""
        start = self.lanczos.starting_coordinates()
        xi, eta = start[: self.num_samples], start[self.num_samples : 2 * self.num_samples]
        return Spectrum(self.lanczos.eigenvalues.clamp_min(0), xi, eta)

    def certificates(self, precision: float) -> Tensor:
        """Return ‖r_k‖ in the norm of Λ⁻¹, (K,), with all that was lost to rounding."""
        coordinates, lanczos = self.spectrum.solutions(precision), self.lanczos
        following = coordinates @ lanczos.residual_coordinates().T
        return (following.norm(dim=1) + lanczos.lost(coordinates)) / precision**0.5

    def error(self, precision: float) -> float:
        """Return the certificate relative to the samples: √(mean cert² / max(1, γ))."""
        dims = self.spectrum.effective_dims(precision)
        return relative_error(self.certificates(precision), dims)

    def samples(self, precision: float) -> Tensor:
        """Return (G + λ)⁻¹(√λ ξ + η), shape (K, P), by Galerkin projection."""
        return self.lanczos.to_weights(self.spectrum.solutions(precision))
