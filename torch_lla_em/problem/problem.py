"""The problem: linear model, likelihood and data, as products that take one pass each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from math import inf
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torch_lla_em.data import Batch, Data
from torch_lla_em.jacobian import LinearModel, ParameterLayout, Rows
from torch_lla_em.likelihoods import Likelihood, Regression
from torch_lla_em.problem.batch_work import BatchWork, Cotangent
from torch_lla_em.problem.cost import Cost
from torch_lla_em.problem.finite import DERIVATIVE, is_moderate
from torch_lla_em.problem.placement import Vectors
from torch_lla_em.problem.row_squares import RowSquares
from torch_lla_em.problem.sweep import BLOCK, SCALAR, VECTOR, Fold, Pass, Sums, Sweep
from torch_lla_em.runtime import attempt, normals
from torch_lla_em.solvers import Space

_EPSILON_STREAM = 1

# of the mean square of the targets, for the first σ²
_LEAST_SHARE = 1e-2

BatchProduct = Callable[[Tensor], Tensor]

T = TypeVar("T")


class NoiseFeatures(NamedTuple):
    """The part of the stochastic prior that the data determine."""

    eta: Tensor
    """η_k = Σ_n J_nᵀ S_n ε_nk ~ N(0, G), shape (K, P)."""

    squares: Tensor
    """The expected squared feature s², shape (P,); 0 where it was not asked for."""


class Problem:
    """Σ_n loss(J_n w, y_n) over the data, its gradient, and products with G = Σ_n J_nᵀ H_n J_n.

    All vectors here are in weight space; solvers see them through ``operators.py``. ``sweep`` goes
    over the data, and knows of memory, ranks, and vectors that live beside the device.
    """

    def __init__(self, linear_model: LinearModel, likelihood: Likelihood, data: Data):
        self.linear_model, self.likelihood, self.data = linear_model, likelihood, data
        data.mask = likelihood.mask
        self.vectors = Vectors(linear_model)
        self.sweep = Sweep(linear_model, likelihood, data, self.vectors)
        self.work = BatchWork(self.sweep, likelihood)
        self.cost = Cost()

    # the method

    def ggn_product(self, w: Tensor) -> Tensor:
        """Return G w, shape (K, P)."""

        def add(rows: Rows, batch: Batch, w: Tensor, sums: Sums) -> None:
            at, Jw = self.work.pushed(rows, batch, w)
            rows.pull(self.work.curved(batch, at, Jw), sums["Gw"])

        total = self.sweep(w, Pass({"Gw": BLOCK}, add))["Gw"]
        self.cost.columns += len(w)
        return total

    def loss_and_gradient(self, w: Tensor) -> tuple[float, Tensor]:
        """Return Σ_n -log p(y_n | J_n w) and its gradient, shape (P,)."""
        work = BatchWork(self.sweep, self.likelihood)

        def add(rows: Rows, batch: Batch, w: Tensor, sums: Sums) -> None:
            at, Jw = work.pushed(rows, batch, w)
            log_prob = self.likelihood.log_prob(Jw, batch.targets).sum(dtype=torch.float64)
            rows.pull(work.sloped(batch, at, Jw), sums["gradient"])
            sums["loss"] -= log_prob

        kinds = {"loss": SCALAR, "gradient": BLOCK}
        sums = self.sweep(w[None], Pass(kinds, add, may_overflow=True))
        self.cost.columns += 1
        return sums["loss"].item(), sums["gradient"][0]

    def noise_features(
        self, num_samples: int, seed: int, with_squares: bool = True
    ) -> NoiseFeatures:
        """Return η and s² from one pass, whose noise is keyed by (seed, row).

        A Gaussian likelihood without a σ gets one from the network's residuals, which the same
        pass sums up.
        """
        squares_of = RowSquares(self.linear_model, self.work, num_samples)
        gaussian = self.likelihood
        unknown = isinstance(gaussian, Regression) and gaussian.from_data

        def add(rows: Rows, batch: Batch, samples: Tensor, sums: Sums) -> None:
            def draw(at: Tensor) -> Tensor:
                return _draw(seed, samples, batch.rows, at)

            u, at = self.work.noise_outputs(rows, batch, draw)
            product = torch.zeros_like(sums["eta"])
            rows.pull(u, product)
            if with_squares:
                found = squares_of(rows, batch, samples.tolist(), (at, u, product))
                sums["squares"] += found
            sums["eta"] += product
            if unknown:
                y = batch.targets.double()
                errors = (y - gaussian.mean(at).double()).square().sum()
                # a batch comes once for every group of samples that is taken at once
                sums["errors"] += len(samples) * errors
                sums["targets"] += len(samples) * y.square().sum()

        kinds = {"eta": BLOCK, "squares": VECTOR}
        kinds |= {"errors": SCALAR, "targets": SCALAR} if unknown else {}
        at_most = squares_of.rows_at_once if with_squares else inf
        task = Pass(kinds, add, at_most, squares=with_squares)
        sums = self.sweep(torch.arange(num_samples, device="cpu"), task)
        eta, squares = sums["eta"], sums["squares"]
        self.cost.columns += num_samples
        # what cancels up to rounding moves no output, and must not be scaled up to do so
        largest = self.space.largest(squares.max().item())
        squares *= squares > (8 * torch.finfo(squares.dtype).eps) ** 2 * largest
        if unknown:
            # networks that have overfitted have next to no residuals
            square = max(sums["errors"].item(), _LEAST_SHARE * sums["targets"].item())
            sigma = (square / (num_samples * self.data.num_targets)) ** 0.5 or 1.0
            noise = torch.tensor(sigma, dtype=torch.float64, device="cpu")
            self.take_noise(noise)
            eta, squares = eta / sigma, squares / sigma**2
        return NoiseFeatures(eta, squares / (num_samples * self.data.num_rows))

    def take_noise(self, sigma: Tensor) -> None:
        """Take σ of a Gaussian likelihood, where the first pass has found it."""
        gaussian: Any = self.likelihood
        self.likelihood = gaussian.at_noise(sigma)
        self.work = BatchWork(self.sweep, self.likelihood, self.work.point)

    def rows(self) -> Tensor:
        """Return R, shape (N C, P), with G = RᵀR: all of J, so for few data only."""

        def identity(at: Tensor) -> Tensor:
            size = at.numel()
            return torch.eye(size, dtype=at.dtype, device=at.device).view(-1, *at.shape)

        parts = [self.vectors.whole_zeros(0)]

        def add(rows: Rows, batch: Batch, _: Tensor, sums: Sums) -> None:
            u, _ = self.work.noise_outputs(rows, batch, identity)
            R, step = self.vectors.whole_zeros(len(u)), rows.columns or len(u)
            for start in range(0, len(u), step):
                near = torch.zeros_like(R[start : start + step], device=u.device)
                rows.pull(u[start : start + step], near)
                self.sweep.finite.expect(batch.index, DERIVATIVE, near)
                R[start : start + step] = near
            if not self.sweep.finite.searching:
                parts.append(R)

        self.sweep.over(torch.arange(1 << 16, device="cpu"), Pass({}, add))
        rows = self.vectors.own(self.data.group.gather(torch.cat(parts)))
        self.cost.columns += len(rows) // self.data.num_rows
        return rows

    def push_forward(self, w: Tensor) -> list[tuple[Batch, Tensor, Tensor]]:
        """Return each of this rank's batches with f, (B, ..., C), and J w, (K, B, ..., C)."""
        w, found = self.vectors.whole(w), []
        moderate = bool(is_moderate(w))

        def add(rows: Rows, batch: Batch, _: Tensor, sums: Sums) -> None:
            Jw = rows.push(w)
            self.work.inspect(rows, batch)
            if moderate:
                self.sweep.finite.expect(batch.index, DERIVATIVE, Jw)
            if not self.sweep.finite.searching:
                found.append((batch, rows.f, Jw))

        self.sweep.over(torch.arange(len(w), device="cpu"), Pass({}, add))
        self.cost.columns += len(w)
        return found

    def minibatch_products(self) -> Iterator[tuple[int, BatchProduct]]:
        """Yield every batch's rows and its own product w -> J_bᵀ H_b J_b w."""
        return self._minibatches(self.work.curved)

    def minibatch_gradients(self) -> Iterator[tuple[int, BatchProduct]]:
        """Yield every batch's rows and its own gradient w -> J_bᵀ ∇loss(J_b w)."""
        problem = self.with_curvature_at(None)
        return problem._minibatches(problem.work.sloped)

    # the same problem, otherwise

    def with_likelihood(self, likelihood: Likelihood) -> Problem:
        """Return the same problem under another likelihood."""
        other = copy.copy(self)
        other.likelihood = likelihood
        other.work = BatchWork(self.sweep, likelihood, self.work.point)
        return other

    def with_curvature_at(self, w: Tensor | None) -> Problem:
        """Return the same problem with H at the network's outputs, or at J w, for w (P,)."""
        other, near = copy.copy(self), self.linear_model.network.device
        point = None if w is None else self.vectors.whole(w[None]).to(near)
        other.work = BatchWork(self.sweep, self.likelihood, point)
        return other

    # vectors, memory, checkpoints

    @property
    def space(self) -> Space:
        """What an inner product is here: of slices, a sum over ranks."""
        return Space() if self.vectors.group is None else Space(self.vectors.group)

    @property
    def layout(self) -> ParameterLayout:
        """The random weights, or what of them lies on this rank."""
        return self.vectors.layout

    @property
    def size(self) -> int:
        """P, or how many of the weights lie on this rank."""
        return self.layout.size

    @property
    def device(self) -> torch.device:
        """Where vectors live."""
        return self.vectors.device

    @property
    def dtype(self) -> torch.dtype:
        """That of vectors: single precision at least."""
        return self.vectors.dtype

    @property
    def w_MAP(self) -> Tensor:
        """The trained weights, shape (P,), where vectors live."""
        return self.vectors.own(self.linear_model.w_MAP.to(self.device, self.dtype))

    def zeros(self, num_vectors: int) -> Tensor:
        """Return vectors in weight space, shape (num_vectors, P)."""
        return self.vectors.zeros(num_vectors)

    def attempt(self, run: Callable[[], T]) -> tuple[T | None, str | None]:
        """Return the result, or what was said when memory ended; then no factors are kept either."""
        if self.data.group.size > 1:  # ranks would have to keep or drop it together
            return run(), None
        found, shortage = attempt(run)
        if shortage:
            self.sweep.kept.forget()
        return found, shortage

    def _minibatches(self, cotangent: Cotangent) -> Iterator[tuple[int, BatchProduct]]:
        for num_rows, fold in self.sweep.steps():

            def product(w: Tensor, num_rows: int = num_rows, fold: Fold = fold) -> Tensor:
                def add(rows: Rows, batch: Batch, w: Tensor, sums: Sums) -> None:
                    at, Jw = self.work.pushed(rows, batch, w)
                    rows.pull(cotangent(batch, at, Jw), sums["sum"])

                self.cost.columns += len(w) * num_rows / (self.data.num_rows or 1)
                return fold(w, Pass({"sum": BLOCK}, add))["sum"]

            yield num_rows, product


def _draw(seed: int, samples: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    """Return ε, shape (K, B, ..., C), keyed by (seed, sample, row)."""
    near, entries = rows.to(at.device, non_blocking=True), at[0].numel()
    noise = normals(seed, _EPSILON_STREAM, samples.tolist(), near, entries)
    return noise.to(at.dtype).view(len(samples), *at.shape)
