"""Jacobians as factors: of weights that act by a matrix product, J_n = Σ_l B_nl ⊗ a_nl.

a is what a layer is given, B = ∂f/∂z for what it returns, z = W a + b. Both are the same for
all columns, so J W̃ = B (W̃ a) and Jᵀu = (Bᵀu) aᵀ are large matrix products without a graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_lla_em.jacobian.calls import Piece

# of the largest temporary on a CPU: beyond this every one is fetched anew from the system, which
# takes as long as the arithmetic
FETCHED_BYTES = 2**24

# how much more arithmetic factors may take than torch.func, which also does all that is no product
# with a weight, in many small steps
_SLOWER = 3


class Outer(NamedTuple):
    """J of one call, B ⊗ a summed over places, as its factors."""

    weight: Piece
    bias: Piece | None
    a: Tensor
    """(rows, channels), (rows, groups, channels, places), or of a lookup (rows, places)."""

    b: Tensor | None
    """(rows, D, groups × channels × places); None: the identity."""

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + (0 if self.b is None else self.b.nbytes)

    def push(self, tangents: dict[str, Tensor]) -> Tensor:
        """Return J w, (rows, K, D), from directions (K, *shape)."""
        weight = self.weight.get(tangents)
        bias = None if self.bias is None else self.bias.get(tangents)
        K = len(weight)
        if not self.a.is_floating_point():
            z = weight[:, self.a].permute(1, 0, 3, 2)
        elif self.a.dim() == 2:
            flat = weight.reshape(-1, self.a.shape[1])
            z = F.linear(self.a, flat, bias if bias is None else bias.flatten()).unflatten(
                1, (K, -1)
            )
        else:
            groups = self.a.shape[1]
            weight = weight.reshape(K, groups, -1, self.a.shape[2])
            if groups == 1:  # einsum copies the sum of all columns once more
                z = (weight.flatten(0, 2) @ self.a[:, 0]).unflatten(1, weight.shape[:2] + (-1,))
            else:
                z = torch.einsum("kgoi,bgit->bkgot", weight, self.a)
            if bias is not None:
                z = z + bias.view(K, groups, -1, 1)
        z = z.flatten(2)
        return z if self.b is None else torch.bmm(z, self.b.mT)

    def pull(self, u: Tensor) -> list[tuple[Piece, Tensor]]:
        """Return Jᵀu, (K, ...), for the weight and the bias from u, (rows, K, D)."""
        d = u if self.b is None else torch.bmm(u.to(self.b), self.b)
        d = d.to(self.a) if self.a.is_floating_point() else d
        K, bias = d.shape[1], None
        if not self.a.is_floating_point():
            d = d.unflatten(2, (-1, self.a.shape[1])).permute(1, 0, 3, 2).flatten(1, 2)
            weight = d.new_zeros(K, *self.weight.shape).index_add_(1, self.a.flatten(), d)
        elif self.a.dim() == 2:
            weight, bias = d.flatten(1).mT @ self.a, d.sum(0)
        else:
            d = d.unflatten(2, (self.a.shape[1], -1, self.a.shape[3]))
            weight, bias = torch.einsum("bkgot,bgit->kgoi", d, self.a), d.sum((0, 4))
        return [(self.weight, weight), *([(self.bias, bias)] if self.bias else [])]


class Terms(NamedTuple):
    """The outputs of one batch, and their Jacobian as factors."""

    f: Tensor
    """(B, ..., C)."""

    outer: list[Outer]
    dense: Tensor | None
    """Columns of J where they take less arithmetic than their factors, (B, D, p)."""

    columns: list[Piece]
    """Whose they are."""

    forward: int = 0
    """Multiplications by the weights in a forward pass."""

    @property
    def nbytes(self) -> int:
        dense = 0 if self.dense is None else self.dense.nbytes
        return self.f.nbytes + dense + sum(term.nbytes for term in self.outer)

    @property
    def is_slow(self) -> bool:
        """Whether torch.func needs much less arithmetic, as of many outputs of narrow layers.

        A column takes torch.func four forward passes, and factors twice what they hold.
        """
        dense = 0 if self.dense is None else self.dense.numel()
        b = sum(term.b.numel() for term in self.outer if term.b is not None)
        return 2 * (self.forward + dense + b) > _SLOWER * 4 * self.forward

    @property
    def at_once(self) -> int | None:
        """How many columns have temporaries that a CPU does not fetch anew each time."""
        if self.f.device.type != "cpu":
            return None
        widths = [term.a.shape[0] * term.b.shape[2] for term in self.outer if term.b is not None]
        return max(1, FETCHED_BYTES // (max(widths, default=1) * self.f.itemsize))

    def part(self, rows: slice) -> Terms:
        """Return the factors of some rows."""
        cut = lambda t: None if t is None else t[rows]  # noqa: E731
        outer = [term._replace(a=cut(term.a), b=cut(term.b)) for term in self.outer]
        return self._replace(f=self.f[rows], outer=outer, dense=cut(self.dense))
