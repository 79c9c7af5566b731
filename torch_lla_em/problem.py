"""The problem: linear model, likelihood and data, as products that take one pass each."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.compiled import CompiledShare
from torch_lla_em.compute import Compute
from torch_lla_em.data import Batch, Data
from torch_lla_em.finite import DERIVATIVE, LIKELIHOOD, STEP, all_finite, is_moderate
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.linear_model import LinearModel
from torch_lla_em.memory import DoesNotFit, attempt, free_memory, least_share, place_of
from torch_lla_em.memory_plan import Activations, Plan, make_plan
from torch_lla_em.noise import normal
from torch_lla_em.parameters import ParameterLayout
from torch_lla_em.slices import largest_slice
from torch_lla_em.spread import DataSpread
from torch_lla_em.sweeps import Rows, Sweeps

_EPSILON_STREAM = 1
_GROUP_ROWS = 32
# of J w at the curvature point: 256 MB in float32
_OUTPUTS_KEPT = 1 << 26

State = dict[str, Tensor] | None
Cotangent = Callable[[Batch, Tensor, Tensor], Tensor]
BatchProduct = Callable[[Tensor], Tensor]
Draw = Callable[[Tensor, Tensor], Tensor]


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


class Problem(Sweeps):
    """Σ_n loss(J_n w, y_n) over the data, its gradient, and products with G = Σ_n J_nᵀ H_n J_n.

    H is taken at the network's outputs, or at J w for the ``curvature_point`` w. All
    vectors here are in weight space; solvers see them through ``operators.py``.
    """

    def __init__(self, linear_model: LinearModel, likelihood: Likelihood, data: Data):
        super().__init__(linear_model, likelihood, data)
        self.curvature_point: Tensor | None = None
        self._at_point: dict[tuple[int, int], Tensor] = {}
        self.earlier: EarlierRows | None = None
        self.spread = DataSpread(data.group)
        self.cost = Cost()
        w_MAP = linear_model.w_MAP
        self.device = w_MAP.device
        self.dtype = torch.promote_types(w_MAP.dtype, torch.float32)
        self._group: int | None = None
        self._compiled: CompiledShare | None = None

    def prepare(self, num_samples: int, compute: Compute) -> Plan:
        """Look at the first batch, before anything is allocated: probe the network, plan memory."""
        linear_model = self.linear_model
        linear_model.network.precision = compute.precision
        self.data.keep = compute.keep_data
        first = self.data.first()
        part, activations = self._measured(first, compute.rows)
        if len(part.rows) < min(compute.rows or inf, len(first.rows)):
            linear_model.take(None, len(part.rows))
        plan_for = partial(
            make_plan,
            linear_model,
            self.spread.columns_held(num_samples),
            activations=activations,
            free_on=self._share_of_memory(),
        )
        plan = plan_for(compute)
        meet, elsewhere = self.data.group.meet, plan.group is not None
        if meet("where vectors live", elsewhere, any) and not elsewhere:
            plan = plan_for(replace(compute, vectors="cpu"))
        plan = plan._replace(group=meet("columns at once", plan.group, _least))
        linear_model.take(plan.columns, plan.rows)
        self.device, self._group = plan.vectors_on, plan.group
        if compute.compile:
            self._compiled = CompiledShare(linear_model, self.likelihood)
        return plan

    def _measured(self, first: Batch, rows: int | None) -> tuple[Batch, Activations]:
        """Probe the network on as many rows of a batch as fit, and measure a forward pass."""
        part = first if rows is None else next(first.split(rows))

        def measure() -> Activations:
            with self.linear_model.network.guarded():
                self._probe(part)
                inputs = self.linear_model.prepare(part.inputs)
                return Activations.of(self.linear_model, inputs, len(part.rows))

        while True:
            try:
                activations, shortage = attempt(measure)
            except DoesNotFit as error:
                activations, shortage = None, str(error)
            if shortage is None:
                return part, activations
            half = next(part.split(max(1, len(part.rows) // 2)))
            if len(half.rows) == len(part.rows):
                raise DoesNotFit(self._no_room(part, shortage))
            part = half

    @property
    def size(self) -> int:
        """P, or how many of the weights lie on this rank."""
        return self.layout.size

    @property
    def layout(self) -> ParameterLayout:
        """The random weights, or what of them lies on this rank."""
        return self.spread.layout(self.linear_model.layout)

    @property
    def w_MAP(self) -> Tensor:
        """The trained weights, shape (P,), where vectors live."""
        return self.spread.own(self.linear_model.w_MAP.to(self.device, self.dtype))

    def with_likelihood(self, likelihood: Likelihood) -> Problem:
        """Return the same problem under another likelihood."""
        other = copy.copy(self)
        other.likelihood = likelihood
        if self._compiled:
            other._compiled = self._compiled.at(likelihood) if self._compiled.alive else None
        return other

    def with_curvature_at(self, w: Tensor | None) -> Problem:
        """Return the same problem with H taken at J w, or at the network's outputs."""
        other = copy.copy(self)
        other.curvature_point = None if w is None else self.spread.whole(w[None])[0]
        other._at_point = {}
        return other

    def free_memory(self) -> float:
        """Return the bytes that every rank may still allocate for vectors."""
        here = place_of(self.device), free_memory(self.device)
        return self.data.group.meet("free memory", here, least_share)

    def room(self) -> float:
        """Return the bytes that choices between solvers go by: what is free, or was at first."""
        return self.free_memory()

    def _share_of_memory(self) -> Callable[[torch.device], float]:
        """Return the map from a device to the bytes free there for each process that uses it."""
        here = {place_of(device) for device in (torch.device("cpu"), self.linear_model.network.device)}
        sharing = self.data.group.meet("devices", here, _counted)
        return lambda device: free_memory(device) / sharing[place_of(device)]

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
            gradient, column = self._near(self._whole_zeros(1)), self._near(w)

            def add(batch: Batch, _: int) -> None:
                log_prob = torch.zeros_like(loss)

                def cotangent(batch: Batch, at: Tensor, Jw: Tensor) -> Tensor:
                    log_prob.copy_(self.likelihood.log_prob(Jw, batch.targets).sum(dtype=loss.dtype))
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
            eta, squares = self._whole_zeros(len(samples)), self._near(self._whole_zeros(1)[0])
            for group in self._groups(len(samples)):
                draw, sums = partial(_draw, seed, samples[group]), self._near(eta[group])

                def add(batch: Batch, _: int) -> None:
                    product = self._root_product(batch, draw)
                    sums.add_(product)
                    for row in product:
                        squares.addcmul_(row, row)

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
        largest = largest_slice(squares.max().item())
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

    def zeros(self, num_vectors: int) -> Tensor:
        """Return vectors in weight space, shape (num_vectors, P)."""
        return torch.zeros(num_vectors, self.size, dtype=self.dtype, device=self.device)

    def _whole_zeros(self, num_vectors: int) -> Tensor:
        size = self.linear_model.layout.size
        pinned = self._group is not None and torch.cuda.is_available()
        return torch.zeros(
            num_vectors, size, dtype=self.dtype, device=self.device, pin_memory=pinned
        )

    def _curvature(self, batch: Batch, at: Tensor, Jw: Tensor) -> Tensor:
        return self._masked(self.likelihood.hessian_product(at, Jw), batch)

    def _gradient(self, batch: Batch, at: Tensor, Jw: Tensor) -> Tensor:
        return self._masked(self.likelihood.gradient(Jw, batch.targets), batch)

    def _masked(self, u: Tensor, batch: Batch) -> Tensor:
        mask = self.likelihood.mask(batch.targets)
        return u if mask is None else u * mask.unsqueeze(-1)

    def _groups(self, num_columns: int) -> list[slice]:
        """Return the columns that one pass takes: all, unless vectors live off the device."""
        if self._group is None:
            return [slice(0, num_columns)]
        # as many on every rank, the last of them empty where one has fewer columns
        count = self.data.group.meet("groups of columns", -(-num_columns // self._group), max)
        ends = [min(i * self._group, num_columns) for i in range(count + 1)]
        return [slice(start, end) for start, end in zip(ends, ends[1:])]

    def _near(self, vectors: Tensor) -> Tensor:
        """Return vectors where the network is: themselves, or a copy."""
        return vectors if self._group is None else vectors.to(self.linear_model.network.device, copy=True)

    def _put(self, near: Tensor, home: Tensor) -> None:
        if self._group is not None:
            home.copy_(near)

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

    def _add_product(self, batch: Batch, cotangent: Cotangent, w: Tensor, total: Tensor) -> None:
        """Add Jᵀ u to the total, with u = cotangent(batch, at, J w)."""
        place, point = (int(batch.rows[:1].sum()), len(batch.rows)), self.curvature_point
        at = self._at_point.get(place)
        if self._compiled and cotangent == self._curvature and (point is None or at is not None):
            shared = self._compiled(batch, at, w, partial(self._eager_share, batch, at))
            if shared is not None:
                self._inspect(batch, shared[0])
                total += shared[1]
                return
        if point is None or at is not None:
            f, Jw, add_pullback = self.linear_model.jvp_and_vjp(batch.inputs, w)
        else:
            columns = torch.cat([point[None].to(w), w])
            f, Jw, add_pullback = self.linear_model.jvp_and_vjp(batch.inputs, columns)
            at, Jw = Jw[0], Jw[1:]
            if self.data.kept and self.data.num_outputs <= _OUTPUTS_KEPT:
                self._at_point[place] = at.clone()
        at = f if at is None else at
        self._inspect(batch, f)
        u = cotangent(batch, at, Jw)
        self._finite.note(batch.index, DERIVATIVE, all_finite(Jw))
        self._finite.note(batch.index, LIKELIHOOD, all_finite(u))
        add_pullback(u, total)

    def _eager_share(self, batch: Batch, at: Tensor | None, w: Tensor) -> Tensor:
        """Return J_bᵀ H_b J_b w, with H at ``at`` or at the network's outputs."""
        f, Jw, add_pullback = self.linear_model.jvp_and_vjp(batch.inputs, w)
        total = torch.zeros_like(w)
        add_pullback(self._curvature(batch, f if at is None else at, Jw), total)
        return total

    def _root_product(self, batch: Batch, draw: Draw) -> Tensor:
        """Return J_bᵀ S_b ε, with ε = draw(rows, f) of shape (K, *f.shape)."""
        f, add_pullback = self.linear_model.vjp(batch.inputs)
        self._inspect(batch, f)
        at = f
        if self.curvature_point is not None:
            at = self.linear_model.jvp(batch.inputs, self.curvature_point[None])[1][0]
            self._finite.note(batch.index, DERIVATIVE, all_finite(at))
        u = self._masked(self.likelihood.hessian_sqrt_product(at, draw(batch.rows, f)), batch)
        self._finite.note(batch.index, LIKELIHOOD, all_finite(u))
        total = self._near(self._whole_zeros(len(u)))
        add_pullback(u, total)
        return total


def _least(every: list[int | None]) -> int | None:
    return min((number for number in every if number is not None), default=None)


def _counted(every: list[set[tuple[str, str]]]) -> Counter[tuple[str, str]]:
    return Counter(place for places in every for place in places)


def _draw(seed: int, samples: range, rows: Tensor, f: Tensor) -> Tensor:
    """Return ε, shape (K, *f.shape), keyed by (seed, sample, row)."""
    entries = f[0].numel()
    rows = rows.to(f.device)
    noise = [normal(seed, _EPSILON_STREAM, k, rows, entries) for k in samples]
    return torch.stack(noise).to(f.dtype).view(len(samples), *f.shape)
