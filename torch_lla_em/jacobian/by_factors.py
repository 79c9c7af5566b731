"""The linear model at one batch by the factors of its Jacobian, for three kinds of layers.

z = W a + b is what a layer returns for a, and B = ∂f/∂z. Both are the same for all columns, so
J W̃ = B (W̃ a) and Jᵀu = (Bᵀu) aᵀ are large matrix products without a graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_lla_em.jacobian.rows import FETCHED_BYTES, Rows, Weights

# torch.func takes four forward passes for a column of J w and of Jᵀu, and also has to compute all that
# is not a product with a weight; factors take twice the multiplications by weights and gradients
_MOST_GRADIENTS = 5

# numbers in the gradients of single rows that are held at once; on a CPU, few enough for its cache
_NUMBERS = {"cpu": 1 << 20, "cuda": 1 << 24}


class Outer(NamedTuple):
    """J of a linear or convolutional layer, B ⊗ a summed over places."""

    weight: str
    bias: str | None
    a: Tensor
    """(rows, channels), or (rows, groups, channels, places)."""

    b: Tensor | None
    """(rows, D, groups × channels × places); None: the outputs are f, place by place."""

    @property
    def names(self) -> list[str]:
        """The weights whose Jacobian it is."""
        return [self.weight, *([self.bias] if self.bias else [])]

    def push(self, tangents: dict[str, Tensor]) -> Tensor:
        """Return J w, (rows, K, D), from directions (K, *shape)."""
        weight = tangents[self.weight]
        bias = None if self.bias is None else tangents[self.bias]
        K = len(weight)
        if self.b is None and self.a.dim() == 2 and _has_more_rows(self.a):
            # one product for all vectors, since products with few outputs are slow; the weights are
            # copied, which are fewer numbers than the results
            z = F.linear(self.a, weight.reshape(-1, self.a.shape[1])).unflatten(1, (K, -1))
        elif self.a.dim() == 2:
            # one batched product, which reads the blocks of all vectors where they are
            a, weight = self.a.expand(K, *self.a.shape), weight.flatten(2).mT
            z = a.bmm(weight) if bias is None else torch.baddbmm(bias[:, None], a, weight)
            z, bias = z.transpose(0, 1), None
        else:
            groups = self.a.shape[1]
            weight = weight.reshape(K, groups, -1, self.a.shape[2])
            if groups == 1:  # einsum would copy its result
                z = (weight.flatten(0, 2) @ self.a[:, 0]).unflatten(1, weight.shape[:2] + (-1,))
            else:
                z = torch.einsum("kgoi,bgit->bkgot", weight, self.a)
            bias = None if bias is None else bias.view(K, groups, -1, 1)
        z = z if bias is None else z + bias
        if self.b is None:
            return z if z.dim() == 3 else z.flatten(2, -2).mT.flatten(2)
        return torch.bmm(z.flatten(2), self.b.mT)

    def pull(self, u: Tensor) -> list[Tensor]:
        """Return Jᵀu of each weight, (K, ...), from u, (rows, K, D)."""
        d = self._signals(u)
        if self.a.dim() == 2:
            return [d.flatten(1).mT @ self.a, d.sum(0)][: len(self.names)]
        if self.a.shape[1] == 1 and self.a.shape[3] >= self.a.shape[2]:
            # a product for each row takes a sixth of the time of einsum, and no more memory than d
            own = (d.flatten(1, 3) @ self.a[:, 0].mT).sum(0).unflatten(0, d.shape[1:4])
        else:
            own = torch.einsum("bkgot,bgit->kgoi", d, self.a)
        return [own, d.sum((0, 4))][: len(self.names)]

    def gradient(self, name: str, u: Tensor) -> Tensor:
        """Return every row's own Jᵀu for a weight, (rows, K, ...)."""
        d = self._signals(u)
        if self.a.dim() == 2:
            return d if name == self.bias else torch.einsum("bko,bi->bkoi", d, self.a)
        return d.sum(-1) if name == self.bias else torch.einsum("bkgot,bgit->bkgoi", d, self.a)

    def squares(self, name: str, u: Tensor) -> Tensor | None:
        """Return Σ_n Σ_k (J_nᵀu_nk)² for a weight, or None if that needs single rows."""
        if self.a.dim() > 2:
            return None
        # J_nᵀu_n is the outer product d aᵀ, so its square is the product of the squares
        d = _wide(self._signals(u)).square().sum(1)
        return d.sum(0) if name == self.bias else d.mT @ _wide(self.a).square()

    def _signals(self, u: Tensor) -> Tensor:
        """Return Bᵀu, (rows, K, channels) or (rows, K, groups, channels, places)."""
        if self.b is not None:
            d = torch.bmm(u.to(self.b), self.b)
        else:
            d = u if self.a.dim() == 2 else u.unflatten(2, (self.a.shape[3], -1)).mT.flatten(2)
        d = d.to(self.a)
        return d if self.a.dim() == 2 else d.unflatten(2, (self.a.shape[1], -1, self.a.shape[3]))


