"""The linear model at one batch by the factors of its Jacobian.

z = W a + b is what a layer returns for a, and B = ∂f/∂z. Both are the same for all columns, so
J W̃ = B (W̃ a) and Jᵀu = (Bᵀu) aᵀ are large matrix products without a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_lla_em.jacobian.parameters import ParameterLayout
from torch_lla_em.jacobian.rows import Rows

# largest number of entries of the gradients of single rows at once, which fit into the cache of a
# CPU
_NUMBERS = 1e6


class Outer(NamedTuple):
    """J of a linear or convolutional layer, B ⊗ a summed over places."""

    names: tuple[str, ...]  # of the weight, and of the bias if it has one
    a: Tensor  # (rows, channels), or (rows, groups, channels, places)
    # (rows, D, groups × channels × places); None: the outputs are f, place by place
    b: Tensor | None

    def push(self, tangents: dict[str, Tensor]) -> Tensor:
        """Return J w, (rows, K, D), from directions (K, *shape)."""
        weight, *biases = (tangents[name] for name in self.names)
        z: Tensor
        K = len(weight)
        if self.a.dim() == 2 and self.b is None and len(self.a) >= self.a.shape[1]:
            # one product for all vectors, since products with few outputs are slow; the weights are
            # copied, which are fewer numbers than the results
            z = F.linear(self.a, weight.reshape(-1, self.a.shape[1])).unflatten(1, (K, -1))
        elif self.a.dim() == 2:
            # one batched product, which reads the blocks of all vectors where they are
            a, weight = self.a.expand(K, *self.a.shape), weight.flatten(2).mT
            z = torch.baddbmm(biases[0][:, None], a, weight) if biases else a.bmm(weight)
            z, biases = z.transpose(0, 1), []
        else:
            groups = self.a.shape[1]
            weight = weight.reshape(K, groups, -1, self.a.shape[2])
            if groups == 1:  # einsum would copy its result
                z = (weight.flatten(0, 2) @ self.a[:, 0]).unflatten(1, weight.shape[:2] + (-1,))
            else:
                z = torch.einsum("kgoi,bgit->bkgot", weight, self.a)
            biases = [bias.view(K, groups, -1, 1) for bias in biases]
        z = z + biases[0] if biases else z
        if self.b is None:
            return z if z.dim() == 3 else z.flatten(2, -2).mT.flatten(2)
        return torch.bmm(z.flatten(2), self.b.mT)

    def pull(self, u: Tensor) -> list[Tensor]:
        """Return Jᵀu of each weight, (K, ...), from u, (rows, K, D)."""
        d = self.signals(u)
        if self.a.dim() == 2:
            return [d.flatten(1).mT @ self.a, d.sum(0)]
        if self.a.shape[1] == 1 and self.a.shape[3] >= self.a.shape[2]:
            # a product for each row takes a sixth of the time of einsum, and no more memory than d
            of_weight = (d.flatten(1, 3) @ self.a[:, 0].mT).sum(0).unflatten(0, d.shape[1:4])
        else:
            of_weight = torch.einsum("bkgot,bgit->kgoi", d, self.a)
        return [of_weight, d.sum((0, 4))]

    def signals(self, u: Tensor) -> Tensor:
        """Return Bᵀu, (rows, K, channels) or (rows, K, groups, channels, places)."""
        if self.b is not None:
            d = torch.bmm(u.to(self.b), self.b)
        else:
            d = u if self.a.dim() == 2 else u.unflatten(2, (self.a.shape[3], -1)).mT.flatten(2)
        d = d.to(self.a)
        return d if self.a.dim() == 2 else d.unflatten(2, (self.a.shape[1], -1, self.a.shape[3]))


class Lookup(NamedTuple):
    """J of an embedding. With it a fit of a tiny BERT takes 4.0 s, and with ``torch.func`` 16 s."""

    names: tuple[str, ...]
    shape: torch.Size  # of the table
    a: Tensor  # the entries that are looked up, (rows, places)
    b: Tensor  # (rows, D, channels × places)

    def push(self, tangents: dict[str, Tensor]) -> Tensor:
        """Return J w, (rows, K, D), from directions (K, *shape)."""
        z = tangents[self.names[0]][:, self.a].permute(1, 0, 3, 2)
        return torch.bmm(z.flatten(2), self.b.mT)

    def pull(self, u: Tensor) -> list[Tensor]:
        """Return Jᵀu of the table, (K, ...), from u, (rows, K, D)."""
        d = torch.bmm(u.to(self.b), self.b).unflatten(2, (-1, self.a.shape[1]))
        d = d.permute(1, 0, 3, 2).flatten(1, 2)  # (K, rows × places, channels)
        return [d.new_zeros(len(d), *self.shape).index_add_(1, self.a.flatten(), d)]


class Dense(NamedTuple):
    """J itself, for weights where this takes less arithmetic. With it a fit of a LeNet takes 6 s,
    and with factors alone 22 s."""

    names: tuple[str, ...]
    sizes: list[int]  # how many columns of J belong to each
    J: Tensor  # (rows, D, p)

    def push(self, tangents: dict[str, Tensor]) -> Tensor:
        """Return J w, (rows, K, D), from directions (K, *shape)."""
        w = torch.cat([tangents[name].flatten(1) for name in self.names], 1).to(self.J)
        return (w @ self.J.flatten(0, 1).mT).view(len(w), *self.J.shape[:2]).transpose(0, 1)

    def pull(self, u: Tensor) -> list[Tensor]:
        """Return Jᵀu of each weight, (K, ...), from u, (rows, K, D)."""
        pulled = u.transpose(0, 1).flatten(1).to(self.J) @ self.J.flatten(0, 1)
        return list(pulled.split(self.sizes, 1))


Term = Outer | Lookup | Dense


@dataclass(eq=False)
class ByFactors(Rows):
    """The linear model at a batch by factors, for at most ``columns`` columns at once (None:
    all)."""

    layout: ParameterLayout
    f: Tensor
    parts: list[Term]
    columns: int | None = None

    @property
    def nbytes(self) -> float:
        """Memory in bytes for storing this between passes."""
        held = [entry for term in self.parts for entry in term if isinstance(entry, Tensor)]
        return self.f.nbytes + sum(tensor.nbytes for tensor in held)

    @property
    def features(self) -> Tensor | None:
        """The features of a last linear layer, if it contains all parameters; otherwise None."""
        term = self.parts[0]
        whole = len(self.parts) == 1 and term.names == self.layout.names
        if not whole or not isinstance(term, Outer) or term.b is not None:
            return None
        if term.a.dim() > 2 and term.a.shape[1] > 1:  # groups
            return None
        h = term.a if term.a.dim() == 2 else term.a[:, 0].mT
        h = h.reshape(*self.f.shape[:-1], -1)
        return h if len(term.names) == 1 else F.pad(h, (0, 1), value=1.0)

    def row_squares(self, u: Tensor) -> dict[str, Tensor]:
        """Return Σ_n Σ_k (J_nᵀ u_nk)² by name, for the weights that have factors."""
        u = u.reshape(*u.shape[:2], self.f[0].numel()).transpose(0, 1)
        names = {name for term in self.parts for name in term.names}
        shapes = dict(zip(self.layout.names, self.layout.shapes, strict=True))
        return {name: self._squares(name, u).view(shapes[name]) for name in names}

    def _squares(self, name: str, u: Tensor) -> Tensor:
        terms = [term for term in self.parts if name in term.names]
        first, total = terms[0], u.new_zeros(())
        if len(terms) == 1 and isinstance(first, Outer) and first.a.dim() == 2:
            # J_nᵀu_n is the outer product d aᵀ, so its square is the product of the squares
            d = _wide(first.signals(u)).square().sum(1)
            return d.sum(0) if name != first.names[0] else d.mT @ _wide(first.a).square()
        size = self.layout.sizes[self.layout.names.index(name)]
        step = max(1, int(_NUMBERS / max(1, u.shape[1] * size)))
        for start in range(0, len(u), step):
            rows = slice(start, start + step)
            pulled = [_of_rows(term, name, size, u[rows], rows) for term in terms]
            total = total + _wide(sum(pulled[1:], pulled[0])).square().sum((0, 1))
        return total

    def _push(self, directions: dict[str, Tensor]) -> Tensor:
        tangents = {name: w.to(self.f) for name, w in directions.items()}
        first, *more = [term.push(tangents).transpose(0, 1) for term in self.parts]
        for Jw in more:
            first = first + Jw
        return first.reshape(-1, *self.f.shape)

    def _pull(self, u: Tensor) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        K = len(u)
        u = u.reshape(K, len(self.f), self.f[0].numel()).transpose(0, 1)
        for term in self.parts:
            for name, pulled in zip(term.names, term.pull(u), strict=False):  # or no bias
                pulled = pulled.reshape(K, -1)
                total[name] = pulled if name not in total else total[name].add_(pulled)
        return total


def _of_rows(term: Term, name: str, size: int, u: Tensor, rows: slice) -> Tensor:
    """Return Jᵀu of a weight for each of some rows, (rows, K, size); K may be 0."""

    def pulled(u: Tensor, *held: Tensor) -> Tensor:
        tensors = iter(held)
        entries: list[Any] = [
            next(tensors)[None] if isinstance(part, Tensor) else part for part in term
        ]
        return type(term)(*entries).pull(u[None])[term.names.index(name)].reshape(len(u), size)

    return torch.vmap(pulled)(u, *(entry[rows] for entry in term if isinstance(entry, Tensor)))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
