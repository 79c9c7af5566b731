"""The problem: linear model, likelihood and data, as products that take one pass each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import Batch, Data, map_tensors
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.linear_model import LinearModel
from torch_lla_em.noise import normal

_EPSILON_STREAM = 1
_GROUP_ROWS = 32
# rounding of a batch against its pieces, well below what another batch does to a row
_SPLIT_ERROR = 1e-2

Cotangent = Callable[[Batch, Tensor, Tensor], Tensor]
BatchProduct = Callable[[Tensor], Tensor]


class Cost:
    """What has been spent, in columns pushed through the data (K for a K-column pass)."""

    def __init__(self) -> None:
        self.columns = 0


class NoiseFeatures(NamedTuple):
    """The part of the stochastic prior that the data determine."""

    eta: Tensor
    """η_k = Σ_n J_nᵀ S_n ε_nk ~ N(0, G), shape (K, P)."""

    squares: Tensor
    """The expected squared feature s², shape (P,)."""


class EarlierRows(NamedTuple):
    """What is known of the first rows of the data from an earlier fit."""

    num_rows: int
    num_outputs: int

    features: NoiseFeatures
    """Theirs, under the same seed and likelihood."""


class Problem:
    """Σ_n loss(J_n w, y_n) over the data, its gradient, and products with G = Σ_n J_nᵀ H_n J_n.

    H is taken at the network's outputs, or at J w for the ``curvature_point`` w. All
    vectors here are in weight space; solvers see them through ``operators.py``.
    """

    def __init__(self, linear_model: LinearModel, likelihood: Likelihood, data: Data):
        self.linear_model = linear_model
        self.likelihood = likelihood
        self.data = data
        self.curvature_point: Tensor | None = None
        self.earlier: EarlierRows | None = None
        self.cost = Cost()
        w_MAP = linear_model.w_MAP
        self.device = w_MAP.device
        self.dtype = torch.promote_types(w_MAP.dtype, torch.float32)
        self._finite: list[tuple[int, Tensor]] = []
        self._splits: bool | None = None

    @property
    def size(self) -> int:
        """P."""
        return self.linear_model.layout.size

    def with_likelihood(self, likelihood: Likelihood) -> Problem:
        """Return the same problem under another likelihood."""
        other = copy.copy(self)
        other.likelihood = likelihood
        return other

    def with_curvature_at(self, w: Tensor | None) -> Problem:
        """Return the same problem with H taken at J w, or at the network's outputs."""
        other = copy.copy(self)
        other.curvature_point = w
        return other

    def ggn_product(self, w: Tensor) -> Tensor:
        """Return G w, shape (K, P)."""
        return self._sweep(self._curvature, w)

    def loss_and_gradient(self, w: Tensor) -> tuple[float, Tensor]:
        """Return Σ_n -log p(y_n | J_n w) and its gradient, shape (P,)."""
        loss = torch.zeros((), dtype=torch.float64, device=self.device)

        def cotangent(batch: Batch, at: Tensor, Jw: Tensor) -> Tensor:
            loss.sub_(self.likelihood.log_prob(Jw, batch.targets).sum(dtype=torch.float64))
            return self._gradient(batch, at, Jw)

        gradient = self.with_curvature_at(None)._sweep(cotangent, w[None])[0]
        return loss.item(), gradient

    def noise_features(self, num_samples: int, seed: int) -> NoiseFeatures:
        """Return η and s² from one pass, whose noise is keyed by (seed, row).

        s² takes squares of sums over groups of rows: the same expectation as squares per
        row, without per-row gradients.
        """
        eta, squares, skipped = self.zeros(num_samples), self.zeros(1)[0], 0
        if self.earlier is not None and self.curvature_point is None:
            skipped, num_outputs, known = self.earlier
            eta += known.eta
            squares += known.squares * (num_samples * skipped)
            self.data.num_outputs += num_outputs
        for batch in self._batches(_GROUP_ROWS, skipped):
            group = self._root_product(batch, partial(_draw, seed, num_samples, batch.rows))
            eta += group
            squares += group.square().sum(0)
        self.cost.columns += num_samples * (1 - skipped / self.data.num_rows)
        # what cancels up to rounding moves no output, and must not be scaled up to do so
        squares *= squares > (8 * torch.finfo(squares.dtype).eps) ** 2 * squares.max()
        return NoiseFeatures(eta, squares / (num_samples * self.data.num_rows))

    def rows(self) -> Tensor:
        """Return R, shape (N C, P), with G = RᵀR: all of J, so for few data only."""

        def identity(f: Tensor) -> Tensor:
            return torch.eye(f.numel(), dtype=f.dtype, device=f.device).view(-1, *f.shape)

        blocks = [self._root_product(batch, identity) for batch in self._batches()]
        rows = torch.cat(blocks)
        self.cost.columns += len(rows) // self.data.num_rows
        return rows

    def push_forward(self, w: Tensor) -> Iterator[tuple[Batch, Tensor, Tensor]]:
        """Yield every batch with f, (B, ..., C), and J w, (K, B, ..., C)."""
        for batch in self._batches():
            f, Jw = self.linear_model.jvp(batch.inputs, w)
            self._inspect(batch, f)
            yield batch, f, Jw
        self.cost.columns += len(w)

    def minibatch_products(self) -> Iterator[tuple[int, BatchProduct]]:
        """Yield every batch's rows and its own product w -> J_bᵀ H_b J_b w."""
        return self._minibatches(self._curvature)

    def minibatch_gradients(self) -> Iterator[tuple[int, BatchProduct]]:
        """Yield every batch's rows and its own gradient w -> J_bᵀ ∇loss(J_b w)."""
        return self.with_curvature_at(None)._minibatches(self._gradient)

    def zeros(self, num_vectors: int) -> Tensor:
        """Return vectors in weight space, shape (num_vectors, P)."""
        return torch.zeros(num_vectors, self.size, dtype=self.dtype, device=self.device)

    def _curvature(self, batch: Batch, at: Tensor, Jw: Tensor) -> Tensor:
        return self._masked(self.likelihood.hessian_product(at, Jw), batch)

    def _gradient(self, batch: Batch, at: Tensor, Jw: Tensor) -> Tensor:
        return self._masked(self.likelihood.gradient(Jw, batch.targets), batch)

    def _masked(self, u: Tensor, batch: Batch) -> Tensor:
        mask = self.likelihood.mask(batch.targets)
        return u if mask is None else u * mask.unsqueeze(-1)

    def _sweep(self, cotangent: Cotangent, w: Tensor) -> Tensor:
        """Return Σ_n J_nᵀ u_n over a pass, with u = cotangent(batch, at, J w)."""
        total = self.zeros(len(w))
        for batch in self._batches():
            self._add_product(batch, cotangent, w, total)
        self.cost.columns += len(w)
        return total

    def _minibatches(self, cotangent: Cotangent) -> Iterator[tuple[int, BatchProduct]]:
        for batch in self._batches():

            def product(w: Tensor, batch: Batch = batch) -> Tensor:
                total = self.zeros(len(w))
                self._add_product(batch, cotangent, w, total)
                self.cost.columns += len(w) * len(batch.rows) / (self.data.num_rows or 1)
                return total

            yield len(batch.rows), product

    def _add_product(self, batch: Batch, cotangent: Cotangent, w: Tensor, total: Tensor) -> None:
        point = self.curvature_point
        columns = w if point is None else torch.cat([point[None].to(w), w])
        at, Jw = self.linear_model.jvp(batch.inputs, columns)
        if point is not None:
            at, Jw = Jw[0], Jw[1:]
        f, add_pullback = self.linear_model.vjp(batch.inputs)
        self._inspect(batch, f)
        add_pullback(cotangent(batch, at, Jw), total)

    def _root_product(self, batch: Batch, draw: Callable[[Tensor], Tensor]) -> Tensor:
        """Return J_bᵀ S_b ε, with ε = draw(f) of shape (K, *f.shape)."""
        f, add_pullback = self.linear_model.vjp(batch.inputs)
        self._inspect(batch, f)
        at = f
        if self.curvature_point is not None:
            at = self.linear_model.jvp(batch.inputs, self.curvature_point[None])[1][0]
        u = self._masked(self.likelihood.hessian_sqrt_product(at, draw(f)), batch)
        total = self.zeros(len(u))
        add_pullback(u, total)
        return total

    def _batches(self, at_most: int | None = None, skipped: int = 0) -> Iterator[Batch]:
        """Yield the batches of one pass after the skipped rows, inside the network's guard."""
        self._finite.clear()
        with self.linear_model.network.guarded():
            for whole in self.data:
                if skipped and whole.rows[-1] < skipped:
                    continue
                if self.linear_model.report is None:
                    _check_finite(whole)
                    self.linear_model.probe(whole.inputs)
                for batch in self._pieces(whole, at_most) if at_most else [whole]:
                    if self.data.num_passes == 0:
                        _check_finite(batch)
                    inputs = self.linear_model.prepare(batch.inputs)
                    yield batch._replace(inputs=inputs, targets=self._align(batch.targets))
        for index, finite in self._finite:
            if not finite:
                raise FloatingPointError(f"The network's outputs on batch {index} are not finite.")

    def _pieces(self, whole: Batch, at_most: int) -> list[Batch]:
        """Return the batch in pieces, or whole where the network does not take rows alone."""
        pieces = list(whole.split(at_most))
        if len(pieces) > 1 and self._splits is None:
            self._splits = self._rows_stand_alone(whole, pieces[0])
        return pieces if self._splits else [whole]

    def _rows_stand_alone(self, whole: Batch, piece: Batch) -> bool:
        f = self.linear_model.outputs(whole.inputs)[: len(piece.rows)]
        try:
            alone = self.linear_model.outputs(piece.inputs)
        except RuntimeError:  # of shapes: inputs that only look as if they went by rows
            return False
        if alone.shape != f.shape:
            return False
        return (alone - f).norm() <= _SPLIT_ERROR * f.norm() or not torch.isfinite(f).all()

    def _inspect(self, batch: Batch, f: Tensor) -> None:
        """Note whether outputs are finite; in the first pass, check targets against them."""
        finite = torch.isfinite(f).all()
        self._finite.append((batch.index, finite))
        if self.data.num_passes == 0:
            self.data.num_outputs += f.numel()
        if self.data.num_passes == 0 and finite:
            try:
                self.likelihood.check(f, batch.targets)
            except (TypeError, ValueError) as error:
                raise type(error)(f"Batch {batch.index}: {error}") from None

    def _align(self, targets: Tensor) -> Tensor:
        """Move the classes of elementwise targets last, where those of the outputs are.

        Small integers become int64, and truth values numbers where every output has one.
        """
        if targets.dtype == torch.bool and self.likelihood.elementwise:
            targets = targets.long()
        elif targets.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
            targets = targets.long()
        class_dim = self.linear_model.network.class_dim
        if self.likelihood.elementwise and -targets.dim() <= class_dim < targets.dim():
            return targets.movedim(class_dim, -1)
        return targets


def _check_finite(batch: Batch) -> None:
    def check(tensor: Tensor) -> None:
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ValueError(
                f"The inputs of batch {batch.index} hold NaN or infinite values: remove those rows."
            )

    map_tensors(check, batch.inputs)


def _draw(seed: int, num_samples: int, rows: Tensor, f: Tensor) -> Tensor:
    """Return ε, shape (K, *f.shape), keyed by (seed, sample, row)."""
    entries = f[0].numel()
    noise = [normal(seed, _EPSILON_STREAM, k, rows, entries) for k in range(num_samples)]
    return torch.stack(noise).to(f.dtype).view(num_samples, *f.shape)
