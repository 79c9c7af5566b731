"""Directions of weight space beside their J v over all rows: over their span nothing takes a pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_lla_em.inference.prior import Prior
from torch_lla_em.problem import Outputs, Problem, outputs, pull_back
from torch_lla_em.runtime import Grown, new_key
from torch_lla_em.solvers import add_combined, combine

# relative norm outside the span below which a direction is rounding
_NEW = 1e-4
# while the basis grows it is held twice; J V thrice where G is taken
_COPIES, _COPIES_OF_J = 2, 3


class Span:
    """An orthonormal basis V of scaled weights z = w / scale, beside J V."""

    def __init__(self, problem: Problem, prior: Prior, xi: Tensor, memory: float):
        self._problem, self._prior, self.memory = problem, prior, memory
        self.noise = xi
        """ξ, shape (K, P)."""

        self.rows: Outputs | None = None
        """f and targets of all rows; None where rows differ."""

        self._keys = new_key(), new_key()
        self._sizes: list[int] = []
        self._basis = xi[:0]
        self.J = xi.new_zeros(0, 0)
        """J V, shape (N C, m)."""

        self.xi = xi.new_zeros(len(xi), 0, dtype=torch.float64)
        """The coordinates of ξ, shape (K, m)."""

    def state(self) -> dict[str, Any]:
        """Return all that it goes on with."""
        parts = self._basis.split(self._sizes), self.J.split(self._sizes, dim=1)
        basis, J = (Grown(key, list(part)) for key, part in zip(self._keys, parts))
        return {"basis": basis, "J": J, "rows": self.rows, "xi": self.xi, "memory": self.memory}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        basis, J = state["basis"], state["J"]
        self._keys, self._sizes = (basis.key, J.key), [len(part) for part in basis.parts]
        self._basis, self.J = torch.cat(basis.parts), torch.cat(J.parts, dim=1)
        self.rows, self.xi, self.memory = state["rows"], state["xi"], state["memory"]
        self.noise = self.noise[: len(self.xi)]

    @property
    def basis(self) -> Tensor:
        """V, shape (m, P)."""
        return self._basis

    @property
    def size(self) -> int:
        """m."""
        return len(self._basis)

    @property
    def is_complete(self) -> bool:
        """Whether the basis spans all weights that move an output."""
        return self.size >= int(self._prior.num_weights().sum().item())

    def bytes_of(self, directions: int) -> float:
        """Return the most that so many directions take with their J v, copies for a while included."""
        entries = _COPIES * self.noise.shape[1] + _COPIES_OF_J * self._problem.data.num_outputs
        return float(directions * entries * self.noise.element_size())

    def has_room(self, directions: int) -> bool:
        """Whether the memory allows so many directions more."""
        return self.bytes_of(self.size + directions) <= self.memory

    def restart(self, coordinates: Tensor) -> Tensor:
        """Keep the span of ξ and of these coordinates (k, m); return the new basis in the old, (m, r)."""
        turn, _ = torch.linalg.qr(torch.cat([self.xi, coordinates]).T)
        self._basis, self.J = combine(turn.T, self._basis), self.J @ turn.to(self.J)
        self.xi = self.xi @ turn
        self._keys, self._sizes = (new_key(), new_key()), [len(self._basis)]
        return turn

    def weights(self, coordinates: Tensor) -> Tensor:
        """Return the weights (k, P) of coordinates (k, m)."""
        return self._prior.scale * self.scaled(coordinates)

    def scaled(self, coordinates: Tensor) -> Tensor:
        """Return Vᵀ c, shape (k, P)."""
        return combine(coordinates, self._basis)

    def metric(self, precision: Tensor) -> Tensor:
        """Return V Λ Vᵀ, (m, m), for a λ of all weights or one for each tensor."""
        if not precision.dim():
            return precision * torch.eye(self.size, dtype=torch.float64, device=self.J.device)
        weights = self._prior.layout.expand(precision)
        return self._problem.space.gram(self._basis, self._basis, weights)

    def widen(self, z: Tensor) -> bool:
        """Take in directions (k, P); return whether any was new, and rows are in order."""
        space = self._problem.space
        z = z / space.dots(z, z).sqrt().clamp_min(1e-300)[:, None].to(z)
        for _ in range(2):
            if self.size:
                add_combined(z, space.overlap(z, self._basis), self._basis, -1)
            z, _ = space.orthonormalise(z, _NEW)
        if not len(z):
            return False
        found = outputs(self._problem, self._prior.scale * z)
        if found is None or not self._in_order(found.f):
            return False
        self.rows = self.rows or found._replace(Jw=found.Jw[:0].clone())
        self._sizes.append(len(z))
        J = found.Jw.flatten(1).T
        self.J = torch.cat([self.J, J], dim=1) if self.size else J.contiguous()
        self._basis = torch.cat([self._basis, z])
        self.xi = torch.cat([self.xi, space.gram(self.noise, z)], dim=1)
        return True

    def pulled(self, u: Tensor) -> Tensor | None:
        """Return Jᵀ u in scaled weights, (k, P), for u (k, N, ..., C), by half a pass."""
        Ju, f = pull_back(self._problem, u)
        return self._prior.scale * Ju if self._in_order(f.view_as(self.rows.f)) else None

    def _in_order(self, f: Tensor) -> bool:
        if self.rows is None:
            return True
        return bool((f - self.rows.f).norm() <= 1e-2 * self.rows.f.norm())
