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
from torch_lla_em.jacobian.network import Network

# of the largest temporary on a CPU: beyond this every one is fetched anew from the system, which
# takes as long as the arithmetic
FETCHED_BYTES = 2**24
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


class Factors(NamedTuple):
    """One batch, and the Jacobian of its outputs as factors."""

    x: Any
    f: Tensor
    """(B, ..., C)."""

    weights: dict[str, Tensor]
    """Those that have factors."""

    outer: list[Outer]
    dense: Tensor | None
    """Columns of J where they take less arithmetic than their factors, (B, D, p)."""

    columns: list[Piece]
    """Whose they are."""

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept, but for the inputs."""
        dense = 0 if self.dense is None else self.dense.nbytes
        return self.f.nbytes + dense + sum(term.nbytes for term in self.outer)

    @property
    def columns_at_once(self) -> int | None:
        """How many columns have temporaries that a CPU does not fetch anew each time."""
        if self.f.device.type != "cpu":
            return None
        widths = [term.a.shape[0] * term.b.shape[2] for term in self.outer if term.b is not None]
        return max(1, FETCHED_BYTES // (max(widths, default=1) * self.f.itemsize))

    def of_rows(self, rows: slice, x: Any) -> Factors:
        """Return the factors of some rows, whose inputs are x."""
        cut = lambda t: None if t is None else t[rows]  # noqa: E731
        outer = [term._replace(a=cut(term.a), b=cut(term.b)) for term in self.outer]
        return self._replace(x=x, f=self.f[rows], outer=outer, dense=cut(self.dense))

    def push(self, tangents: dict[str, Tensor]) -> Tensor:
        """Return J w, (K, B, ..., C), from directions (K, *shape)."""
        K, f = len(next(iter(tangents.values()))), self.f
        Jw = f.new_zeros(K, len(f), f[0].numel())
        if self.dense is not None:
            w = torch.cat([piece.get(tangents).reshape(K, -1) for piece in self.columns], 1)
            Jw += (w.to(self.dense) @ self.dense.flatten(0, 1).mT).view(Jw.shape)
        for term in self.outer:
            Jw += term.push(tangents).transpose(0, 1)
        return Jw.view(K, *f.shape)

    def pull(self, u: Tensor) -> dict[str, Tensor]:
        """Return Jᵀu by name, (K, *shape), from u, (K, B, ..., C)."""
        K, total = len(u), {}
        u = u.reshape(K, len(self.f), -1)

        def add(piece: Piece, pulled: Tensor) -> None:
            if piece.part is None and piece.name not in total:
                total[piece.name] = pulled.reshape(K, *piece.shape)
                return
            if piece.name not in total:
                total[piece.name] = pulled.new_zeros(K, *self.weights[piece.name].shape)
            piece.get(total).add_(pulled.reshape(K, *piece.shape))

        if self.dense is not None:
            pulled = u.flatten(1).to(self.dense) @ self.dense.flatten(0, 1)
            sizes = [piece.shape.numel() for piece in self.columns]
            for piece, columns in zip(self.columns, pulled.split(sizes, 1)):
                add(piece, columns)
        for term in self.outer:
            for piece, pulled in term.pull(u.transpose(0, 1)):
                add(piece, pulled)
        return total


@dataclass
class Factored:
    """The weights of a network that act by matrix products alone."""

    network: Network
    names: tuple[str, ...]
    second: dict[str, bool]
    """Whether rows are on the second axis of what a weight's calls return."""

    at_once: int
    """How many outputs' backward passes are taken at once."""

    least_columns: int = 1
    """From how many columns on factors pay that are not kept."""

    seconds: tuple[float, float] = (0.0, 0.0)
    """What a column takes, by kept factors and without."""

    shared: tuple[str, ...] = ()
    """Tables of which one lookup serves all rows."""

    pays: bool = True
    """Whether products are not faster without."""

    @classmethod
    def find(
        cls, network: Network, names: tuple[str, ...], x: Any, shared: tuple[str, ...] = ()
    ) -> Factored | None:
        """Return what has factors at x, or None; of one row it cannot be told."""
        f, calls, others = recorded(network, names, x, shared)
        if f.dim() < 2 or len(f) < 2:
            return None
        own = {piece.name for call in calls for piece in call.pieces} - others
        if own != set(names):
            names = tuple(name for name in names if name in own)
            f, calls, others = recorded(network, names, x, shared)
        if not names or others or not f.requires_grad:
            return None
        if f[0].numel() > _MOST_OUTPUTS and not all(call.is_output(f) for call in calls):
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
                return cls.find(network, names, x, (*shared, name))
            if not fits or second.setdefault(name, fits[0]) not in fits:
                return None
        return cls(network, names, second, at_once=f[0].numel(), shared=shared)

    def run(self, x: Any, keep: bool = False) -> Factors | None:
        """Return the factors at x, or None where a weight acts otherwise than it did.

        What is to be kept shares no memory with anything else.
        """
        f, calls, others = recorded(self.network, self.names, x, self.shared)
        if others or not f.requires_grad or not all(call.is_kept for call in calls):
            return None
        B, D = len(f), f[0].numel()
        weights, terms, inner = self.network.weights(self.names), [], []
        for call in calls:
            call = call._replace(second=self.second.get(call.pieces[0].name, False))
            terms.append(_Term(call, B, D, keep))
            if not (terms[-1].may_end and call.is_output(f)):
                inner.append(terms[-1])
        if inner:
            self._backward(f, inner)
        terms = [term for term in terms if term.pieces or term not in inner]
        dense = [term for term in terms if term.is_dense]
        return Factors(
            x,
            f.detach(),
            weights,
            [term.outer() for term in terms if not term.is_dense],
            torch.cat([torch.cat(term.pieces, 1) for term in dense], 2) if dense else None,
            [piece for term in dense for piece in term.call.pieces],
        )

    def _backward(self, f: Tensor, terms: list[_Term]) -> None:
        """Give each term its gradients, by one backward pass for an output of all rows."""
        B, D = len(f), f[0].numel()
        u = torch.eye(D, dtype=f.dtype, device=f.device)[:, None].expand(D, B, D)
        u = u.reshape(D, *f.shape)
        edges = [term.call.edge for term in terms]
        for start in range(0, D, self.at_once):
            batched, end = self.at_once > 1, start + self.at_once
            grads = torch.autograd.grad(
                f,
                edges,
                u[start:end] if batched else u[start],
                retain_graph=end < D,
                allow_unused=True,
                is_grads_batched=batched,
            )
            for term, z in zip(terms, grads):
                if z is not None:
                    term.take(z if batched else z[None])


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
        weight = [] if self.call.weight is None else [(z @ self._a.mT[:, None]).flatten(2)]
        bias = [] if self.call.bias is None else [z.sum(-1).flatten(2)]
        self.pieces.append(torch.cat([*weight, *bias], 2))

    def outer(self) -> Outer:
        a = self._a
        if a.dim() == 4 and a.shape[1] == a.shape[3] == 1:
            a = a[:, 0, :, 0]
        b = torch.cat(self.pieces, 1) if self.pieces else None
        return Outer(self.call.weight, self.call.bias, a, b)
