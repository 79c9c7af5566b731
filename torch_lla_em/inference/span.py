"""A span of directions v in parameter space, stored with J v for all examples of this rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_lla_em.data import Batch, Share
from torch_lla_em.inference.prior import Prior
from torch_lla_em.inference.span_outputs import SpanOutputs, most_stored
from torch_lla_em.problem import Outputs, Problem, Sites, gathered, pull_back
from torch_lla_em.runtime import TensorList, new_key
from torch_lla_em.solvers import add_combined, dots, gram, orthonormalise, overlap

# relative norm outside of the span below which a direction is only rounding
_NEW = 1e-4
# copies of J V that are held at once when a block of directions is added
_COPIES_OF_J = 2
# precisions of half the size, in which a basis is stored when memory is short
_HALF = {torch.float64: torch.float32, torch.float32: torch.bfloat16}


class Span:
    """An orthonormal basis V of scaled parameters z = w / scale, with J V for all examples.

    The basis is kept in the blocks that it grew by, so that it is never copied. When memory is short
    they are stored in half precision. J V, coordinates and residuals belong to the stored directions
    and are computed in the model's precision, so error bounds hold as they are. Rounding is random in
    every entry, and leaves the basis orthonormal to about 1e-5 for the many weights of such fits.
    """

    def __init__(
        self,
        problem: Problem,
        prior: Prior,
        xi: Tensor,
        memory: float,
        sites: Sites | None = None,
    ):
        self._problem, self.prior, self.memory = problem, prior, memory
        self.sites = sites
        """Which sites of dense outputs are the rows; None: all examples, with all their sites."""

        self.noise = xi
        """ξ, shape (K, P)."""

        self.rows: Outputs | None = None
        """f and targets of this rank's examples; None if their order changes."""

        self._keys = new_key(), new_key(), new_key(), new_key()
        self._blocks: list[Tensor] = []
        self._dtype = xi.dtype
        self._at_once: int | None = None
        """Number of directions that are added at a time when memory is short; None: all."""

        self.outputs: SpanOutputs | None = None
        """J V; None before the first directions."""

        self.xi = xi.new_zeros(len(xi), 0, dtype=torch.float64)
        """The coordinates of ξ, shape (K, m)."""

    def keep(self, num_samples: int) -> None:
        """Keep the first samples only."""
        self.noise, self.xi = self.noise[:num_samples], self.xi[:num_samples]

    def state(self) -> dict[str, Any]:
        """Return the state of the span, for ``restore``."""
        outputs, numbers, known = self.of_all, self.share.numbers, self.rows
        h = [] if outputs.features is None else [outputs.features]
        of_all = [known.f, known.targets, known.weights]
        state = {
            "basis": TensorList(self._keys[0], list(self._blocks)),
            "J": TensorList(self._keys[1], list(outputs.blocks), None if h else numbers),
            "features": TensorList(self._keys[2], h, numbers),
            "rows": TensorList(
                self._keys[3], [part for part in of_all if part is not None], numbers
            ),
        }
        return {**state, "xi": self.xi, "memory": self.memory}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        basis, J, h, rows = (state[name] for name in ("basis", "J", "features", "rows"))
        self._keys, self._blocks = (basis.key, J.key, h.key, rows.key), list(basis.parts)
        data, (f, targets, *weights) = self._problem.data, rows.parts
        share = Share(rows.numbers, self._rows_of_each * data.facts.num_rows, data.group)
        self.rows = Outputs(share, f, targets, f[None][:0], *weights)
        self.memory = state["memory"]
        self.outputs = SpanOutputs(share, f.shape, next(iter(h.parts), None), self._most_stored)
        for block in J.parts:
            self.outputs.add_block(block)
        self.xi = state["xi"]
        self.keep(len(self.xi))
        if self._blocks[0].dtype != self.noise.dtype:
            self.store_in_half()

    @property
    def size(self) -> int:
        """m."""
        return self.xi.shape[1]

    @property
    def share(self) -> Share:
        """The examples of this rank, once there are directions."""
        if self.rows is None:
            raise AttributeError("The span has no directions yet.")
        return self.rows.share

    @property
    def of_all(self) -> SpanOutputs:
        """J V, once there are directions."""
        if self.outputs is None:
            raise AttributeError("The span has no directions yet.")
        return self.outputs

    @property
    def is_complete(self) -> bool:
        """Whether the basis spans all parameters that change an output."""
        return self.size >= int(self.prior.num_weights().sum().item())

    def bytes_of(self, directions: int) -> float:
        """Return the peak memory of this number of directions with their J v, in bytes."""
        P, itemsize = self.noise.shape[1], self.noise.element_size()
        of_J = _COPIES_OF_J * directions * self.num_outputs
        if self.outputs is not None and self.outputs.features is not None:
            stored = min(directions * self.num_outputs, self._most_stored)
            of_J = _COPIES_OF_J * directions * P + stored
        return float(directions * P * self._dtype.itemsize + of_J * itemsize)

    @property
    def _most_stored(self) -> float:
        return most_stored(self.memory, self.noise.element_size())

    @property
    def num_outputs(self) -> float:
        """The largest number of outputs at which a rank stores J V."""
        data = self._problem.data
        every = data.facts.num_outputs if self.sites is None else self.sites.outputs
        return every * data.largest_share

    def has_room(self, directions: int) -> bool:
        """Whether there is memory for this number of further directions."""
        return self.bytes_of(self.size + directions) <= self.memory

    def store_in_half(self) -> None:
        """Store directions in half of the model's precision, and add a few at a time."""
        self._dtype = _HALF.get(self.noise.dtype, self.noise.dtype)
        self._at_once = max(1, len(self.noise) // 4)

    def restart(self, coordinates: Tensor) -> Tensor:
        """Restrict the span to ξ and these coordinates, (k, m); return the new basis in the old, (m, r)."""
        turn: Tensor = torch.linalg.qr(torch.cat([self.xi, coordinates]).T)[0]
        self._blocks = [self.scaled(some).to(self._dtype) for some in turn.T.split(len(self.xi))]
        self.of_all.turn(turn)
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

    def widen(self, *directions: Tensor) -> bool:
        """Add directions (k, P); return whether any was new and the order of examples is the same."""
        size, grew = self._at_once, False
        parts = directions if len(directions) == 1 else [torch.cat(directions)]
        if size is not None:
            parts = [part for each in directions for part in each.split(size)]
        for z in parts:
            z = z / dots(z, z).sqrt().clamp_min(1e-300)[:, None].to(z)
            for _ in range(2):
                for block in self._blocks:
                    add_combined(z, overlap(z, block), block, -1)
                z, _ = orthonormalise(z, _NEW)
            if not len(z):
                continue
            block = z.to(self._dtype)
            w = self.prior.scale * block
            if self.outputs is None:
                self._begin()
            if self.outputs is None or self.outputs.features is None:
                found = self._gathered(self._problem.push_forward(w, self.part), len(w))
                if found is None or not (self.rows is None or self.rows.is_followed_by(found)):
                    continue
                self.rows = self.rows or found._replace(Jw=found.Jw[:0].clone())
                self.outputs = self.outputs or SpanOutputs(found.share, found.f.shape)
                self.outputs.add(found.Jw)
            else:
                self._problem.cost.add(0.5 * len(w))
                self.outputs.add_weights(w.to(self.outputs.features), self.prior.layout)
            self._blocks.append(block)
            self.xi = torch.cat([self.xi, gram(self.noise, block)], dim=1)
            grew = True
        return grew

    def _begin(self) -> None:
        """Take the features of a last layer, which make all other passes over the data superfluous."""
        problem, size = self._problem, self._problem.data.facts.num_rows
        pushed = problem.features(self.part)
        found = None if pushed is None else self._gathered(pushed, 1)
        if found is not None and size:
            self.rows = found._replace(Jw=found.Jw[:0].clone())
            self.outputs = SpanOutputs(found.share, found.f.shape, found.Jw[0], self._most_stored)

    def pulled(self, u: Tensor) -> Tensor | None:
        """Return Jᵀ u in scaled weights, (k, P), for u (N ... C, k), by half a pass."""
        problem, outputs = self._problem, self.of_all
        if outputs.features is not None:
            problem.cost.add(0.5 * u.shape[1])
            return outputs.pull_weights(u, self.prior.layout).mul_(self.prior.scale)
        if self.rows is None:
            raise AttributeError("The span has no directions yet.")
        u = u.T.reshape(u.shape[1], *outputs.shape)
        Ju = pull_back(problem, u, self.rows, self.sites)
        return None if Ju is None else Ju.mul_(self.prior.scale)

    def coordinates(self, z: Tensor) -> Tensor:
        """Return the coordinates V z of scaled weights (k, P), (k, m)."""
        return torch.cat([overlap(z, block) for block in self._blocks], dim=1)

    def part(self, batch: Batch, f: Tensor, Jw: Tensor) -> tuple[Batch, Tensor, Tensor]:
        """Return a batch, its f and its J w, or those of its rows if these are sites."""
        if self.sites is None:
            return batch, f, Jw
        return self.sites.take(self._problem, batch, f, Jw)

    def _gathered(self, pushed: list[tuple[Batch, Tensor, Tensor]], columns: int) -> Outputs | None:
        return gathered(self._problem, pushed, columns, self._rows_of_each)

    @property
    def _rows_of_each(self) -> int:
        """The largest number of rows of an example."""
        return 1 if self.sites is None else self.sites.most
