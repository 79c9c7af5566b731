"""The problem: linear model, likelihood and data, as products that take one pass each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from torch_lla_em.data import Batch, Data
from torch_lla_em.jacobian import LinearModel
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.problem.batch_products import BatchProducts, Cotangent
from torch_lla_em.problem.finite import DERIVATIVE, LIKELIHOOD, STEP, all_finite, is_moderate
from torch_lla_em.problem.sweeps import Rows
from torch_lla_em.runtime import lasts, normal
from torch_lla_em.solvers import Space

_EPSILON_STREAM = 1
_GROUP_ROWS = 32

T = TypeVar("T")
State = dict[str, Tensor] | None
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


class Problem(BatchProducts):
    """Σ_n loss(J_n w, y_n) over the data, its gradient, and products with G = Σ_n J_nᵀ H_n J_n.

    H is taken at the network's outputs, or at J w for the ``curvature_point`` w. All
    vectors here are in weight space; solvers see them through ``operators.py``.
    """

    def __init__(self, linear_model: LinearModel, likelihood: Likelihood, data: Data):
        super().__init__(linear_model, likelihood, data)
        self.earlier: EarlierRows | None = None
        self.cost = Cost()

    def ggn_product(self, w: Tensor) -> Tensor:
        """Return G w, shape (K, P)."""

        def run(w: Tensor, whole: bool) -> Tensor:
            total = self._whole_zeros(len(w))
            for group in self._groups(len(w)):
                columns, sums = self._near(w[group]), self._near(total[group])

                def add(batch: Batch, done: int) -> None:
                    if len(columns):
                        self._add_product(batch, self._curvature, columns[done:], sums[done:])

                self._summed({f"Gw {group.start}": sums}, add, Rows(whole=whole), columns)
                self._put(sums, total[group])
            return total

        with self.linear_model.keeping_what_fits():
            total = self.spread.sweep(run, w)
        self.cost.columns += len(w)
        return total

    def loss_and_gradient(self, w: Tensor) -> tuple[float, Tensor]:
        """Return Σ_n -log p(y_n | J_n w) and its gradient, shape (P,)."""
        loss = torch.zeros((), dtype=torch.float64, device=self.linear_model.network.device)
        problem = self.with_curvature_at(None)

        def run(w: Tensor, whole: bool) -> Tensor:
            gradient, column = self._near_zeros(1), self._near(w)

            def add(batch: Batch, _: int) -> None:
                log_prob = torch.zeros_like(loss)

                def cotangent(batch: Batch, at: Tensor, Jw: Tensor) -> Tensor:
                    log_prob.copy_(
                        self.likelihood.log_prob(Jw, batch.targets).sum(dtype=loss.dtype)
                    )
                    return self._gradient(batch, at, Jw)

                problem._add_product(batch, cotangent, column, gradient)
                loss.sub_(log_prob)

            named = {"loss": loss, "gradient": gradient}
            problem._summed(named, add, Rows(whole=whole), column, may_overflow=True)
            return gradient.to(self.device)

        with self.linear_model.keeping_what_fits():
            gradient = self.spread.sweep(run, w[None])
        self.cost.columns += 1
        return self.data.group.sum(loss).item(), gradient[0]

    def noise_features(self, num_samples: int, seed: int) -> NoiseFeatures:
        """Return η and s² from one pass, whose noise is keyed by (seed, row).

        s² takes squares of sums over groups of rows: the same expectation as squares per
        row, without per-row gradients.
        """
        known = self.earlier if self.curvature_point is None else None
        skipped = 0 if known is None else known.num_rows

        def run(samples: range, whole: bool) -> tuple[Tensor, Tensor]:
            eta, squares = self._whole_zeros(len(samples)), self._near_zeros(1)[0]
            for group in self._groups(len(samples)):
                drawn, sums = samples[group], self._near(eta[group])

                def add(batch: Batch, done: int) -> None:
                    def take(columns: slice, product: Tensor) -> None:
                        sums[done:][columns].add_(product)
                        for row in product:
                            squares.addcmul_(row, row)

                    if len(drawn) > done:
                        self._root_products(batch, partial(_draw, seed, drawn[done:]), take)

                named = {f"eta {group.start}": sums, "squares": squares}
                self._summed(named, add, Rows(skipped, _GROUP_ROWS, whole=whole))
                self._put(sums, eta[group])
            return eta, squares.to(self.device)

        eta, squares = self.spread.draw(run, num_samples)
        if known is not None:
            eta += self.spread.own(known.features.eta.to(eta))
            squares += self.spread.own(known.features.squares.to(squares)) * (num_samples * skipped)
            self.data.num_outputs += known.num_outputs
        self.cost.columns += num_samples * (1 - skipped / self.data.num_rows)
        # what cancels up to rounding moves no output, and must not be scaled up to do so
        largest = self.space.largest(squares.max().item())
        squares *= squares > (8 * torch.finfo(squares.dtype).eps) ** 2 * largest
        return NoiseFeatures(eta, squares / (num_samples * self.data.num_rows))

    def rows(self) -> Tensor:
        """Return R, shape (N C, P), with G = RᵀR: all of J, so for few data only."""

        def identity(_: Tensor, f: Tensor) -> Tensor:
            return torch.eye(f.numel(), dtype=f.dtype, device=f.device).view(-1, *f.shape)

        def block(batch: Batch, _: int) -> Tensor:
            rows = self._root_product(batch, identity)
            self._finite.note(batch.index, DERIVATIVE, all_finite(rows))
            return rows.to(self.device)

        blocks = self._over(block)
        if self.data.group.size == 1 and self.data.num_passes:
            rows, done = self._whole_zeros(self.data.num_outputs), 0
            for own in blocks:
                rows[done : done + len(own)] = own
                done += len(own)
        else:
            rows = self.data.group.gather(torch.cat([self._whole_zeros(0), *blocks]))
        self._finite.refuse(LIKELIHOOD, DERIVATIVE)
        self.cost.columns += len(rows) // self.data.num_rows
        return self.spread.own(rows)

    def push_forward(self, w: Tensor) -> Iterator[tuple[Batch, Tensor, Tensor]]:
        """Yield each of this rank's batches with f, (B, ..., C), and J w, (K, B, ..., C)."""
        w = self.spread.whole(w)

        def push(batch: Batch, _: int) -> tuple[Batch, Tensor, Tensor]:
            f, Jw = self.linear_model.jvp(batch.inputs, w)
            self._inspect(batch, f)
            self._finite.note(batch.index, DERIVATIVE, all_finite(Jw) | ~moderate)
            return batch, f, Jw

        moderate = is_moderate(w).to(self.linear_model.network.device)
        yield from self._over(push)
        self._finite.refuse(DERIVATIVE)
        self.cost.columns += len(w)

    def minibatch_products(self, state: State = None) -> Iterator[tuple[int, BatchProduct]]:
        """Yield every batch's rows and its own product w -> J_bᵀ H_b J_b w.

        ``state`` is what is changed in place after every batch: a checkpoint keeps it, and a run
        that goes on begins with what it was, and with the next batch.
        """
        return self._minibatches(self._curvature, state)

    def minibatch_gradients(self, state: State = None) -> Iterator[tuple[int, BatchProduct]]:
        """Yield every batch's rows and its own gradient w -> J_bᵀ ∇loss(J_b w)."""
        return self.with_curvature_at(None)._minibatches(self._gradient, state)

    def kept(self, key: Tensor, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return what was computed at ``key``: here anew, from a checkpoint where there is one."""
        return compute()

    @property
    def space(self) -> Space:
        """Where vectors of weights lie: here, or in slices on all ranks."""
        return self.spread.space

    def lasts(self, run: Callable[[], object]) -> bool:
        """Run something, and return whether memory lasted; with others, they would have to know."""
        if self.alone:
            return lasts(run)
        run()
        return True

    def _minibatches(
        self, cotangent: Cotangent, state: State = None, rows: Rows = Rows(in_step=True)
    ) -> Iterator[tuple[int, BatchProduct]]:
        """Yield steps of one batch of every rank that has one left."""
        for batch in self._batches(rows):
            count = batch.step_rows or len(batch.rows)

            def product(w: Tensor, batch: Batch = batch, count: int = count) -> Tensor:
                total, w = self._whole_zeros(len(w)), self.spread.whole(w)

                def add(part: Batch, done: int) -> None:
                    self._add_product(part, cotangent, w[done:], total[done:])

                if len(batch.rows):
                    for _ in self._worked(batch, add):
                        pass
                    fine = all_finite(total) | ~is_moderate(w)
                    self._finite.note(batch.index, STEP, fine)
                self.cost.columns += len(w) * count / (self.data.num_rows or 1)
                return self.spread.sum(total)

            yield count, product
        step = self._finite.first_fault(STEP)
        # a likelihood that overflows alone is a step size too large
        pushed, bent = map(self._finite.first_fault, (DERIVATIVE, LIKELIHOOD))
        if step is not None and (step == pushed or step != bent):
            raise FloatingPointError(DERIVATIVE.format(step))


def _draw(seed: int, samples: range, rows: Tensor, f: Tensor) -> Tensor:
    """Return ε, shape (K, *f.shape), keyed by (seed, sample, row)."""
    entries = f[0].numel()
    rows = rows.to(f.device)
    noise = [normal(seed, _EPSILON_STREAM, k, rows, entries) for k in samples]
    return torch.stack(noise).to(f.dtype).view(len(samples), *f.shape)
