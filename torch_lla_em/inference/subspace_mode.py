"""The mode from a recycled subspace: every direction v is kept with its J v over all rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.inference.linear_mode import LinearMode, Precondition
from torch_lla_em.inference.prior import Prior
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.problem import ImagedGGN, Problem, outputs, pull_back
from torch_lla_em.solvers import BlockLanczos, Newton, Operator, Space, combine

_MAX_DIRECTIONS = 300
# of the tolerance, for the minimum over the span
_WITHIN = 0.2
# of ‖v‖: what is shorter once the span is taken out is rounding
_NEW = 1e-2

_STATE = "_rows", "_bytes", "_own", "_images", "_point", "_step", "_coordinates", "_met"


class SubspaceMode:
    """argmin_w Σ_n loss(J_n w, y_n) + ½ ‖w‖²_Λ over a span, at no pass; each gradient widens it.

    The span is that of a Krylov basis, whose passes have told J v, and of own directions. It
    serves every Λ. Where memory is short it keeps the last point and the step to it alone, and
    each gradient then is a step of conjugate gradients.
    """

    def __init__(
        self,
        problem: Problem,
        prior: Prior,
        start: Tensor,
        memory: float,
        known: dict[str, Any] | None = None,
    ):
        self._prior, self._space, self._memory = prior, problem.space, memory
        self._lanczos: BlockLanczos | None = None
        self._imaged: ImagedGGN | None = None
        self._met = 0
        """Blocks of the Krylov basis that own directions are orthogonal to."""

        if known is not None:
            self._lanczos = self._imaged = None
            self.ready, self._follows = True, known["follows"]
            for name in _STATE:
                setattr(self, name, known[name])
            return
        live = (prior.scale > 0) * start
        length = self._space.norm(prior.unscaled(live)) or 1.0
        self._rows = outputs(problem, live[None])
        self.ready = self._rows is not None
        """Whether the rows allow it: they have the same shape, and so far the same order."""

        if self._rows is not None:
            self._bytes = self._rows.f.numel() * problem.dtype.itemsize
            self._own = prior.unscaled(live)[None] / length
            self._images = self._rows.Jw.flatten(1) / length
            self._point = self._step = torch.zeros_like(self._own), 0 * self._images
            self._coordinates = torch.zeros(1, dtype=torch.float64, device=self._own.device)

    def state(self) -> dict[str, Any]:
        """Return all that it goes on with, but the Krylov basis that it follows."""
        follows = self._lanczos is not None
        return {"follows": follows, **{name: getattr(self, name) for name in _STATE}}

    @property
    def room(self) -> int:
        """How many more directions fit."""
        held = len(self._images) + self._num_krylov
        return int(self._memory / self._bytes) - held

    def follow(self, lanczos: BlockLanczos, imaged: ImagedGGN, anew: bool = True) -> None:
        """Take a Krylov basis into the span, and what it grows by."""
        if anew:
            self._keep_points()
        elif not self._follows:
            return
        self._lanczos, self._imaged = lanczos, imaged

    def find(
        self,
        problem: Problem,
        precision: Tensor,
        tolerance: float,
        precondition: Precondition | None = None,
    ) -> LinearMode | None:
        """Return the mode; None where rows come in another order than before."""
        prior, space, passes, added = self._prior, self._space, 0.0, True
        deviation = prior.deviation(precision)
        while True:
            value, u = self.minimise(problem, precision, tolerance)
            (g,), f = pull_back(problem, u[None])
            passes += 0.5
            if not self._is_known(f):
                self.ready = False
                return None
            w = prior.scale * self._point[0][0]
            x = prior.whitened(w, precision)
            slope = deviation * g + x
            error = space.norm(slope) / max(space.norm(x), 1e-300)
            if error <= tolerance or not added or passes >= _MAX_DIRECTIONS:
                return LinearMode(w, value, error, passes, error <= tolerance)
            if precondition is not None and not self._num_krylov:
                slope = precondition(slope[None])[0]
            added = self._add(problem, prior.unscaled(deviation * slope)[None])
            passes += 0.5

    def minimise(
        self, problem: Problem, precision: Tensor, tolerance: float
    ) -> tuple[float, Tensor]:
        """Go to the minimum over the span; return Σ loss there, and its gradient in J w."""
        self._meet_krylov()
        loss, before = _SpanLoss(self, problem.likelihood, precision), self._coordinates
        solver = Newton(_WITHIN * tolerance, 10_000)
        if problem.likelihood.is_quadratic:
            solver = replace(solver, forcing=0.0)
        found = solver.minimise(loss, loss.start(), loss.precondition())
        self._coordinates = found.x @ loss.turn
        self._point = self._combined(self._coordinates)
        self._step = self._combined(self._coordinates - before)
        return found.loss, loss.slope(self._point[1][0])

    def squared_norm(self) -> float:
        """Return ‖w / scale‖² at the minimum last found."""
        return self._space.norm(self._point[0]) ** 2

    @property
    def _num_krylov(self) -> int:
        return 0 if self._imaged is None else sum(map(len, self._imaged.images[: self._met]))

    def _is_known(self, f: Tensor) -> bool:
        known = self._rows.f.flatten()
        return bool((f - known).norm() <= 1e-2 * known.norm())

    def _combined(self, coordinates: Tensor) -> tuple[Tensor, Tensor]:
        """Return Σ c v in scaled coordinates, (1, P), and J of it, (1, N C)."""
        krylov, own = coordinates[None].split([self._num_krylov, len(self._own)], dim=1)
        z, image = combine(own, self._own), combine(own, self._images)
        sizes = [len(block) for block in self._krylov_images()]
        for c, block, own_image in zip(
            krylov.split(sizes, dim=1), self._krylov_basis(), self._krylov_images()
        ):
            z += combine(c, block)
            image += combine(c, own_image)
        return z, image

    def _krylov_basis(self) -> list[Tensor]:
        return [] if self._lanczos is None else self._lanczos.basis[: self._met]

    def _krylov_images(self) -> list[Tensor]:
        return [] if self._imaged is None else self._imaged.images[: self._met]

    def _meet_krylov(self) -> None:
        """Take in what the Krylov basis has grown by, and it out of the own directions."""
        lanczos, imaged = self._lanczos, self._imaged
        if lanczos is None or imaged is None:
            return
        if not (lanczos.has_basis and imaged.keeps):
            imaged.stop()
            self._keep_points()
            return
        if self._met == lanczos.num_steps:
            return
        own, images = self._own.clone(), self._images.clone()
        krylov, rest = self._coordinates.split([self._num_krylov, len(own)])
        for block, image in zip(lanczos.basis[self._met :], imaged.images[self._met :]):
            within = self._space.overlap(own, block)
            own -= combine(within, block)
            images -= combine(within, image)
            krylov = torch.cat([krylov, rest @ within])
        self._met = lanczos.num_steps
        rest = self._orthonormalise(own, images, rest)
        self._coordinates = torch.cat([krylov, rest])

    def _orthonormalise(self, own: Tensor, images: Tensor, coordinates: Tensor) -> Tensor:
        """Make these the own directions, orthonormal; return the coordinates among them."""
        values, vectors = torch.linalg.eigh(self._space.gram(own, own))
        kept = values > _NEW**2
        roots = values[kept].sqrt()
        turn = (vectors[:, kept] / roots).T
        self._own, self._images = combine(turn, own), combine(turn, images)
        return coordinates @ vectors[:, kept] * roots

    def _keep_points(self) -> None:
        """Keep of the span the last point, and the step to it, alone."""
        self._met, self._lanczos, self._imaged = 0, None, None
        (point, image), (step, moved), space = self._point, self._step, self._space
        length = space.norm(point)
        if not length:  # nothing was found yet
            self._coordinates = torch.zeros_like(self._coordinates[: len(self._own)])
            return
        own, images = point / length, image / length
        along = space.gram(step, own)
        step, moved = step - combine(along, own), moved - combine(along, images)
        rest = space.norm(step)
        self._own, self._images = own, images
        if rest > _NEW**2 * space.norm(self._step[0]):
            self._own = torch.cat([own, step / rest])
            self._images = torch.cat([images, moved / rest])
        self._coordinates = self._coordinates.new_zeros(len(self._own))
        self._coordinates[0] = length

    def _add(self, problem: Problem, z: Tensor) -> bool:
        """Widen the span by a direction (1, P); return whether it was new."""
        if self.room < 1:
            self._keep_points()
        z = z / max(self._space.norm(z), 1e-300)
        for _ in range(2):
            for block in [*self._krylov_basis(), self._own]:
                z = z - combine(self._space.overlap(z, block), block)
            length = self._space.norm(z)
            if length < _NEW**2:
                return False
            z = z / length
        found = outputs(problem, self._prior.scale * z)
        if found is None:
            return False
        self._own = torch.cat([self._own, z])
        self._images = torch.cat([self._images, found.Jw.flatten(1)])
        self._coordinates = torch.cat([self._coordinates, self._coordinates.new_zeros(1)])
        return True


class _SpanLoss:
    """Σ loss(J w, y) over the span, in coordinates x in which the prior is ½ ‖x‖²."""

    def __init__(self, mode: SubspaceMode, likelihood: Likelihood, precision: Tensor):
        self._mode, self._likelihood, self.space = mode, likelihood, Space()
        self._targets, self._shape = mode._rows.targets, mode._rows.f.shape
        self._mask = likelihood.mask(self._targets)
        self._blocks = [*mode._krylov_images(), mode._images]
        self._sizes = [len(block) for block in self._blocks]
        self.rounding = 10 * torch.finfo(mode._images.dtype).eps
        if precision.dim():  # there is no Krylov basis then
            weights = mode._prior.layout.expand(precision)
            metric = mode._space.gram(mode._own, mode._own, weights)
        else:
            metric = precision * torch.eye(
                sum(self._sizes), dtype=mode._coordinates.dtype, device=mode._coordinates.device
            )
        self._root = torch.linalg.cholesky(metric)
        identity = torch.eye(len(metric), dtype=metric.dtype, device=metric.device)
        self.turn = torch.linalg.solve_triangular(self._root, identity, upper=False)

    def start(self) -> Tensor:
        """Return where the last minimum was."""
        return self._mode._coordinates @ self._root

    def value_and_gradient(self, x: Tensor) -> tuple[float, Tensor]:
        """Return the loss and its gradient."""
        f = self._push(x).view(self._shape)
        value = -self._likelihood.log_prob(f, self._targets).sum(dtype=torch.float64).item()
        return value, self._pull(self.slope(f)[None])[0]

    def hessian(self, x: Tensor) -> Operator:
        """Return the Hessian at x as a product."""
        f = self._push(x).view(self._shape)
        return Operator(lambda v: self._pull(self._curved(f, self._push(v))))

    def slope(self, f: Tensor) -> Tensor:
        """Return the gradient of the loss in the outputs, (N, ..., C)."""
        return self._masked(self._likelihood.gradient(f.view(self._shape), self._targets))

    def precondition(self) -> Precondition:
        """Return the inverse of I + G at the network's outputs, but for what couples both parts."""
        images, f = self._mode._images, self._mode._rows.f
        curved = self._curved(f, images).flatten(1)
        G = Space().gram(images, curved)
        if self._mode._num_krylov:
            G = torch.block_diag(self._mode._lanczos.tridiagonal(), G)
        matrix = self.turn @ (0.5 * (G + G.T)) @ self.turn.T
        values, vectors = torch.linalg.eigh(matrix)
        inverse = vectors / (1 + values.clamp_min(0)) @ vectors.T  # rounding may bring θ < 0
        return lambda rows: rows @ inverse

    def _curved(self, f: Tensor, u: Tensor) -> Tensor:
        return self._masked(self._likelihood.hessian_product(f, u.view(-1, *self._shape)))

    def _masked(self, u: Tensor) -> Tensor:
        return u if self._mask is None else u * self._mask.unsqueeze(-1)

    def _push(self, x: Tensor) -> Tensor:
        """Return J w over all rows, (k, N C)."""
        parts = (x.view(-1, x.shape[-1]) @ self.turn).split(self._sizes, dim=1)
        total: Any = sum(combine(c, block) for c, block in zip(parts, self._blocks))
        return total

    def _pull(self, u: Tensor) -> Tensor:
        """Return Jᵀ u in the coordinates, (k, m)."""
        u = u.flatten(1)
        products = [(u @ block.T.to(u)).double() for block in self._blocks]
        return torch.cat(products, dim=1) @ self.turn.T
