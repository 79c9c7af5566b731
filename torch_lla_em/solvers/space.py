"""Blocks of vectors (m, P): inner products in float64, combinations, orthonormal bases."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torch_lla_em.runtime import Group

# numbers that are converted to float64 at a time
_ENTRIES = 1 << 22
# in which long vectors are factorised
_PARTS = 16
# of an inner product in the vectors' own precision, whose rounding grows with its length
_SUMMED = 1 << 12


class Space:
    """The space of vectors (m, P), whole, or in slices (m, P / R) on the ranks of a group.

    If vectors are in slices, every sum over entries is also a sum over ranks.
    """

    def __init__(self, group: Group = Group()):
        self._group = group

    def sum(self, total: Tensor) -> Tensor:
        """Return the sum over all entries, given the sum over those of this rank."""
        return self._group.sum(total)

    def largest(self, size: float) -> float:
        """Return the maximum over ranks."""
        return self._group.meet(size, max)

    def dots(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the inner product of each pair of rows, shape (m,), in float64."""
        total = torch.zeros(len(a), dtype=torch.float64, device=a.device)
        for piece in _pieces(a, b):
            total += (a[:, piece].double() * b[:, piece]).sum(1)
        return self.sum(total)

    def dot(self, a: Tensor, b: Tensor) -> float:
        """Return the inner product of two vectors (P,)."""
        return self.dots(a[None], b[None]).item()

    def norm(self, rows: Tensor) -> float:
        """Return the norm of all rows together."""
        rows = rows.view(-1, rows.shape[-1])
        return self.dots(rows, rows).sum().sqrt().item()

    def gram(self, a: Tensor, b: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return a bᵀ, or a diag(weights) bᵀ, shape (m, n), summed in float64."""
        if weights is None and a.dtype == b.dtype == torch.float64:
            return self.sum(a @ b.T)
        total = torch.zeros(len(a), len(b), dtype=torch.float64, device=a.device)
        for piece in _pieces(a, b):
            left = a[:, piece].double()
            left = left if weights is None else left * weights.expand(a.shape[1])[piece]
            total.addmm_(left, b[:, piece].double().T)
        return self.sum(total)

    def overlap(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a bᵀ, (m, n), with an error of the rounding of the vectors, for orthogonalisation.

        In float32 pieces are summed in float64: three times as fast as ``gram``.
        """
        if a.dtype != torch.float32 or b.dtype != torch.float32:
            return self.gram(a, b)
        total = torch.zeros(len(a), len(b), dtype=torch.float64, device=a.device)
        for start in range(0, a.shape[1], _SUMMED):
            piece = slice(start, start + _SUMMED)
            total += a[:, piece] @ b[:, piece].T
        return self.sum(total)

    def orthonormalise(self, rows: Tensor, floor: float = 0.0) -> tuple[Tensor, Tensor]:
        """Return an orthonormal basis (r, P) and coefficients (m, r), rows = coefficients basis.

        Directions that are linear combinations of others up to rounding are dropped. Rounding is
        ``floor`` in every direction, or relative to each row if 0.
        """
        norms = self.dots(rows, rows).sqrt()
        live = (norms > floor).nonzero()[:, 0]
        if not len(live):
            return rows[:0].clone(), norms.new_zeros(len(rows), 0)
        units = norms[live, None] if floor == 0 else torch.ones_like(norms[live, None])
        q, turns, r = self._factors(rows, live, units)
        u, singular, vh = torch.linalg.svd(r.double(), full_matrices=False)
        relative = 10 * len(u) ** 0.5 * torch.finfo(rows.dtype).eps * singular[0]
        kept = singular > (relative if floor == 0 else floor)
        # signs of the factors and nearly equal singular values are made independent of rounding,
        # so that the basis does not depend on the number of ranks
        if kept.all():
            turn = torch.where(r.diagonal() < 0, -1, 1).diag().to(u)
            parts = turn @ r.double()
        else:
            signs = vh.gather(1, vh.abs().argmax(1, keepdim=True)).sign()
            turn, parts = (signs.T * u)[:, kept], (singular[:, None] * signs * vh)[kept]
        coefficients = norms.new_zeros(len(rows), turn.shape[1])
        coefficients[live] = units * parts.T
        rank = turn.shape[1]
        for piece, first in turns:
            q[:rank, piece] = (first @ turn.to(first)).T @ q[: len(first), piece]
        return q if rank == len(q) else q[:rank].clone(), coefficients

    def _factors(
        self, rows: Tensor, live: Tensor, units: Tensor
    ) -> tuple[Tensor, list[tuple[slice, Tensor]], Tensor]:
        """Return Qᵀ, shape (m, P), and R of the live rows over their units, factorised in pieces.

        Each piece (n, p) of Qᵀ still has to be multiplied by its matrix (n, m).
        """
        size = rows.shape[1]
        step = max(1, _ENTRIES // len(live), -(-size // _PARTS))
        # a slice can have fewer entries than there are rows
        most = len(live) if self._group.size > 1 else min(len(live), size)
        q = rows.new_empty(most, size)
        parts, found = [slice(start, start + step) for start in range(0, max(1, size), step)], []
        for part in parts:
            own, r = torch.linalg.qr((rows[:, part][live] / units.to(rows)).T)
            q[: own.shape[1], part] = own.T
            found.append(r)
        turn, r = self._stacked_qr(found)
        return q, list(zip(parts, turn.split([len(r) for r in found]))), r

    def _stacked_qr(self, factors: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the QR factors of matrices R (n, m) on top of each other, over all ranks.

        Each rank gets its own rows of the first factor.
        """
        group, own = self._group, torch.cat(factors)
        if group.size == 1:
            return (
                (torch.eye(len(own), dtype=own.dtype, device=own.device), own)
                if len(factors) == 1
                else torch.linalg.qr(own)
            )
        columns, below = own.shape[1], None
        if len(factors) > 1:
            below, own = torch.linalg.qr(own)
        square = own.new_zeros(columns, columns)
        square[: len(own)] = own
        every, r = torch.linalg.qr(group.gather(square))
        turn = every[group.rank * columns : group.rank * columns + len(own)]
        return turn if below is None else below @ turn, r


def combine(coefficients: Tensor, rows: Tensor) -> Tensor:
    """Return linear combinations of rows, the product of (k, m) and (m, P)."""
    return coefficients.to(rows) @ rows


def add_combined(total: Tensor, coefficients: Tensor, rows: Tensor, factor: float = 1.0) -> None:
    """Add the combinations of rows, times a factor, to vectors (k, P), in place."""
    coefficients = coefficients.to(total)
    if rows.dtype == total.dtype:
        total.addmm_(coefficients, rows, alpha=factor)
        return
    for piece in _pieces(total, rows):
        total[:, piece].addmm_(coefficients, rows[:, piece].to(total.dtype), alpha=factor)


def _pieces(*blocks: Tensor) -> Iterator[slice]:
    """Yield the columns of blocks in pieces, which need little memory in another precision."""
    size, step = blocks[0].shape[1], max(1, _ENTRIES // max(1, sum(map(len, blocks))))
    for start in range(0, size, step):
        yield slice(start, start + step)