class Lookup(NamedTuple):
    """J of an embedding."""

    table: str
    shape: torch.Size
    """Shape of the table."""

    a: Tensor
    """The entries that are looked up, (rows, places)."""

    b: Tensor
    """(rows, D, channels × places)."""

    @property
    def names(self) -> list[str]:
        """The table whose Jacobian it is."""
        return [self.table]

    def push(self, tangents: dict[str, Tensor]) -> Tensor:
        """Return J w, (rows, K, D), from directions (K, *shape)."""
        z = tangents[self.table][:, self.a].permute(1, 0, 3, 2)
        return torch.bmm(z.flatten(2), self.b.mT)

    def pull(self, u: Tensor) -> list[Tensor]:
        """Return Jᵀu of the table, (K, ...), from u, (rows, K, D)."""
        d = self._signals(u).permute(1, 0, 3, 2).flatten(1, 2)
        return [d.new_zeros(len(d), *self.shape).index_add_(1, self.a.flatten(), d)]

    def gradient(self, name: str, u: Tensor) -> Tensor:
        """Return every row's own Jᵀu, (rows, K, *shape)."""
        d = self._signals(u).mT
        table = d.new_zeros(*d.shape[:2], *self.shape)
        return table.scatter_add_(2, self.a[:, None, :, None].expand_as(d), d)

    def squares(self, name: str, u: Tensor) -> Tensor:
        """Return Σ_n Σ_k (J_nᵀu_nk)², which is 0 for entries that no row looks up."""
        total = _wide(self.b.new_zeros(self.shape))
        for rows in _slices(u, self.a.shape[1] * total.shape[1]):
            own = _part(self, rows)
            d, a = own._signals(u[rows]), own.a
            same = a[:, :, None] == a[:, None, :]
            # the signals of places that look up the same entry are added up at the first of these
            sums, is_first = d.to(total) @ same[:, None].to(total), ~same.tril(-1).any(2)
            squares = (sums.square().sum(1) * is_first[:, None]).mT
            total.index_add_(0, a.flatten(), squares.flatten(0, 1))
        return total

    def _signals(self, u: Tensor) -> Tensor:
        """Return Bᵀu, (rows, K, channels, places)."""
        return torch.bmm(u.to(self.b), self.b).unflatten(2, (-1, self.a.shape[1]))


class Dense(NamedTuple):
    """J itself, of weights for which that takes less arithmetic than factors."""

    names: list[str]
    sizes: list[int]
    """How many columns of J belong to each; a weight that is used several times is named each time."""

    J: Tensor
    """(rows, D, p)."""

    def push(self, tangents: dict[str, Tensor]) -> Tensor:
        """Return J w, (rows, K, D), from directions (K, *shape)."""
        w = torch.cat([tangents[name].flatten(1) for name in self.names], 1).to(self.J)
        return (w @ self.J.flatten(0, 1).mT).view(len(w), *self.J.shape[:2]).transpose(0, 1)

    def pull(self, u: Tensor) -> list[Tensor]:
        """Return Jᵀu of each weight, (K, ...), from u, (rows, K, D)."""
        pulled = u.transpose(0, 1).flatten(1).to(self.J) @ self.J.flatten(0, 1)
        return list(pulled.split(self.sizes, 1))

    def gradient(self, name: str, u: Tensor) -> Tensor:
        """Return every row's own Jᵀu for a weight, (rows, K, p)."""
        first, *more = [J for own, J in zip(self.names, self.J.split(self.sizes, 2)) if own == name]
        return u.to(self.J) @ sum(more, first)

    def squares(self, name: str, u: Tensor) -> None:
        """Return None, because the squares need the gradients of single rows."""


Term = Outer | Lookup | Dense


