"""Jacobians as factors: of weights that act by a matrix product, J_n = Σ_l B_nl ⊗ a_nl.

a is what a layer is given, B = ∂f/∂z for what it returns, z = W a + b. Both are the same for
all columns, so J W̃ = B (W̃ a) and Jᵀu = (Bᵀu) aᵀ are large matrix products without a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_lla_em.jacobian.calls import Call, Piece, recorded
from torch_lla_em.jacobian.rows import Weights

# of the largest temporary on a CPU: beyond this every one is fetched anew from the system, which
# takes as long as the arithmetic
FETCHED_BYTES = 2**24

# how much more arithmetic factors may take than torch.func, which also does all that is no product
# with a weight, in many small steps
_SLOWER = 3

# outputs of a row beyond which their backward passes cost more than they can save
_MOST_OUTPUTS = 512


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


@dataclass
class Factored:
    """The weights of a network that act by matrix products alone."""

    weights: Weights
    names: tuple[str, ...]
    second: dict[str, bool]
    """Whether rows are on the second axis of what a weight's calls return."""

    can_batch: bool = True
    """Whether backward passes of several outputs can be taken at once."""

    example_bytes: int | None = None
    """Bytes of the largest output of a layer for one example; None: take all outputs at once."""

    least_columns: int = 1
    """From how many columns on factors pay that are not kept."""

    shared: tuple[str, ...] = ()
    """Tables of which one lookup serves all rows."""

    def __str__(self) -> str:
        layout = self.weights.layout
        number = sum(n for name, n in zip(layout.names, layout.sizes) if name in self.names)
        return f"{number:,} of {layout.size:,} weights have factors"

    @property
    def others(self) -> tuple[str, ...]:
        """The weights without factors."""
        return tuple(name for name in self.weights.layout.names if name not in self.names)

    @classmethod
    def find(
        cls, weights: Weights, names: tuple[str, ...], x: Any, shared: tuple[str, ...] = ()
    ) -> Factored | None:
        """Return what has factors at x, or None; of one row it cannot be told."""
        f, calls, others = recorded(weights.network, names, x, shared)
        if f.dim() < 2 or len(f) < 2:
            return None
        own = {piece.name for call in calls for piece in call.pieces} - others
        if own != set(names):
            names = tuple(name for name in names if name in own)
            f, calls, others = recorded(weights.network, names, x, shared)
        if not names or others or not f.requires_grad:
            return None
        ends = all(call.is_output(f) and len(call.shape) == 2 for call in calls)
        if f[0].numel() > _MOST_OUTPUTS and not ends:
            return None
        u = torch.zeros_like(f)
        u[0] = torch.randn(
            f[0].shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu"
        ).to(f)
        grads = torch.autograd.grad(f, [call.edge for call in calls], u, allow_unused=True)
        second: dict[str, bool] = {}
        for call, z in zip(calls, grads):
            if z is None:
                continue
            ways = [call._replace(second=way) for way in (False, True)]
            fits = [way.second for way in ways if way.first_row_alone(z[None], len(f))]
            name = call.pieces[0].name
            if not fits and call.is_lookup and name not in shared:
                return cls.find(weights, names, x, (*shared, name))
            if not fits or second.setdefault(name, fits[0]) not in fits:
                return None
        return cls(weights, names, second, shared=shared)

    def run(self, x: Any, keep: bool = False) -> Terms | None:
        """Return the factors at x, or None where a weight acts otherwise than it did.

        What is to be kept shares no memory with anything else.
        """
        f, calls, others = recorded(self.weights.network, self.names, x, self.shared)
        if others or not f.requires_grad or not all(call.is_kept for call in calls):
            return None
        B, D = len(f), f[0].numel()
        terms: list[_Term] = []
        inner: list[_Term] = []
        for call in calls:
            call = call._replace(second=self.second.get(call.pieces[0].name, False))
            terms.append(_Term(call, B, D, keep))
            if not (terms[-1].may_end and call.is_output(f)):
                inner.append(terms[-1])
        if inner:
            self._backward(f, inner)
        terms = [term for term in terms if term.pieces or term not in inner]
        dense = [term for term in terms if term.is_dense]
        return Terms(
            f.detach(),
            [term.outer() for term in terms if not term.is_dense],
            torch.cat([torch.cat(term.pieces, 1) for term in dense], 2) if dense else None,
            [piece for term in dense for piece in term.call.pieces],
            sum(call.multiplications for call in calls),
        )

    def _backward(self, f: Tensor, terms: list[_Term]) -> None:
        """Give each term its gradients, by one backward pass for an output of all rows."""
        B, D = len(f), f[0].numel()
        u = torch.eye(D, dtype=f.dtype, device=f.device)[:, None].expand(D, B, D)
        u = u.reshape(D, *f.shape)
        edges = [term.call.edge for term in terms]
        used: list[_Term] = []

        def pull(u: Tensor) -> list[Tensor]:
            grads = torch.autograd.grad(f, edges, u, retain_graph=True, allow_unused=True)
            used[:] = [term for term, z in zip(terms, grads) if z is not None]
            return [z for z in grads if z is not None]

        # torch.func.vmap, since is_grads_batched takes convolutions one by one
        for some in u.split(self._outputs_at_once(B)):
            found = torch.vmap(pull)(some) if len(some) > 1 else [z[None] for z in pull(some[0])]
            for term, z in zip(used, found):
                term.take(z)

    def _outputs_at_once(self, examples: int) -> int:
        """Return how many outputs' backward passes are taken together."""
        if not self.can_batch:
            return 1
        if self.example_bytes is None:
            return _MOST_OUTPUTS
        return max(1, FETCHED_BYTES // (self.example_bytes * max(1, examples)))


class _Term:
    """J of one call, gathered output by output."""

    def __init__(self, call: Call, B: int, D: int, keep: bool):
        self.call = call
        self.pieces: list[Tensor] = []
        self._B = B
        self._a = None if call.weight is None else call.inputs(B)
        self.is_dense = self._a is None
        self.may_end = False
        if self._a is None or call.is_lookup:
            return
        G, I, T = self._a.shape[1:]
        O = call.shape.numel() // (B * G * T)
        # columns of J where they take less arithmetic, and no more than twice the memory
        self.is_dense = T > 1 and min(O * T * (I + D), 2 * T * (I + D * O)) >= D * O * I
        self.may_end = G * T == 1 and O == D
        own = self._a.untyped_storage().nbytes() == self._a.nbytes
        if keep and not (own and call.given.requires_grad):
            self._a = self._a.clone()

    def take(self, z: Tensor) -> None:
        """Take the gradients of some outputs, (d, *z.shape)."""
        z = self.call.outputs(z, self._B)
        if self.call.padding_idx is not None:
            z = z * (self._a != self.call.padding_idx)[:, None, None]
        z = z.transpose(0, 1)  # (rows, d, groups, channels, places)
        if not self.is_dense:
            self.pieces.append(z.flatten(2))
            return
        weight = [] if self.call.weight is None else [self._sum_over_places(z)]
        bias = [] if self.call.bias is None else [z.sum(-1).flatten(2)]
        self.pieces.append(torch.cat([*weight, *bias], 2))

    def _sum_over_places(self, z: Tensor) -> Tensor:
        """Return the columns of J for the weight, (rows, d, groups × channels × I)."""
        d, channels = z.shape[1], z.shape[3]
        # one product for all outputs: broadcasting over them would copy the inputs for each
        z = z.transpose(1, 2).flatten(2, 3) @ self._a.mT
        return z.unflatten(2, (d, channels)).transpose(1, 2).flatten(2)

    def outer(self) -> Outer:
        a = self._a
        if a.dim() == 4 and a.shape[1] == a.shape[3] == 1:
            a = a[:, 0, :, 0]
        b = torch.cat(self.pieces, 1) if self.pieces else None
        return Outer(self.call.weight, self.call.bias, a, b)
