"""Finds weights that act only by matrix products, and computes the factors of their Jacobian."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.jacobian.by_factors import Dense, Lookup, Outer, Term, Terms
from torch_lla_em.jacobian.calls import Call, recorded
from torch_lla_em.jacobian.chain import factors_of_chain
from torch_lla_em.jacobian.rows import FETCHED_BYTES, Weights

# number of outputs per example above which the backward passes cost more than they save
_MOST_OUTPUTS = 512


@dataclass(frozen=True)
class Factored:
    """The weights of a network that act by matrix products alone."""

    weights: Weights
    names: tuple[str, ...]
    example_bytes: int | None = None
    """Bytes of the largest output of a layer for one example; None: all outputs at once."""

    least_columns: int = 1
    """Number of columns from which factors are worth computing even if they are not stored."""

    shared: tuple[str, ...] = ()
    """Tables of which one lookup is used for all examples."""

    def __str__(self) -> str:
        layout = self.weights.layout
        number = sum(n for name, n in zip(layout.names, layout.sizes) if name in self.names)
        return f"{number:,} of {layout.size:,} weights have factors"

    @classmethod
    def find(cls, weights: Weights, x: Any, shared: tuple[str, ...] = ()) -> Factored | None:
        """Return how all weights act by products at x, or None; one example is not enough to decide.

        If one weight acts otherwise, factors of the rest save nothing: on a tiny BERT without factors
        of its tables, a fit takes 4.7 s with them and 5.1 s without, and a prediction 19 and 13 ms.
        """
        f, calls, others = recorded(weights.network, weights.layout.names, x, shared)
        if f.dim() < 2 or len(f) < 2:
            return None
        used = {name for call in calls for name in call.names}
        if others or not used or not f.requires_grad:
            return None
        if f[0].numel() > _MOST_OUTPUTS and not all(call.is_output(f) for call in calls):
            return None
        u = torch.zeros_like(f)
        u[0] = torch.randn(
            f[0].shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu"
        ).to(f)
        grads = torch.autograd.grad(f, [call.edge for call in calls], u, allow_unused=True)
        for call, z in zip(calls, grads):
            if z is None or call.first_row_alone(z[None], len(f)):
                continue
            if call.is_lookup and call.weight not in shared:
                return cls.find(weights, x, (*shared, call.weight))
            return None
        return cls(weights, tuple(sorted(used)), shared=shared)

    def run(self, x: Any, keep: bool = False) -> Terms | None:
        """Return the factors at x, or None if a weight acts in another way than before.

        Factors that are stored share no memory with other tensors.
        """
        known = factors_of_chain(self.weights.network, self.names, x, keep)
        if known is not None:
            return known._replace(is_limited=self.example_bytes is not None)
        names = self.weights.layout.names
        f, calls, others = recorded(self.weights.network, names, x, self.shared)
        as_before = all(call.is_kept and set(call.names) <= set(self.names) for call in calls)
        if others or not f.requires_grad or not as_before:
            return None
        B, D = len(f), f[0].numel()
        terms = [_Gathered(call, B, D, keep, call.is_output(f)) for call in calls]
        inner = [term for term in terms if not term.ends]
        if inner:
            self._backward(f, inner)
        terms = [term for term in terms if term.pieces or term not in inner]
        dense = [term for term in terms if term.is_dense]
        parts: list[Term] = [term.factors() for term in terms if not term.is_dense]
        if dense:
            J = torch.cat([torch.cat(term.pieces, 1) for term in dense], 2)
            every = [name for term in dense for name in term.call.names]
            parts.append(Dense(every, [n for term in dense for n in term.call.sizes], J))
        multiplications = sum(call.multiplications for call in calls)
        return Terms(f.detach(), parts, multiplications, self.example_bytes is not None)

    def _backward(self, f: Tensor, terms: list[_Gathered]) -> None:
        """Compute the gradients of each term, by one backward pass for each output of all examples."""
        B, D = len(f), f[0].numel()
        u = torch.eye(D, dtype=f.dtype, device=f.device)[:, None].expand(D, B, D)
        u = u.reshape(D, *f.shape)
        edges = [term.call.edge for term in terms]
        used: list[_Gathered] = []

        def pull(u: Tensor) -> list[Tensor]:
            grads = torch.autograd.grad(f, edges, u, retain_graph=True, allow_unused=True)
            used[:] = [term for term, z in zip(terms, grads) if z is not None]
            return [z for z in grads if z is not None]

        # torch.func.vmap, since is_grads_batched takes convolutions one by one
        step = D
        if self.example_bytes is not None:
            step = max(1, FETCHED_BYTES // (self.example_bytes * max(1, B)))
        for some in u.split(step):
            found = torch.vmap(pull)(some) if len(some) > 1 else [z[None] for z in pull(some[0])]
            for term, z in zip(used, found):
                term.take(z)


class _Gathered:
    """J of one call, gathered output by output."""

    def __init__(self, call: Call, B: int, D: int, keep: bool, ends: bool):
        self.call = call
        self.pieces: list[Tensor] = []
        self._B = B
        self._a = None if call.weight is None else call.inputs(B)
        self.is_dense = self._a is None
        self.ends = ends and self._a is not None
        """Whether its outputs are those of the network, which needs no backward pass."""

        if self._a is None or call.is_lookup:
            return
        G, I, T = self._a.shape[1:]
        O = call.shape.numel() // (B * G * T)
        # columns of J where they take less arithmetic, and no more than four times the memory
        self.is_dense = (
            T > 1 and not ends and min(O * T * (I + D), 4 * T * (I + D * O)) >= D * O * I
        )
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

    def factors(self) -> Outer | Lookup:
        """Return J as factors."""
        a, call = self._a, self.call
        b = torch.cat(self.pieces, 1) if self.pieces else None
        if call.is_lookup:
            return Lookup(call.weight, call.weight_shape, a, b)
        if a.shape[1] == a.shape[3] == 1:
            a = a[:, 0, :, 0]
        return Outer(call.weight, call.bias, a, b)
