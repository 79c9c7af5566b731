"""A span of directions v in parameter space, stored with J v for all examples of this rank."""

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

    Basis and J V are stored in blocks, one for each extension, so that they are never copied.
    """

    def __init__(
        self, problem: Problem, prior: Prior, xi: Tensor, memory: float, sites: Sites | None = None
    ):
        self._problem, self.prior, self.memory, self.probes = problem, prior, memory, xi
        """The probes are ξ, (K, P)."""

        self.sites = sites
        """The sites of dense outputs that are used; None: all examples, with all their sites."""

        self.blocks: list[Tensor] = []
        """The blocks of V, each (k, P)."""

        self.stored: list[Tensor] = []
        """The blocks of J V, each (N ... C, k)."""

        self.rows: Any = None
        """f, targets and weights of this rank's examples, once there are directions."""

        self.xi, self.size = xi.new_zeros(len(xi), 0, dtype=torch.float64), 0
        """The coordinates of ξ, (K, m), and m."""

        self._live = int((prior.scale > 0).sum())
        of_data = problem.data
        every = of_data.facts.num_outputs if sites is None else sites.outputs
        self.entries = every * of_data.largest_share
        """The number of outputs of the rank with the most examples."""

    @property
    def is_complete(self) -> bool:
        """Whether the basis spans all parameters that change an output."""
        return self.size >= self._live

    def bytes_of(self, directions: int) -> float:
        """Return the peak memory of this number of directions in bytes; their J v counts twice."""
        return float(
            directions * (self.probes.shape[1] + 2 * self.entries) * self.probes.element_size()
        )

    # directions

    def widen(self, z: Tensor) -> bool:
        """Add directions (k, P). Return whether any of them was new and the order of examples was
        the same."""
        z = z / dots(z, z).sqrt().clamp_min(1e-300)[:, None].to(z)
        for _ in range(2):
            for block in self.blocks:
                add_combined(z, overlap(z, block), block, -1)
            # shorter ones are rounding; on five tables, twice or half this value changed nothing
            z = orthonormalise(z, floor=1e-4)[0]
        return len(z) > 0 and self.add(z)

    def add(self, z: Tensor) -> bool:
        """Add an orthonormal block, by a pass for J z. Return whether the order of examples was the
        same."""
        w, problem, sites = self.prior.scale * z, self._problem, self.sites
        take = None if sites is None else partial(sites.take, problem)
        sites_of_each = 1 if sites is None else sites.most
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
        """Return Jᵀ u in scaled weights, (k, P), for u (N ... C, k), by half a pass."""
        per_example = u.T.reshape(u.shape[1], *self.rows.f.shape)
        pulled = pull_back(self._problem, per_example, self.rows.share, self.sites)
        if not self._problem.data.keeps_order:
            raise DoesNotFit("examples change their order")
        return pulled.mul_(self.prior.scale)

    # outputs

    def push(
        self, coordinates: Tensor, exact: bool = False, rows: slice | Tensor = slice(None)
    ) -> Tensor:
        """Return J Vᵀ c of these examples, (n, ..., C, k), for coordinates c (k, m); in float64 if
        ``exact``."""
        like, start = self.stored[0], 0
        dtype = torch.float64 if exact else like.dtype
        total = like.new_zeros(len(like), len(coordinates), dtype=dtype)
        c = coordinates.T.to(total)
        for block in self.stored:
            total.addmm_(block.to(dtype), c[start : start + block.shape[1]])
            start += block.shape[1]
        return total.view(*self.rows.f.shape, len(coordinates))[rows]

    def pull(self, u: Tensor, start: int = 0) -> Tensor:
        """Return (J V)ᵀ u from direction ``start`` on, (k, m - start), for u (N ... C, k) of every
        rank."""
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

        For a complete span it is computed in float64. Otherwise directions that hardly change the
        outputs would be lost to rounding, and the fit would not converge.
        """
        m, exact = self.size, torch.float64 if self.is_complete else dtype
        G = self.xi.new_zeros(m, m - start)
        for rows, part in self.parts():
            part = part.to(dtype)
            HJ = H.product(part[:, start:], rows).to(exact)
            part = part.to(exact)
            for i in range(0, m - start, 64):
                lower = 0 if start else i  # a whole G needs only its lower triangle
                G[lower:, i : i + 64] += part[:, lower:].T @ HJ[:, i : i + 64]
        G = G if start else G.tril() + G.tril(-1).T
        total: Tensor = self.rows.share.group.sum(G)
        return total

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield parts of the examples that fit into the cache, with their J V, (n ... C, m)."""
        outputs = self.rows.f.shape[1:].numel()
        step = max(1, (1 << 19) // (outputs * max(self.size, 1)))
        for first in range(0, len(self.rows.f), step):
            near = slice(first * outputs, (first + step) * outputs)
            parts = [block[near] for block in self.stored]
            yield slice(first, first + step), torch.cat(parts, 1)
