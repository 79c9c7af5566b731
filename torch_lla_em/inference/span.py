"""A span of directions v in parameter space, stored with J v for all examples of this rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_lla_em.data import Batch, Share
from torch_lla_em.inference.outputs import SpanOutputs
from torch_lla_em.inference.prior import Prior
from torch_lla_em.problem import Outputs, Problem, Sites, gathered, pull_back
from torch_lla_em.runtime import TensorList, new_key
from torch_lla_em.solvers import add_combined, dots, gram, orthonormalise, overlap

NEW = 1e-4
"""Relative norm outside of the span below which a direction is only rounding."""


class NoSpan(Exception):
    """The span cannot be stored: there is no memory for it, or the order of examples changes."""


class Span:
    """An orthonormal basis V of scaled parameters z = w / scale, with J V for all examples.

    The basis is kept in the blocks that it grew by, so that it is never copied.
    """

    def __init__(
        self, problem: Problem, prior: Prior, xi: Tensor, memory: float, sites: Sites | None = None
    ):
        self._problem, self.prior, self.memory, self.noise = problem, prior, memory, xi
        """The noise is ξ, (K, P)."""

        self.sites = sites
        """Which sites of dense outputs are the rows; None: all examples, with all their sites."""

        self._keys = new_key(), new_key(), new_key(), new_key()
        self._blocks: list[Tensor] = []
        self._rows: Outputs | None = None
        self._outputs: SpanOutputs | None = None
        self.xi = xi.new_zeros(len(xi), 0, dtype=torch.float64)
        """The coordinates of ξ, (K, m)."""

    def keep(self, noise: Tensor) -> None:
        """Take another ξ, before there are directions."""
        self.noise, self.xi = noise, self.xi[: len(noise)]

    @property
    def size(self) -> int:
        """m."""
        return self.xi.shape[1]

    @property
    def rows(self) -> Outputs:
        """f, targets and weights of this rank's examples, once there are directions."""
        if self._rows is None:
            raise NoSpan
        return self._rows

    @property
    def outputs(self) -> SpanOutputs:
        """J V, once there are directions."""
        if self._outputs is None:
            raise NoSpan
        return self._outputs

    @property
    def is_complete(self) -> bool:
        """Whether the basis spans all parameters that change an output."""
        return self.size >= int(self.prior.num_weights().sum().item())

    def has_room(self, directions: int) -> bool:
        """Whether there is memory for this number of further directions."""
        return self.bytes_of(self.size + directions) <= self.memory

    def bytes_of(self, directions: int) -> float:
        """Return the peak memory of this number of directions, with twice their J v, in bytes."""
        of_data, P = self._problem.data, self.noise.shape[1]
        of_J = (
            of_data.facts.num_outputs if self.sites is None else self.sites.outputs
        ) * of_data.largest_share
        if self._outputs is not None and self._outputs.features is not None:
            of_J = P  # T in place of J V, for which there is half of the memory
        return float(directions * (P + 2 * of_J) * self.noise.element_size())

    def widen(self, *directions: Tensor) -> bool:
        """Add directions (k, P); return whether any was new and the order of examples is the same."""
        z = directions[0] if len(directions) == 1 else torch.cat(directions)
        z = z / dots(z, z).sqrt().clamp_min(1e-300)[:, None].to(z)
        for _ in range(2):
            for block in self._blocks:
                add_combined(z, overlap(z, block), block, -1)
            z, _ = orthonormalise(z, NEW)
        if not len(z):
            return False
        w, problem = self.prior.scale * z, self._problem
        if self._outputs is None:
            self._take_features()
        if self._outputs is not None and self._outputs.features is not None:
            problem.cost.add(0.5 * len(w))
            self._outputs.add(self._outputs.table(w, self.prior.layout))
        else:
            found = self._gathered(problem.push_forward(w, self._take), len(w))
            if found is None or not (self._rows is None or self._rows.is_followed_by(found)):
                return False
            self._rows = self._rows or found._replace(Jw=found.Jw[:0].clone())
            self._outputs = self._outputs or SpanOutputs(found.share, found.f.shape)
            self._outputs.add(found.Jw.flatten(1).T.contiguous())
        self._blocks.append(z)
        self.xi = torch.cat([self.xi, gram(self.noise, z)], dim=1)
        return True

    def _take_features(self) -> None:
        """Take the features of a last layer, which make all other passes over the data superfluous."""
        problem = self._problem
        pushed = problem.features(self._take)
        found = None if pushed is None else self._gathered(pushed, 1)
        if found is not None:
            self._rows = found._replace(Jw=found.Jw[:0].clone())
            self._outputs = SpanOutputs(found.share, found.f.shape, found.Jw[0], self.memory / 2)

    def _take(self, batch: Batch, f: Tensor, Jw: Tensor) -> tuple[Batch, Tensor, Tensor]:
        """Return what is kept of a batch, its outputs and J w, (K, B, ..., C), or features."""
        return (
            (batch, f, Jw) if self.sites is None else self.sites.take(self._problem, batch, f, Jw)
        )

    def _gathered(self, pushed: list[tuple[Batch, Tensor, Tensor]], columns: int) -> Outputs | None:
        return gathered(
            self._problem, pushed, columns, 1 if self.sites is None else self.sites.most
        )

    def pulled(self, u: Tensor) -> Tensor:
        """Return Jᵀ u in scaled weights, (k, P), for u (N ... C, k), by half a pass."""
        if self.outputs.features is not None:
            self._problem.cost.add(0.5 * u.shape[1])
            return self.outputs.pull_weights(u, self.prior.layout).mul_(self.prior.scale)
        found = pull_back(
            self._problem, u.T.reshape(u.shape[1], *self.outputs.shape), self.rows, self.sites
        )
        if found is None:
            raise NoSpan
        return found.mul_(self.prior.scale)

    def restart(self, coordinates: Tensor) -> Tensor:
        """Restrict the span to ξ and these coordinates, (k, m); return the new basis in the old, (m, r)."""
        turn: Tensor = torch.linalg.qr(torch.cat([self.xi, coordinates]).T)[0]
        self._blocks = [self.scaled(some) for some in turn.T.split(len(self.xi))]
        self.outputs.turn(turn)
        self.xi, self._keys = self.xi @ turn, (new_key(), new_key(), *self._keys[2:])
        return turn

    def weights(self, coordinates: Tensor) -> Tensor:
        """Return the weights (k, P) of coordinates (k, m)."""
        return self.scaled(coordinates).mul_(self.prior.scale)

    def scaled(self, coordinates: Tensor) -> Tensor:
        """Return Vᵀ c, shape (k, P)."""
        total = self.noise.new_zeros(len(coordinates), self.noise.shape[1])
        self.add_scaled(total, coordinates)
        return total

    def add_scaled(self, total: Tensor, coordinates: Tensor) -> None:
        """Add Vᵀ c to a total, (k, P), in place."""
        for block, some in zip(self._blocks, coordinates.split([*map(len, self._blocks)], dim=1)):
            add_combined(total, some, block)

    def coordinates(self, z: Tensor) -> Tensor:
        """Return the coordinates V z of scaled weights (k, P), (k, m), in float64."""
        return torch.cat([overlap(z, block) for block in self._blocks], dim=1).double()

    def state(self) -> dict[str, Any]:
        """Return the state of the span, for ``restore``."""
        numbers, known, J = self.rows.share.numbers, self.rows, self.outputs
        h = [] if J.features is None else [J.features]
        of_all = [part for part in (known.f, known.targets, known.weights) if part is not None]
        return {
            "basis": TensorList(self._keys[0], list(self._blocks)),
            "J": TensorList(self._keys[1], list(J.stored), None if h else numbers),
            "features": TensorList(self._keys[2], h, numbers),
            "rows": TensorList(self._keys[3], of_all, numbers),
            "xi": self.xi,
            "memory": self.memory,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        basis, J, h, rows = (state[name] for name in ("basis", "J", "features", "rows"))
        self._keys, self._blocks = (basis.key, J.key, h.key, rows.key), list(basis.parts)
        data, (f, targets, *weights) = self._problem.data, rows.parts
        each = 1 if self.sites is None else self.sites.most
        share = Share(rows.numbers, each * data.facts.num_rows, data.group)
        self._rows = Outputs(share, f, targets, f[None][:0], *weights)
        self.xi, self.memory = state["xi"], state["memory"]
        self.noise = self.noise[: len(self.xi)]
        self._outputs = SpanOutputs(share, f.shape, next(iter(h.parts), None), self.memory / 2)
        for block in J.parts:
            self._outputs.add(block)
