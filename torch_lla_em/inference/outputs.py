"""J V, the outputs of the directions of a span for all examples: stored, or by a last layer's features.

If the parameters are those of a last linear layer, J w = W h + b for the features h of each site. With T, the weights of the
directions, J V = h T. It is multiplied from the right first, so that products with few columns take hardly more than a
product with h, and J V needs not be stored.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torch_lla_em.data import Share
from torch_lla_em.jacobian import ParameterLayout


class SpanOutputs:
    """J V for m directions and all sites of a rank's N examples, (N C, m), in blocks of directions."""

    def __init__(
        self, share: Share, shape: torch.Size, features: Tensor | None = None, memory: float = 0.0
    ):
        self.share, self.shape, self.features, self._memory = share, shape, features, memory
        """(N, ..., C) of the outputs, and h of all sites, with a 1 if the layer has a bias, (N ..., D), or None."""

        self._blocks: list[Tensor] = []
        """J V, each (N ... C, k); empty if it is computed from features."""

        self._tables: list[Tensor] = []
        """T, each (D C, k), if there are features."""

    @property
    def stored(self) -> list[Tensor]:
        """What has to be stored: T if there are features, otherwise J V."""
        return self._blocks if self.features is None else self._tables

    @property
    def size(self) -> int:
        """m."""
        return sum(block.shape[1] for block in self.stored)

    def add(self, block: Tensor) -> None:
        """Add directions: J V (N C, k), or T (D C, k) if there are features."""
        if self.features is None:
            self._blocks.append(block)
            return
        self._tables.append(block)
        if self.size * self.shape.numel() * block.element_size() > self._memory:
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
            total = self._of_features(self.features, total)
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
        return self.share.sum(torch.cat(found, 1))

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield blocks of examples with their J V, (n ... C, m), which fit into the cache if J V is stored."""
        outputs = self.shape[1:].numel()
        step = max(1, (1 << (19 if self._blocks else 24)) // (outputs * max(self.size, 1)))
        for start in range(0, self.shape[0], step):
            rows = slice(start, start + step)
            if self._blocks:
                near = slice(start * outputs, (start + step) * outputs)
                yield rows, torch.cat([block[near] for block in self._blocks], 1)
            else:
                h = self.features[rows]
                yield rows, torch.cat([self._of_features(h, block) for block in self._tables], 1)

    def turn(self, turn: Tensor) -> None:
        """Replace the directions by their combinations, (m, r)."""
        turned, start = self.stored[0].new_zeros(len(self.stored[0]), turn.shape[1]), 0
        for block in self.stored:
            turned.addmm_(block, turn[start : start + block.shape[1]].to(block))
            start += block.shape[1]
        self._blocks, self._tables = [], []
        self.add(turned)

    # a last layer

    def table(self, w: Tensor, layout: ParameterLayout) -> Tensor:
        """Return T, (D C, k), of weights (k, P)."""
        C = self.shape[-1]
        rows = [part.view(len(w), C, -1).permute(2, 1, 0) for part in w.split(layout.sizes, 1)]
        return torch.cat(rows).reshape(-1, len(w)).to(self.features)

    def push_weights(self, w: Tensor, layout: ParameterLayout) -> Tensor:
        """Return J w, (N ... C, k), for weights (k, P)."""
        return self._of_features(self.features, self.table(w, layout))

    def pull_weights(self, u: Tensor, layout: ParameterLayout) -> Tensor:
        """Return Jᵀ u, (k, P), for u (N ... C, k) of every rank."""
        pulled = self._transposed(u).view(-1, self.shape[-1], u.shape[1])
        counts = [size // self.shape[-1] for size in layout.sizes]  # of the weight, and of the bias
        parts = [part.permute(2, 1, 0).flatten(1) for part in pulled.split(counts)]
        return self.share.sum(torch.cat(parts, 1))

    def of(self, rows: Tensor) -> SpanOutputs:
        """Return those of some examples, without directions."""
        h = self.features[rows]
        return SpanOutputs(self.share, torch.Size((len(h), *self.shape[1:])), h)

    def _takes_features(self, columns: int) -> bool:
        """Whether a product takes less time by features than by J V; with few columns both take as long as reading."""
        if self.features is None or not self._blocks:
            return self.features is not None
        return columns <= 4 or self.features.shape[-1] <= self.size

    def _of_features(self, features: Tensor, table: Tensor) -> Tensor:
        h = features.flatten(0, -2)
        return (h.to(table.dtype) @ table.view(h.shape[1], -1)).view(-1, table.shape[1])

    def _transposed(self, u: Tensor) -> Tensor:
        """Return hᵀ u, (D C, k), for u (N ... C, k)."""
        h = self.features.flatten(0, -2)
        pulled = u.reshape(len(h), self.shape[-1] * u.shape[1]).T @ h.to(u.dtype)
        return pulled.T.reshape(-1, u.shape[1])