class Terms(NamedTuple):
    """The outputs of one batch, and their Jacobian as factors."""

    f: Tensor
    """(B, ..., C)."""

    parts: list[Term]
    forward: int
    """Multiplications by the weights in a forward pass."""

    is_limited: bool = True
    """Whether fewer columns are computed at once the larger the batch is, as is best on a CPU."""

    @property
    def nbytes(self) -> int:
        held = [entry for term in self.parts for entry in term if isinstance(entry, Tensor)]
        return self.f.nbytes + sum(tensor.nbytes for tensor in held)

    @property
    def gradients(self) -> int:
        """How many numbers backward passes for every output have found; 0 if none was needed."""
        held = [term.J if isinstance(term, Dense) else term.b for term in self.parts]
        return sum(tensor.numel() for tensor in held if tensor is not None)

    @property
    def is_slow(self) -> bool:
        """Whether torch.func needs much less arithmetic, as for many outputs of narrow layers."""
        return self.gradients > _MOST_GRADIENTS * self.forward

    @property
    def at_once(self) -> int | None:
        """Number of columns whose temporary tensors are not allocated by the system each time."""
        if not self.is_limited:
            return None
        widths = [
            len(term.a) * term.b.shape[2] if term.b is not None else self.f.numel()
            for term in self.parts
            if not isinstance(term, Dense) and (term.b is not None or term.a.dim() == 4)
        ]
        return max(1, FETCHED_BYTES // (max(widths, default=1) * self.f.itemsize))


class ByFactors(Rows):
    """The linear model at a batch by factors."""

    def __init__(
        self,
        weights: Weights,
        terms: Terms,
        columns: int | None = None,
    ):
        """``columns``: the largest number of columns at once; None: the best number."""
        at_once = min((n for n in (terms.at_once, columns) if n is not None), default=None)
        super().__init__(weights, (at_once, at_once))
        self.terms = terms
        names = dict.fromkeys(name for term in terms.parts for name in term.names)
        self._values = weights.values(tuple(names))
        self.nbytes = terms.nbytes

    @property
    def f(self) -> Tensor:
        """f(x), shape (B, ..., C)."""
        return self.terms.f

    @property
    def features(self) -> Tensor | None:
        """h, (B, ..., D), if J w = W h for all parameters W; else None."""
        term, names = self.terms.parts[0], tuple(self._weights.layout.names)
        if len(self.terms.parts) > 1 or not isinstance(term, Outer):
            return None
        has_groups = term.a.dim() > 2 and term.a.shape[1] > 1
        if term.b is not None or has_groups or tuple(term.names) != names:
            return None
        h = term.a if term.a.dim() == 2 else term.a[:, 0].mT
        h = h.reshape(*self.f.shape[:-1], -1)
        return h if term.bias is None else F.pad(h, (0, 1), value=1.0)

    def row_squares(self, u: Tensor) -> dict[str, Tensor]:
        """Return Σ_n Σ_k (J_nᵀ u_nk)² by name, of the weights that have factors."""
        u = u.reshape(*u.shape[:2], self.f[0].numel()).transpose(0, 1)
        parts = self.terms.parts
        return {name: _row_squares(parts, value, name, u) for name, value in self._values.items()}

    def _push(self, directions: dict[str, Tensor]) -> Tensor:
        own = {name: directions[name].to(value) for name, value in self._values.items()}
        K, f = len(next(iter(own.values()))), self.f
        Jw = f.new_zeros(K, len(f), f[0].numel())
        for term in self.terms.parts:
            Jw += term.push(own).transpose(0, 1)
        return Jw.view(K, *f.shape)

    def _pull(self, u: Tensor) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        K = len(u)
        u = u.reshape(K, len(self.f), self.f[0].numel()).transpose(0, 1)
        for term in self.terms.parts:
            for name, pulled in zip(term.names, term.pull(u)):
                pulled = pulled.reshape(K, *self._values[name].shape)
                total[name] = pulled if name not in total else total[name].add_(pulled)
        return total


def _has_more_rows(a: Tensor) -> bool:
    """Whether there are as many rows as columns; not if their number is free, as in an export."""
    return isinstance(a.shape[0], int) and len(a) >= a.shape[1]


def _part(term: Any, rows: slice) -> Any:
    """Return a term of some rows."""
    entries = term._asdict().items()
    return term._replace(**{n: entry[rows] for n, entry in entries if isinstance(entry, Tensor)})


def _slices(u: Tensor, numbers: int) -> Iterator[slice]:
    """Yield rows of u, as many as are held at once if each column takes so many numbers."""
    most = _NUMBERS.get(u.device.type, _NUMBERS["cpu"])
    step = max(1, most // max(1, u.shape[1] * numbers))
    for start in range(0, len(u), step):
        yield slice(start, start + step)


def _row_squares(terms: list[Term], weight: Tensor, name: str, u: Tensor) -> Tensor:
    """Return Σ_n Σ_k (J_nᵀu_nk)² for a weight, of its shape, from u, (rows, K, D)."""
    terms = [term for term in terms if name in term.names]
    squares = terms[0].squares(name, u) if len(terms) == 1 else None
    if squares is not None:
        return squares.reshape(weight.shape)
    total = _wide(torch.zeros_like(weight))
    for rows in _slices(u, weight.numel()):
        first, *more = [_part(term, rows).gradient(name, u[rows]).flatten(2) for term in terms]
        total += _wide(sum(more, first)).square().sum((0, 1)).view(weight.shape)
    return total


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
