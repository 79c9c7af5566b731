"""The problem of a fit: linear model, likelihood and data, as products that take one pass each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import Batch, Data
from torch_lla_em.jacobian import LinearModel, ParameterLayout, Rows
from torch_lla_em.likelihoods import Likelihood, compare_with_log_prob
from torch_lla_em.problem.curvature import Point, RowSquares
from torch_lla_em.problem.loss import Loss, check_weights, moments_of, noise_of_residuals, on_cpu
from torch_lla_em.problem.sweep import (
    BLOCK,
    DERIVATIVE,
    LIKELIHOOD,
    SCALAR,
    VECTOR,
    Fold,
    Kind,
    Pass,
    Sums,
    Sweep,
)
from torch_lla_em.runtime import normals
from torch_lla_em.solvers import Product

_EPSILON_STREAM = 1

# smallest number of targets of an output from which a mean is taken
_FEWEST = 10


class NoiseFeatures(NamedTuple):
    """The part of the random probes that depends on the data."""

    eta: Tensor
    """η_k = Σ_n J_nᵀ S_n ε_nk ~ N(0, G), shape (K, P)."""

    squares: Tensor
    """The expected squared feature s², shape (P,); 0 if it was not requested."""


@dataclass
class Cost:
    """What a fit has done so far, for the history and the progress bar."""

    columns: float = 0.0
    """Columns pushed through the data: K for a product with K columns."""

    stage: str = "checking the network"
    """What the fit does now."""

    def add(self, columns: float) -> None:
        """Count columns that were pushed through the data."""
        self.columns += columns

    def begin(self, stage: str) -> None:
        """Begin another stage."""
        self.stage = stage


class Problem:
    """Σ_n loss(J_n w, y_n) over the data, its gradient, and products with G = Σ_n J_nᵀ H_n J_n.

    The loss of an example is -log p(y | f) times its weight. Continuous targets
    are taken less their mean. All vectors here are in weight space; solvers see them through
    ``operators.py``. ``sweep`` goes over the data, and handles memory, ranks, and vectors that are stored
    on another device.
    """

    def __init__(
        self,
        linear_model: LinearModel,
        likelihood: Likelihood,
        data: Data,
    ):
        self.linear_model, self.likelihood, self.data = linear_model, likelihood, data
        self.moments: Tensor | None = None
        """Mean and variance of the targets, (2, C) or (2,), once the first pass has found them; None: 0."""

        self.network_noise: Tensor | None = None
        """σ of the network's residuals, the shape of σ, once the first pass has found it."""

        if data.is_weighted:
            check_weights(likelihood)
        self.sweep = Sweep(linear_model, likelihood, data)
        self.point = Point(data)
        self.cost = Cost()
        self._is_compared = False
        """Whether derivatives have been compared with log_prob."""

    # the method

    def ggn_product(self, w: Tensor) -> Tensor:
        """Return G w, shape (K, P)."""
        total = self.sweep(w, self._product)["Gw"]
        self.cost.add(len(w))
        return total

    def loss_and_gradient(self, w: Tensor) -> tuple[float, Tensor]:
        """Return Σ_n -log p(y_n | J_n w) and its gradient, shape (P,)."""

        def add(rows: Rows, batch: Batch, w: Tensor, sums: Sums) -> None:
            Jw = rows.push(w)
            self.inspect(rows, batch)
            loss = self._loss(batch)
            rows.pull(loss.gradient(Jw), sums["g"])
            sums["loss"] += loss.value(Jw)

        sums = self.sweep(w[None], Pass({"loss": SCALAR, "g": BLOCK}, add))
        self.cost.add(1)
        return sums["loss"].item(), sums["g"][0]

    def noise_features(
        self, num_samples: int, seed: int, with_squares: bool = True
    ) -> NoiseFeatures:
        """Return η and s² from one pass, whose noise is keyed by (seed, row).

        The first such pass finds the mean of continuous targets and σ of the network's residuals, too, from
        which σ starts if the likelihood has none of its own.
        """
        squares_of = RowSquares(self.linear_model, num_samples)
        likelihood, of_targets = self.likelihood, self._sums_of_targets()

        def add(rows: Rows, batch: Batch, samples: Tensor, sums: Sums) -> None:
            at = self._at(rows, batch)
            root = partial(self._loss(batch).root, at)
            u = root(output_noise(seed, samples, batch.rows, at))
            product = torch.zeros_like(sums["eta"])
            rows.pull(u, product)
            for tensor, message in ((u, LIKELIHOOD), (product, DERIVATIVE)):
                self.sweep.expect_finite(tensor, FloatingPointError(message.format(batch.index)))
            if with_squares:
                noise = squares_of.columns(samples, at)
                own = u if noise is None else root(noise)
                sums["squares"] += squares_of(rows, own, product)
            sums["eta"] += product
            if of_targets:
                for name, part in self._loss(batch).sums_of_targets(at).items():
                    # a batch is processed once for each group of samples
                    sums[name] += len(samples) * part

        kinds: dict[str, Kind] = {"eta": BLOCK, "squares": VECTOR, **of_targets}
        task = Pass(kinds, add, squares_of.rows_at_once if with_squares else inf, with_squares)
        sums = self.sweep(torch.arange(num_samples, device="cpu"), task)
        eta, squares = sums["eta"], sums["squares"]
        self.cost.add(num_samples)
        # a feature that is only rounding is 0: it must not be scaled up
        squares *= squares > (8 * torch.finfo(squares.dtype).eps) ** 2 * squares.max()
        if (known := on_cpu({name: sums[name] for name in of_targets})) and self.sigma is not None:
            self.network_noise = noise_of_residuals(known, likelihood, is_start=False)
        if likelihood.from_data:
            sigma = noise_of_residuals(known, likelihood, is_start=self.sigma is not None)
            self.likelihood = likelihood.with_noise(sigma)
            eta, squares = eta / sigma.item(), squares / sigma.item() ** 2
        if of_targets and self._has_offset and known["counted"] >= num_samples * _FEWEST:
            self.moments = moments_of(sums, self.dtype)
        return NoiseFeatures(eta, squares / (num_samples * self.data.facts.num_rows))

    def take(self, sigma: Tensor | None, *of_targets: Tensor | None) -> None:
        """Use σ, the moments of the targets and σ of the network's residuals that a first pass has found."""
        if sigma is not None:
            self.likelihood = self.likelihood.with_noise(sigma)
        self.moments, self.network_noise = of_targets

    @property
    def constant(self) -> Tensor | None:
        """The constant of the linear model, (C,) or (); None: 0."""
        return None if self.moments is None else self.likelihood.offset(*self.moments)

    @property
    def shift(self) -> Tensor | None:
        """The part of the constant on which H depends, and which is not taken from the targets; None: 0."""
        if self.moments is None or self.likelihood.is_quadratic:
            return None
        mean, variance = self.moments
        return self.likelihood.offset(torch.zeros_like(mean), variance)

    def less_shift(self, f: Tensor) -> Tensor:
        """Return outputs of the network as those of the linear model are taken."""
        return f if self.shift is None else f - self.shift.to(f)

    @property
    def _has_offset(self) -> bool:
        """Whether the linear model has a constant."""
        return self.likelihood.offset(*torch.ones(2, 1, device="cpu")) is not None

    def _sums_of_targets(self) -> dict[str, Kind]:
        """Return the sums over targets that the first pass needs, with their shapes."""
        likelihood = self.likelihood
        is_known = self.moments is not None or self.network_noise is not None
        if is_known or not (self._has_offset or likelihood.observation_noise is not None):
            return {}
        axis = self.linear_model.network.class_dim
        shape = tuple(likelihood.align(self.data.first().targets, axis).shape[1:][-1:])
        return {"moments": (2, *shape), "errors": shape, "weights": SCALAR, "counted": SCALAR}

    @property
    def sigma(self) -> Tensor | None:
        """σ, if the fit learns it, as it does without weights."""
        return None if self.data.is_weighted else self.likelihood.observation_noise

    def loss(self, targets: Tensor, weights: Tensor | None) -> Loss:
        """Return the loss of examples in any number."""
        if self.moments is not None:
            dtype = targets.dtype if targets.is_floating_point() else self.dtype
            targets = (targets.double() - self.moments[0].to(targets.device)).to(dtype)
        return Loss(self.likelihood, targets, weights, self.shift)

    def push_forward(
        self, w: Tensor, take: Callable[[Batch, Tensor, Tensor], Any] | None = None
    ) -> list[Any]:
        """Return each of this rank's batches with f, (B, ..., C), and J w, (K, B, ..., C).

        If ``take`` is given, its values at these three are returned, and nothing else is kept. It may
        be called again if memory runs out in it.
        """
        found: list[Any] = []

        def add(rows: Rows, batch: Batch, _: Tensor, sums: Sums) -> None:
            Jw = rows.push(w)
            self.inspect(rows, batch)
            self.sweep.expect_finite(Jw)
            with torch.autocast(self.device.type, enabled=False):
                found.append((batch, rows.f, Jw) if take is None else take(batch, rows.f, Jw))

        self.sweep(torch.arange(len(w), device="cpu"), Pass({}, add))
        self.cost.add(0.5 * len(w))  # half a product
        return found

    def features(
        self, take: Callable[[Batch, Tensor, Tensor], Any]
    ) -> list[tuple[Batch, Tensor, Tensor]] | None:
        """Return each of this rank's batches with f and the features of a last layer, (1, B, ..., D).

        ``take`` returns what is kept of them. They are None if the parameters are not those of one last
        linear layer, on any rank.
        """
        found, every = [], True
        if not self.linear_model.is_last_layer:
            return None

        def add(rows: Rows, batch: Batch, _: Tensor, sums: Sums) -> None:
            nonlocal every
            self.inspect(rows, batch)
            h = rows.features
            every = every and h is not None
            if h is not None:
                self.sweep.expect_finite(h)
                found.append(take(batch, rows.f, h.to(self.dtype)[None]))

        self.sweep(torch.arange(1, device="cpu"), Pass({}, add, factored=True))
        return found if self.data.group.meet(every, all) else None

    def minibatch_products(self) -> Iterator[tuple[int, Product]]:
        """Yield the number of examples of every batch, and its own product w -> J_bᵀ H_b J_b w."""
        for num_rows, fold in self.sweep.steps():

            def product(w: Tensor, num_rows: int = num_rows, fold: Fold = fold) -> Tensor:
                self.cost.add(len(w) * num_rows / (self.data.facts.num_rows or 1))
                return fold(w, self._product)["Gw"]

            yield num_rows, product

    # the same problem, otherwise

    def with_likelihood(self, likelihood: Likelihood) -> Problem:
        """Return the same problem under another likelihood."""
        other = copy.copy(self)
        other.likelihood = likelihood
        return other

    def with_curvature_at(self, w: Tensor | None) -> Problem:
        """Return the same problem with H at the network's outputs, or at J w, for w (P,)."""
        other, near = copy.copy(self), self.linear_model.network.device
        other.point = Point(self.data, None if w is None else w[None].to(near))
        return other

    # one batch

    @property
    def _product(self) -> Pass:
        """The pass of products with G."""

        def add(rows: Rows, batch: Batch, w: Tensor, sums: Sums) -> None:
            own = self.point.missing(rows, batch)
            Jw = rows.push(w if own is None else torch.cat([own.to(w), w]))
            if own is not None:
                self.point.note(rows, batch, Jw[0])
            at = self.point.outputs(rows, batch)
            at = self.less_shift(at) if self.point.w is None else at
            self.inspect(rows, batch)
            rows.pull(self._loss(batch).product(at, Jw[-len(w) :]), sums["Gw"])

        return Pass({"Gw": BLOCK}, add)

    def _at(self, rows: Rows, batch: Batch) -> Tensor:
        """Return the outputs at which H is evaluated, (B, ..., C)."""
        at = self.point.of(rows)
        self.inspect(rows, batch)
        return self.less_shift(at) if self.point.w is None else at

    def _loss(self, batch: Batch) -> Loss:
        return self.loss(batch.targets, batch.weights)

    def inspect(self, rows: Rows, batch: Batch) -> None:
        """Check that outputs are finite: in the first pass each batch, with its targets."""
        f, tally = rows.f, batch.tally
        if not self.sweep.is_new(rows):
            return
        if tally is None:
            self.sweep.expect_finite(f)
            return
        self.sweep.expect_outputs(batch, f)
        loss = self._loss(batch)
        try:
            loss.check(f)
            if not self._is_compared:
                compare_with_log_prob(self.likelihood, f, batch.targets)
                self._is_compared = True
            tally[batch.place[0]] = f.numel(), loss.labelled().sum()
        except (TypeError, ValueError) as error:
            found = type(error)(f"Batch {batch.index}: {error}")
            raise self.sweep.fault() or found from None

    # vectors, memory, checkpoints

    @property
    def layout(self) -> ParameterLayout:
        """The parameters in the posterior."""
        return self.linear_model.layout

    @property
    def size(self) -> int:
        """P."""
        return self.layout.size

    @property
    def device(self) -> torch.device:
        """The device of vectors."""
        return self.sweep.limits.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of vectors, float32 or higher."""
        return self.linear_model.dtype

    @property
    def w_MAP(self) -> Tensor:
        """The trained weights, shape (P,), on the device of vectors."""
        return self.linear_model.w_MAP.to(self.device, self.dtype)

    def zeros(self, num_vectors: int) -> Tensor:
        """Return vectors in weight space, shape (num_vectors, P)."""
        return torch.zeros(num_vectors, self.size, dtype=self.dtype, device=self.device)


def output_noise(seed: int, samples: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    """Return ε, shape (K, B, ..., C), keyed by (seed, sample, row), for outputs (B, ..., C)."""
    near, entries = rows.to(at.device, non_blocking=True), at.shape[1:].numel()
    noise = normals(seed, _EPSILON_STREAM, samples.tolist(), near, entries)
    return noise.to(at.dtype).view(len(samples), *at.shape)
