"""A span of directions v in parameter space, stored with J v for all examples of this rank.

If the parameters are those of a last linear layer, J w = W h + b for the features h of each site.
With T, the weights of the directions, J V = h T: products with few columns take hardly more than
one with h, J V is not stored, and no pass over the data is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.inference.prior import Prior
from torch_lla_em.problem import Hessian, Problem, Sites, gathered, pull_back
from torch_lla_em.runtime import DoesNotFit
from torch_lla_em.solvers import add_combined, dots, gram, orthonormalise, overlap


class Span:
    """An orthonormal basis V of scaled parameters z = w / scale, with J V for all examples.

    Basis and J V are kept in the blocks that they grew by, so that they are never copied.
    """

    def __init__(
        self, problem: Problem, prior: Prior, xi: Tensor, memory: float, sites: Sites | None = None
    ):
        self._problem, self.prior, self.memory, self.probes = problem, prior, memory, xi
        """The probes are ξ, (K, P)."""

        self.sites = sites
        """Which sites of dense outputs are the rows; None: all examples, with all their sites."""

        self.blocks: list[Tensor] = []
        """V, each (k, P)."""

        self.stored: list[Tensor] = []
        """J V, each (N ... C, k); if there are features T, each (D C, k)."""

        self.rows: Any = None
        """f, targets and weights of this rank's examples, once there are directions."""

        self._features: Tensor | None = None
        """h of all sites, with a 1 if the layer has a bias, (N ..., D)."""

        self.xi, self.size = xi.new_zeros(len(xi), 0, dtype=torch.float64), 0
        """The coordinates of ξ, (K, m), and m."""

        self._live = int((prior.scale > 0).sum())
        of_data = problem.data
        every = of_data.facts.num_outputs if sites is None else sites.outputs
        self.entries = every * of_data.largest_share
        """Outputs of the rank with the most examples."""

    @property
    def is_complete(self) -> bool:
        """Whether the basis spans all parameters that change an output."""
        return self.size >= self._live

    def bytes_of(self, directions: int) -> float:
        """Return the peak memory of this number of directions, with twice their J v, in bytes."""
        P = self.probes.shape[1]
        of_J = self.entries if self._features is None else P  # T in place of J V
        return float(directions * (P + 2 * of_J) * self.probes.element_size())

    # directions

    def widen(self, z: Tensor) -> bool:
        """Add directions (k, P); return whether any was new and the order of examples is the
        same."""
        z = z / dots(z, z).sqrt().clamp_min(1e-300)[:, None].to(z)
        for _ in range(2):
            for block in self.blocks:
                add_combined(z, overlap(z, block), block, -1)
            # shorter ones are rounding; on five tables, twice or half of it does nothing
            z, _ = orthonormalise(z, 1e-4)
        return len(z) > 0 and self.add(z)

    def add(self, z: Tensor) -> bool:
        """Add an orthonormal block, by a pass for J z; return whether the order of examples is the
        same."""
        w, problem, sites = self.prior.scale * z, self._problem, self.sites
        take = None if sites is None else partial(sites.take, problem)
        sites_of_each = 1 if sites is None else sites.most
        if self.rows is None and (pushed := problem.features(take)) is not None:
            outputs = gathered(problem, pushed, 1, sites_of_each)
            if outputs is not None and problem.data.keeps_order:
                self._features = outputs.Jw[0].clone()
                self.rows = outputs._replace(Jw=outputs.Jw[:0].clone())
        if self._features is not None:
            shape, sizes = (len(w), self.rows.f.shape[-1], -1), self.prior.layout.sizes
            table = torch.cat([part.view(shape).permute(2, 1, 0) for part in w.split(sizes, 1)])
            self.stored.append(table.reshape(-1, len(w)).to(self._features))
        else:
            outputs = gathered(problem, problem.push_forward(w, take), len(w), sites_of_each)
            if outputs is None or not problem.data.keeps_order:
                return False
            self.rows = self.rows or outputs._replace(Jw=outputs.Jw[:0].clone())
            self.stored.append(outputs.Jw.flatten(1).T.contiguous())
        self.blocks.append(z)
        self.xi = torch.cat([self.xi, gram(self.probes, z)], dim=1)
        self.size += len(z)
        return True

    def restart(self, coordinates: Tensor) -> Tensor:
        """Restrict the span to ξ and these coordinates, (k, m); return the new basis in the old,
        (m, r)."""
        turn: Tensor = torch.linalg.qr(torch.cat([self.xi, coordinates]).T)[0]
        self.blocks = [self.scaled(some) for some in turn.T.split(len(self.xi))]
        turned, start = self.stored[0].new_zeros(len(self.stored[0]), turn.shape[1]), 0
        for block in self.stored:
            turned.addmm_(block, turn[start : start + block.shape[1]].to(block))
            start += block.shape[1]
        self.stored, self.xi, self.size = [turned], self.xi @ turn, turn.shape[1]
        return turn

    # scaled weights

    def scaled(self, coordinates: Tensor, total: Tensor | None = None) -> Tensor:
        """Return Vᵀ c, shape (k, P), for coordinates (k, m), added to a total in place."""
        if total is None:
            total = self.probes.new_zeros(len(coordinates), self.probes.shape[1])
        parts = coordinates.split([*map(len, self.blocks)], dim=1)
        for block, some in zip(self.blocks, parts, strict=True):
            add_combined(total, some, block)
        return total

    def coordinates(self, z: Tensor) -> Tensor:
        """Return the coordinates V z of scaled weights (k, P), (k, m), in float64."""
        return torch.cat([overlap(z, block) for block in self.blocks], dim=1).double()

    def pull_weights(self, u: Tensor) -> Tensor:
        """Return Jᵀ u in scaled weights, (k, P), for u (N ... C, k), by half a pass, or by
        features."""
        shape, layout = self.rows.f.shape, self.prior.layout
        if self._features is None:
            per_example = u.T.reshape(u.shape[1], *shape)
            pulled = pull_back(self._problem, per_example, self.rows.share, self.sites)
            if not self._problem.data.keeps_order:
                raise DoesNotFit("examples change their order")
            return pulled.mul_(self.prior.scale)
        pulled = self._transposed(u).view(-1, shape[-1], u.shape[1])
        counts = [size // shape[-1] for size in layout.sizes]  # of the weight, and of the bias
        parts = [part.permute(2, 1, 0).flatten(1) for part in pulled.split(counts)]
        total: Tensor = self.rows.share.group.sum(torch.cat(parts, 1))
        return total.mul_(self.prior.scale)

    # outputs

    def push(self, coordinates: Tensor, exact: bool = False) -> Tensor:
        """Return J Vᵀ c, (N, ..., C, k), for coordinates c (k, m); in float64 if ``exact``."""
        like, start = self.stored[0], 0
        dtype = torch.float64 if exact else like.dtype
        total = like.new_zeros(len(like), len(coordinates), dtype=dtype)
        c = coordinates.T.to(total)
        for block in self.stored:
            total.addmm_(block.to(dtype), c[start : start + block.shape[1]])
            start += block.shape[1]
        return self._outputs(total).view(*self.rows.f.shape, len(coordinates))

    def pull(self, u: Tensor, start: int = 0) -> Tensor:
        """Return (J V)ᵀ u from direction ``start`` on, (k, m - start), for u (N ... C, k) of every
        rank."""
        u = u if self._features is None else self._transposed(u)
        parts, at = [u.new_zeros(u.shape[1], 0)], 0
        for block in self.stored:
            first = max(0, start - at)
            at += block.shape[1]
            if first < block.shape[1]:
                parts.append(u.T @ block[:, first:].to(u.dtype))
        total: Tensor = self.rows.share.group.sum(torch.cat(parts, 1))
        return total

    def ggn(self, H: Hessian, start: int, dtype: torch.dtype) -> Tensor:
        """Return (J V)ᵀ H J V from the block of direction ``start`` on, (m, m - start), in float64,
        of all ranks.

        By features it is Tᵀ (hᵀ H h T) for few columns, or many rows: in float64, or directions
        that hardly change the outputs are lost to rounding, and fits of complete spans do not come
        to rest.
        """
        m, features, at = self.size, self._features, 0
        if features is not None and (start or m > 6 * features.shape[-1]):
            columns = [self.xi.new_zeros(m, 0)]
            for block in self.stored:
                if at >= start:
                    of_h = torch.zeros_like(block, dtype=torch.float64)
                    for rows, part in self.parts([block.double()]):
                        of_h += self._transposed(H.product(part.to(dtype), rows).double(), rows)
                    columns.append(torch.cat([every.T.to(of_h) @ of_h for every in self.stored]))
                at += block.shape[1]
            G = torch.cat(columns, 1)
        else:
            G = self.xi.new_zeros(m, m - start)
            for rows, part in self.parts(self.stored):
                part = part.to(dtype)
                HJ = H.product(part[:, start:], rows)
                for i in range(0, m - start, 64):
                    lower = 0 if start else i  # of all, what is on and below the diagonal
                    G[lower:, i : i + 64] += part[:, lower:].T @ HJ[:, i : i + 64]
            G = G if start else G.tril() + G.tril(-1).T
        total: Tensor = self.rows.share.group.sum(G)
        return total

    def parts(self, blocks: list[Tensor]) -> Iterator[tuple[slice, Tensor]]:
        """Yield parts of the examples with J v of stored blocks, (n ... C, k), which fit into the
        cache if J V is stored."""
        outputs, width = self.rows.f.shape[1:].numel(), sum(block.shape[1] for block in blocks)
        step = max(1, (1 << (19 if self._features is None else 24)) // (outputs * max(width, 1)))
        for first in range(0, len(self.rows.f), step):
            rows = slice(first, first + step)
            if self._features is None:
                near = slice(first * outputs, (first + step) * outputs)
                yield rows, torch.cat([block[near] for block in blocks], 1)
            else:
                yield rows, self._outputs(torch.cat(blocks, 1), rows)

    def _outputs(self, table: Tensor, rows: slice = slice(None)) -> Tensor:
        """Return h T, (n ... C, k), of some examples; without features T itself, which is J V."""
        if self._features is None:
            return table
        h = self._features[rows].flatten(0, -2)
        return (h.to(table.dtype) @ table.view(h.shape[1], -1)).view(-1, table.shape[1])

    def _transposed(self, u: Tensor, rows: slice = slice(None)) -> Tensor:
        """Return hᵀ u, (D C, k), for u (n ... C, k) of these examples."""
        features = self._features
        assert features is not None
        h = features[rows].flatten(0, -2)
        pulled = u.reshape(len(h), self.rows.f.shape[-1] * u.shape[1]).T @ h.to(u.dtype)
        return pulled.T.reshape(-1, u.shape[1])
