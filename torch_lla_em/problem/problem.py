"""The problem of a fit: linear model, likelihood and data, as products that take one pass each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from math import inf
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.data import Batch, Data
from torch_lla_em.jacobian import LinearModel, ParameterLayout, Rows
from torch_lla_em.likelihoods import Likelihood, compare_with_log_prob
from torch_lla_em.problem.loss import Loss, check_weights, moments_of, noise_of_residuals, on_cpu
from torch_lla_em.problem.sweep import BLOCK, SCALAR, VECTOR, Kind, Pass, Sums, Sweep
from torch_lla_em.runtime import normals
from torch_lla_em.solvers import Product

_DERIVATIVE = (
    "The derivative of the network's outputs on batch {} is not finite, although the outputs are: "
    "some layer has no derivative there, for example a square root or a norm at 0. Use for "
    "example sqrt(x + 1e-12), or remove those examples."
)
_LIKELIHOOD = (
    "The likelihood's curvature on batch {} is not finite: check the network's outputs and the "
    "targets of this batch for extreme values."
)
_EPSILON_STREAM = 1

# smallest number of targets of an output from which a mean is taken
_FEWEST = 10
# examples whose sum is squared where there are no factors
_GROUP_ROWS = 32
# outputs of an example up to which all columns of S are taken, also of fewer samples
_EXACT_OUTPUTS = 32


class Problem:
    """Σ_n loss(J_n w, y_n) over the data, its gradient, and products with G = Σ_n J_nᵀ H_n J_n.

    The loss of an example is -log p(y | f) times its weight. Continuous targets are taken less their mean. All vectors here are in weight space; solvers see them through ``operators.py``.
    """

    def __init__(self, linear_model: LinearModel, likelihood: Likelihood, data: Data):
        self.linear_model, self.likelihood, self.data = linear_model, likelihood, data
        self.moments: Tensor | None = None
        """Mean and variance of the targets, (2, C) or (2,), once the first pass has found them; None: 0."""

        self.network_noise: Tensor | None = None
        """σ of the network's residuals, the shape of σ, once the first pass has found it."""

        if data.is_weighted:
            check_weights(likelihood)
        self.sweep = Sweep(linear_model, likelihood, data)
        self._point: Tensor | None = None
        """The w of J w at which H is evaluated, (1, P); None: at the network's own outputs."""

        self._is_compared = False
        """Whether derivatives have been compared with log_prob."""

    # the method

    def ggn_product(self, w: Tensor) -> Tensor:
        """Return G w, shape (K, P)."""
        return self.sweep(w, self._product())["Gw"]

    def loss_and_gradient(self, w: Tensor) -> tuple[float, Tensor]:
        """Return Σ_n -log p(y_n | J_n w) and its gradient, shape (P,)."""

        def add(rows: Rows, batch: Batch, w: Tensor, sums: Sums) -> None:
            Jw = rows.push(w)
            self.inspect(rows, batch)
            loss = self.loss(batch.targets, batch.weights)
            rows.pull(loss.gradient(Jw), sums["g"])
            sums["loss"] += loss.value(Jw)

        sums = self.sweep(w[None], Pass({"loss": SCALAR, "g": BLOCK}, add))
        return sums["loss"].item(), sums["g"][0]

    def noise_features(
        self, num_samples: int, seed: int, with_squares: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return η_k = Σ_n J_nᵀ S_n ε_nk ~ N(0, G), (K, P), and the expected squared feature s², (P,), from one pass.

        The noise is keyed by (seed, row). Without ``with_squares``, s² is 0. The first such pass finds the mean of
        continuous targets and σ of the network's residuals, too, from which σ starts if the likelihood has none.
        """
        likelihood, of_targets = self.likelihood, self._sums_of_targets()

        def add(rows: Rows, batch: Batch, samples: Tensor, sums: Sums) -> None:
            at, loss = self.at(rows, batch), self.loss(batch.targets, batch.weights)
            u = loss.root(at, output_noise(seed, samples, batch.rows, at))
            product = torch.zeros_like(sums["eta"])
            rows.pull(u, product)
            for tensor, message in ((u, _LIKELIHOOD), (product, _DERIVATIVE)):
                self.sweep.expect_finite(tensor, FloatingPointError(message.format(batch.index)))
            if with_squares:
                units = _unit_columns(samples, at, num_samples)
                own = u if units is None else loss.root(at, units)
                sums["squares"] += _squares(rows, self.layout, own, product)
            sums["eta"] += product
            if of_targets:
                for name, part in loss.sums_of_targets(at).items():
                    # a batch is processed once for each group of samples
                    sums[name] += len(samples) * part

        known_names = self.linear_model.report is not None and self.linear_model.factored
        by_factors = {*(known_names or ())} == {*self.layout.names}
        at_most = _GROUP_ROWS if with_squares and not by_factors else inf
        kinds: dict[str, Kind] = {"eta": BLOCK, "squares": VECTOR, **of_targets}
        samples = torch.arange(num_samples, device="cpu")
        sums = self.sweep(samples, Pass(kinds, add, at_most, with_squares))
        eta, squares = sums["eta"], sums["squares"]
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
        return eta, squares / (num_samples * self.data.facts.num_rows)

    def push_forward(
        self, w: Tensor, take: Callable[[Batch, Tensor, Tensor], Any] | None = None
    ) -> list[Any]:
        """Return each of this rank's batches with f, (B, ..., C), and J w, (K, B, ..., C).

        If ``take`` is given, its values at these three are returned, and nothing else is kept. It may
        be called again if memory runs out in it.
        """
        return self._taken(lambda rows: rows.push(w), take, len(w))

    def features(
        self, take: Callable[[Batch, Tensor, Tensor], Any]
    ) -> list[tuple[Batch, Tensor, Tensor]] | None:
        """Return what ``take`` keeps of each of this rank's batches, f and the features of a last layer, (1, B, ..., D).

        None if the parameters are not those of one last linear layer, on any rank.
        """
        if not self.linear_model.is_last_layer:
            return None

        def features(rows: Rows) -> Tensor | None:
            return None if rows.features is None else rows.features.to(self.dtype)[None]

        found = self._taken(features, take, 1, factored=True)
        return found if self.data.group.meet(None not in found, all) else None

    def _taken(
        self,
        of: Callable[[Rows], Tensor | None],
        take: Callable[[Batch, Tensor, Tensor], Any] | None,
        columns: int,
        factored: bool = False,
    ) -> list[Any]:
        """Return what is taken of each batch, of f, and of a function of the linear model; None where that is None."""
        found: list[Any] = []

        def add(rows: Rows, batch: Batch, _: Tensor, sums: Sums) -> None:
            each = of(rows)
            self.inspect(rows, batch)
            if each is None:
                found.append(None)
                return
            self.sweep.expect_finite(each)
            with torch.autocast(self.device.type, enabled=False):
                kept = batch, rows.f, each
                found.append(kept if take is None else take(*kept))

        self.sweep(
            torch.arange(columns, device="cpu"), Pass({}, add, factored=factored, columns=0.5)
        )
        return found

    def minibatch_products(self) -> Iterator[Product]:
        """Yield the product w -> J_bᵀ H_b J_b w of one batch of every rank, until all examples are in one."""
        for batch in self.sweep.batches(in_step=True):

            def product(w: Tensor, batch: Batch = batch) -> Tensor:
                return self.sweep(w, self._product(), batch)["Gw"]

            yield product

    # the constant of the linear model, and σ

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

    # the same problem, otherwise

    def with_likelihood(self, likelihood: Likelihood) -> Problem:
        """Return the same problem under another likelihood."""
        other = copy.copy(self)
        other.likelihood = likelihood
        return other

    def with_curvature_at(self, w: Tensor | None) -> Problem:
        """Return the same problem with H at the network's outputs, or at J w, for w (P,)."""
        other, near = copy.copy(self), self.linear_model.network.device
        other._point = None if w is None else w[None].to(near)
        return other

    # one batch

    def _product(self) -> Pass:
        """Return the pass of products with G."""
        last: list[Any] = [None, None]  # the point's outputs, for all columns of a batch

        def add(rows: Rows, batch: Batch, w: Tensor, sums: Sums) -> None:
            if self._point is None:
                Jw, at = rows.push(w), self.less_shift(rows.f)
            elif last[0] is rows:
                Jw, at = rows.push(w), last[1]
            else:
                both = rows.push(torch.cat([self._point.to(w), w]))
                last[:] = rows, both[0]
                Jw, at = both[1:], both[0]
            self.inspect(rows, batch)
            loss = self.loss(batch.targets, batch.weights)
            rows.pull(loss.product(at, Jw), sums["Gw"])

        return Pass({"Gw": BLOCK}, add)

    def at(self, rows: Rows, batch: Batch) -> Tensor:
        """Return the outputs of a batch at which H is evaluated, (B, ..., C)."""
        at = self.less_shift(rows.f) if self._point is None else rows.push(self._point)[0]
        self.inspect(rows, batch)
        return at

    def loss(self, targets: Tensor, weights: Tensor | None) -> Loss:
        """Return the loss of examples in any number."""
        if self.moments is not None:
            dtype = targets.dtype if targets.is_floating_point() else self.dtype
            targets = (targets.double() - self.moments[0].to(targets.device)).to(dtype)
        return Loss(self.likelihood, targets, weights, self.shift)

    def inspect(self, rows: Rows, batch: Batch) -> None:
        """Check that outputs are finite: in the first pass each batch, with its targets."""
        f, tally = rows.f, batch.tally
        if not self.sweep.is_new(rows):
            return
        if tally is None:
            self.sweep.expect_finite(f)
            return
        self.sweep.expect_outputs(f, batch)
        loss = self.loss(batch.targets, batch.weights)
        try:
            loss.check(f)
            if not self._is_compared:
                compare_with_log_prob(self.likelihood, f, batch.targets)
                self._is_compared = True
            tally[batch.place[0]] = f.numel(), loss.labelled().sum()
        except (TypeError, ValueError) as error:
            found = type(error)(f"Batch {batch.index}: {error}")
            raise self.sweep.fault() or found from None

    # vectors

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


def _unit_columns(samples: Tensor, at: Tensor, num_samples: int) -> Tensor | None:
    """Return the share of these samples in the unit columns, times √K; None for S ε of rows with many outputs."""
    size = at[0].numel()
    if size > max(num_samples, _EXACT_OUTPUTS):
        return None
    # no index of a list, which a GPU would be waited for
    eye = num_samples**0.5 * torch.eye(size, dtype=at.dtype, device=at.device)
    units = torch.cat([eye[k::num_samples] for k in samples.tolist()])
    return units.view(-1, 1, *at.shape[1:]).expand(-1, *at.shape)


def _squares(rows: Rows, layout: ParameterLayout, own: Tensor, product: Tensor) -> Tensor:
    """Return K Σ_n diag(J_nᵀ H_n J_n) of a batch for some samples, (P,), from S times unit columns, and Jᵀ S ε.

    By factors of J the gradients of single examples are known, and the sum is exact. Other weights have the squares
    of sums over up to 32 examples: the same expectation, since the draws of examples are independent.
    """
    squares, total = rows.row_squares(own), product.square().sum(0)
    for name, block in zip(layout.names, total.split(layout.sizes)):
        if name in squares:
            block.copy_(squares[name].flatten())
    return total
