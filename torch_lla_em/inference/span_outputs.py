"""J V, the outputs of the directions of a span for all examples: stored, or by a last layer's features.

If the parameters are those of a last linear layer, J w = W h + b for the features h of each site.
With T, the weights of the directions, J V = h T. It is multiplied from the right first, so that
products with few columns take hardly more than a product with h, and J V needs not be stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_lla_em.data import Share
from torch_lla_em.jacobian import ParameterLayout

_FEW = 4
"""Number of columns up to which products take no longer by features than by J V."""

_CACHED, _COMPUTED = 1 << 19, 1 << 24
"""Numbers of J V that are multiplied at once, if J V is stored, and if it is computed from features."""

_OF_MEMORY = 0.5
"""Largest share of the memory of a span for J V, if it can be computed from features."""


def most_stored(memory: float, itemsize: int) -> float:
    """Return the largest number of entries of J V that are stored if they can be computed from features."""
    return _OF_MEMORY * memory / itemsize


class SpanOutputs:
    """J V for m directions and all sites of a rank's N examples, (N C, m), in blocks of directions."""

    def __init__(
        self, share: Share, shape: torch.Size, features: Tensor | None = None, most: float = 0.0
    ):
        self._share, self.shape, self._most = share, shape, most
        """(N, ..., C) of the outputs."""

        self.features = features
        """h of all sites, with a 1 if the layer has a bias, (N ..., D); None: J V is stored."""

        self._blocks: list[Tensor] = []
        """J V, each (N ... C, k)."""

        self._tables: list[Tensor] = []
        """T, each (D C, k), if there are features."""

    @property
    def blocks(self) -> list[Tensor]:
        """What has to be stored: T if there are features, otherwise J V."""
        return self._blocks if self.features is None else self._tables

    @property
    def size(self) -> int:
        """m."""
        return sum(block.shape[1] for block in self.blocks)

    @property
    def at_once(self) -> int:
        """Numbers of J V that are best multiplied at once: few for the cache, many for T."""
        return _CACHED if self._blocks else _COMPUTED

    @property
    def outputs(self) -> int:
        """Outputs of an example."""
        return self.shape[1:].numel()

    def add(self, Jv: Tensor) -> None:
        """Add directions by their outputs, (k, N, ..., C)."""
        self._blocks.append(Jv.flatten(1).T.contiguous())

    def add_weights(self, w: Tensor, layout: ParameterLayout) -> None:
        """Add directions by their weights, (k, P), if there are features."""
        self.add_block(self._table(w, layout))

    def add_block(self, block: Tensor) -> None:
        """Add directions by an entry of ``blocks``."""
        if self.features is None:
            self._blocks.append(block)
            return
        self._tables.append(block)
        if self.size * self.shape.numel() > self._most:
            self._blocks.clear()
        elif len(self._blocks) == len(self._tables) - 1:
            self._blocks.append(self._of_features(self.features, block))

    def push(self, coordinates: Tensor, exact: bool = False) -> Tensor:
        """Return J Vᵀ c, (N, ..., C, k), for coordinates c (k, m); in float64 if ``exact``."""
        by_features, start = self._takes_features(len(coordinates)), 0
        blocks = self._tables if by_features else self._blocks
        dtype = torch.float64 if exact else blocks[0].dtype
        total = blocks[0].new_zeros(len(blocks[0]), len(coordinates), dtype=dtype)
        c = coordinates.T.to(total)
        for block in blocks:
            total.addmm_(block.to(dtype), c[start : start + block.shape[1]])
            start += block.shape[1]
        if by_features:
            total = self._of_features(self._features(), total)
        return total.view(*self.shape, len(coordinates))

    def pull(self, u: Tensor, start: int = 0) -> Tensor:
        """Return (J V)ᵀ u from direction ``start`` on, (k, m - start), for u (N ... C, k) of every rank."""
        by_features = self._takes_features(u.shape[1])
        u = self._transposed(u) if by_features else u
        found, at = [u.new_zeros(u.shape[1], 0)], 0
        for block in self._tables if by_features else self._blocks:
            first = max(0, start - at)
            at += block.shape[1]
            if first < block.shape[1]:
                found.append(u.T @ block[:, first:].to(u.dtype))
        return self._share.sum(torch.cat(found, 1))

    def push_weights(self, w: Tensor, layout: ParameterLayout) -> Tensor:
        """Return J w, (N ... C, k), for weights (k, P), if there are features."""
        return self._of_features(self._features(), self._table(w, layout))

    def pull_weights(self, u: Tensor, layout: ParameterLayout) -> Tensor:
        """Return Jᵀ u, (k, P), for u (N ... C, k) of every rank, if there are features."""
        pulled = self._transposed(u).view(-1, self.shape[-1], u.shape[1])
        counts = [size // self.shape[-1] for size in layout.sizes]  # of the weight, and of the bias
        parts = [part.permute(2, 1, 0).flatten(1) for part in pulled.split(counts)]
        return self._share.sum(torch.cat(parts, 1))

    def of(self, rows: Tensor) -> SpanOutputs:
        """Return those of some examples, without directions, if there are features."""
        h = self._features()[rows]
        return SpanOutputs(self._share, torch.Size((len(h), *self.shape[1:])), h)

    def part(self, start: int, stop: int) -> Tensor:
        """Return J V of examples from ``start`` to ``stop``, (n ... C, m)."""
        if self._blocks:
            rows = slice(start * self.outputs, stop * self.outputs)
            return torch.cat([block[rows] for block in self._blocks], 1)
        sites = self.outputs // self.shape[-1]
        near = self._features().flatten(0, -2)[start * sites : stop * sites]
        return torch.cat([self._of_features(near, block) for block in self._tables], 1)

    def turn(self, turn: Tensor) -> None:
        """Replace the directions by their combinations, (m, r)."""
        turned, start = self.blocks[0].new_zeros(len(self.blocks[0]), turn.shape[1]), 0
        for block in self.blocks:
            turned.addmm_(block, turn[start : start + block.shape[1]].to(block))
            start += block.shape[1]
        self._blocks, self._tables = [], []
        self.add_block(turned)

    def _takes_features(self, columns: int) -> bool:
        """Whether a product takes less time by features than by J V, if both are stored.

        Products with few columns take as long as reading J V.
        """
        if self.features is None or not self._blocks:
            return self.features is not None
        return columns <= _FEW or self.features.shape[-1] <= self.size

    def _table(self, w: Tensor, layout: ParameterLayout) -> Tensor:
        """Return T, (D C, k), of weights (k, P)."""
        C = self.shape[-1]
        rows = [part.view(len(w), C, -1).permute(2, 1, 0) for part in w.split(layout.sizes, 1)]
        return torch.cat(rows).reshape(-1, len(w))

    def _of_features(self, features: Tensor, table: Tensor) -> Tensor:
        """Return J V, (n ... C, k), from features (n ..., D) and T, (D C, k)."""
        h = features.flatten(0, -2)
        return (h.to(table.dtype) @ table.view(h.shape[1], -1)).view(-1, table.shape[1])

    def _transposed(self, u: Tensor) -> Tensor:
        """Return hᵀ u, (D C, k), for u (N ... C, k)."""
        h = self._features().flatten(0, -2)
        pulled = u.reshape(len(h), self.shape[-1] * u.shape[1]).T @ h.to(u.dtype)
        return pulled.T.reshape(-1, u.shape[1])

    def _features(self) -> Tensor:
        """Return h, which exists."""
        if self.features is None:
            raise AttributeError("The outputs of this span are stored.")
        return self.features
