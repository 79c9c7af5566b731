"""The problem of a fit: linear model, likelihood and data, as products that take one pass each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import Batch, Data
from torch_lla_em.jacobian import LinearModel, NetworkState, Rows
from torch_lla_em.likelihoods import Likelihood, compare_with_log_prob, warn_if_mistaken
from torch_lla_em.problem.loss import Loss, TargetFacts, check_weights, has_offset
from torch_lla_em.problem.sweep import BLOCK, OUTPUTS, SCALAR, VECTOR, Contributions, Kind, Sweep
from torch_lla_em.runtime import normals, report
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
_UNTRAINED = (
    "The network predicts its training labels no better than equal probabilities do. The posterior "
    "is that of a trained network: train it before fit."
)


class ProbeFeatures(NamedTuple):
    """The results of the first pass over the data."""

    eta: Tensor
    """η_k = Σ_n J_nᵀ S_n ε_nk ~ N(0, G), (K, P)."""

    squares: Tensor
    """The expected squared feature s², (P,)."""

    targets: TargetFacts
    """Facts about continuous targets; η and s² are computed at their σ."""


class Problem:
    """Σ_n loss(J_n w, y_n) over the data, its gradient, and products with G = Σ_n J_nᵀ H_n J_n.

    The loss of an example is -log p(y | f) times its weight. The mean of continuous targets is
    subtracted. All vectors are in parameter space; solvers see them in the coordinates of
    ``Whitened``.
    """

    def __init__(
        self,
        linear_model: LinearModel,
        likelihood: Likelihood,
        data: Data,
        state: NetworkState | None = None,
    ):
        """``state`` is the state that the network must have; None: its present state."""
        self.linear_model, self.likelihood, self.data = linear_model, likelihood, data
        self.layout, self.dtype = linear_model.layout, linear_model.dtype
        self.size, self.rounding = self.layout.size, linear_model.rounding
        """The parameters in the posterior, the dtype of vectors, float32 or higher, P, and the
        relative rounding error of products."""

        self.moments: Tensor | None = None
        """Mean and variance of the targets, (2, C) or (2,); None: they are not shifted."""

        self.network_noise: Tensor | None = None
        """σ of the network's residuals, in the shape of σ; None: not known."""

        self.constant: Tensor | None = None
        self.shift: Tensor | None = None
        """The constant of the linear model, and the part of it that is not subtracted from the
        targets because H depends on it, (C,) or (); None: 0."""

        if data.is_weighted:
            check_weights(likelihood)
        self.sweep = Sweep(linear_model, likelihood, data, state)
        self._point: Tensor | None = None
        """H is evaluated at J w for this w, (1, P); None: at the network's outputs."""

    # the method

    def ggn_product(self, w: Tensor, batch: Batch | None = None) -> Tensor:
        """Return G w, shape (K, P), or the part of one batch of every rank in it."""
        return self.sweep(w, {"Gw": BLOCK}, self._product, batch)["Gw"]

    def loss_and_gradient(self, w: Tensor) -> tuple[float, Tensor]:
        """Return Σ_n -log p(y_n | J_n w) and its gradient, shape (P,)."""

        def add(rows: Rows, batch: Batch, w: Tensor) -> Contributions:
            Jw = rows.push(w)
            self.inspect(rows, batch)
            loss = self.loss(batch.targets, batch.weights)
            return {"loss": loss.value(Jw), "g": rows.pull(loss.gradient(Jw))}

        sums = self.sweep(w[None], {"loss": SCALAR, "g": BLOCK}, add)
        return sums["loss"].item(), sums["g"][0]

    def probe_features(
        self, num_samples: int, seed: int, with_squares: bool = True
    ) -> ProbeFeatures:
        """Return η, s² and facts about continuous targets, from one pass; the problem is not
        changed.

        The probes are keyed by (seed, sample, row). Without ``with_squares``, s² is 0.
        """
        likelihood, layout = self.likelihood, self.layout
        kinds: dict[str, Kind] = {"eta": BLOCK, **({"squares": VECTOR} if with_squares else {})}
        facts = TargetFacts(None, self.moments, self.network_noise)
        is_known = self.moments is not None or self.network_noise is not None
        if not is_known and (has_offset(likelihood) or likelihood.observation_noise is not None):
            axis, y = self.linear_model.network.class_dim, self.data.first().targets
            kinds["targets"] = (5, *likelihood.align(y, axis).shape[1:][-1:])
        if likelihood.gives_probabilities and self._point is None:
            kinds["excess"] = SCALAR

        def add(rows: Rows, batch: Batch, samples: Tensor) -> Contributions:
            at = self.less_shift(rows.f) if self._point is None else rows.push(self._point)[0]
            self.inspect(rows, batch)
            loss = self.loss(batch.targets, batch.weights)
            u = loss.root(at, output_probes(seed, samples, batch.rows, at))
            product = rows.pull(u).added_to(
                torch.zeros(len(u), self.size, dtype=self.dtype, device=at.device)
            )
            for tensor, message in ((u, _LIKELIHOOD), (product, _DERIVATIVE)):
                self.sweep.expect_finite(tensor, FloatingPointError(message.format(batch.index)))
            parts = {"eta": product}
            if with_squares:
                # With factors of J the gradients of single examples are known. Their sum is exact
                # with unit columns, which are used if there are no more outputs than samples. For
                # other weights, sums over up to 32 examples are squared, which have the same
                # expectation, since the draws of examples are independent.
                if (outputs := at[0].numel()) <= num_samples:
                    # indexing by a list would make the host wait for the GPU
                    eye = num_samples**0.5 * torch.eye(outputs, dtype=at.dtype, device=at.device)
                    units = torch.cat([eye[k : k + 1] for k in samples.tolist()])
                    u = loss.root(at, units.view(-1, 1, *at.shape[1:]).expand(-1, *at.shape))
                exact, each = rows.row_squares(u), product.square().sum(0).split(layout.sizes)
                named = zip(layout.names, each, strict=True)
                parts["squares"] = torch.cat([exact.get(n, own).flatten() for n, own in named])
            if "targets" in kinds:  # a batch is processed once for each group of samples
                parts["targets"] = len(samples) * loss.sums_of_targets(at)
            if "excess" in kinds:
                parts["excess"] = len(samples) * loss.excess(at)
            return parts

        sums = self.sweep(torch.arange(num_samples, device="cpu"), kinds, add)
        eta, squares = sums["eta"], sums.get("squares", self.zeros(1)[0])
        if "excess" in kinds and sums["excess"] > 0:
            report("log", _UNTRAINED)
        if "targets" in kinds:
            of_targets = sums["targets"] / num_samples
            facts = TargetFacts.of(of_targets, likelihood, self.sigma is not None, self.dtype)
        if facts.sigma is not None:
            eta, squares = eta / facts.sigma.item(), squares / facts.sigma.item() ** 2
        return ProbeFeatures(eta, squares / (num_samples * self.data.facts.num_rows), facts)

    def push_forward(
        self, w: Tensor | None, take: Callable[[Batch, Tensor, Tensor], Any] | None = None
    ) -> list[Any]:
        """Return each of this rank's batches with f, (B, ..., C), and J w, (K, B, ..., C).

        If ``take`` is given, its results for these three are returned, and nothing else is kept. It
        may be called again if memory runs out in it. Without w, see ``features``.
        """
        results: list[Any] = []

        def add(rows: Rows, batch: Batch, _: Tensor) -> Contributions:
            Jw = rows.features if w is None else rows.push(w)
            self.inspect(rows, batch)
            if Jw is None:
                results.append(None)
                return {}
            Jw = Jw.to(self.dtype)[None] if w is None else Jw
            self.sweep.expect_finite(Jw)
            with torch.autocast(self.device.type, enabled=False):
                taken = (batch, rows.f, Jw) if take is None else take(batch, rows.f, Jw)
            results.append(taken)
            return {}

        columns = torch.arange(1 if w is None else len(w), device="cpu")
        self.sweep(columns, {}, add, weight=0.5)
        return results

    def features(
        self, take: Callable[[Batch, Tensor, Tensor], Any] | None
    ) -> list[tuple[Batch, Tensor, Tensor]] | None:
        """Return the results of ``take`` for each of this rank's batches, f and the features of a
        last layer, (1, B, ..., D).

        The result is None if the parameters are not those of one last linear layer on some rank.
        """
        if not self.linear_model.is_last_layer:
            return None
        kept = self.push_forward(None, take)
        return kept if self.data.group.meet(None not in kept, all) else None

    def minibatch_products(self) -> tuple[int, Iterator[Product]]:
        """Return the number of batches of a pass, and for every batch of all ranks the product w ->
        J_bᵀ H_b J_b w. The first call takes a pass to count the batches."""
        if self.data.num_steps is None:
            for _ in self.sweep.batches(in_step=True):
                pass
        assert self.data.num_steps is not None
        batches = self.sweep.batches(in_step=True)
        return self.data.num_steps, (partial(self.ggn_product, batch=batch) for batch in batches)

    def less_shift(self, f: Tensor) -> Tensor:
        """Return outputs of the network minus the ``shift``, which are comparable with J w."""
        return f if self.shift is None else f - self.shift.to(f)

    @property
    def sigma(self) -> Tensor | None:
        """σ if the fit learns it, which it does only without weights; otherwise None."""
        return None if self.data.is_weighted else self.likelihood.observation_noise

    # the same problem, otherwise

    def with_targets(self, facts: TargetFacts) -> Problem:
        """Return the same problem with the facts about its targets from ``probe_features``."""
        other = copy.copy(self)
        if facts.sigma is not None:
            other.likelihood = self.likelihood.with_noise(facts.sigma)
        other.moments, other.network_noise = facts.moments, facts.network_noise
        if facts.moments is not None:
            mean, variance = facts.moments
            other.constant = self.likelihood.offset(mean, variance)
            if not self.likelihood.is_quadratic:
                other.shift = self.likelihood.offset(torch.zeros_like(mean), variance)
        return other

    def with_curvature_at(self, w: Tensor | None) -> Problem:
        """Return the same problem with H at the network's outputs, or at J w, for w (P,)."""
        other, near = copy.copy(self), self.linear_model.network.device
        other._point = None if w is None else w[None].to(near)
        return other

    # one batch

    def _product(self, rows: Rows, batch: Batch, w: Tensor) -> Contributions:
        """Return the contribution of a batch to a product with G."""
        if self._point is None:
            Jw, at = rows.push(w), self.less_shift(rows.f)
        else:
            both = rows.push(torch.cat([self._point.to(w), w]))
            at, Jw = both[0], both[1:]
        self.inspect(rows, batch)
        loss = self.loss(batch.targets, batch.weights)
        return {"Gw": rows.pull(loss.product(at, Jw))}

    def loss(self, targets: Tensor, weights: Tensor | None) -> Loss:
        """Return the loss of some examples."""
        if self.moments is not None:
            dtype = targets.dtype if targets.is_floating_point() else self.dtype
            targets = (targets.double() - self.moments[0].to(targets.device)).to(dtype)
        return Loss(self.likelihood, targets, weights, self.shift)

    def inspect(self, rows: Rows, batch: Batch) -> None:
        """Check that outputs are finite. In the first pass each batch is checked together with its
        targets."""
        f, tally = rows.f, batch.tally
        if tally is None:
            self.sweep.expect_finite(f)
            return
        self.sweep.expect_finite(f, FloatingPointError(OUTPUTS.format(batch.index)))
        loss = self.loss(batch.targets, batch.weights)
        try:
            loss.check(f)
            if not tally:
                compare_with_log_prob(self.likelihood, f, batch.targets)
                warn_if_mistaken(self.likelihood, f, batch.targets)
            tally[batch.place[0]] = f.numel(), loss.labelled().sum()
        except (TypeError, ValueError) as error:
            at_batch = type(error)(f"Batch {batch.index}: {error}")
            raise self.sweep.fault() or at_batch from None

    # vectors

    @property
    def device(self) -> torch.device:
        """The device of vectors."""
        return self.sweep.plan.device

    @property
    def w_MAP(self) -> Tensor:
        """The trained weights, shape (P,), on the device of vectors."""
        return self.linear_model.w_MAP.to(self.device, self.dtype)

    def zeros(self, num_vectors: int) -> Tensor:
        """Return zeros in weight space, shape (num_vectors, P)."""
        return torch.zeros(num_vectors, self.size, dtype=self.dtype, device=self.device)


def output_probes(seed: int, samples: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    """Return ε, shape (K, B, ..., C), keyed by (seed, sample, row), for outputs (B, ..., C)."""
    near, entries = rows.to(at.device, non_blocking=True), at.shape[1:].numel()
    drawn = normals(seed, 1, samples.tolist(), near, entries)
    return drawn.to(at.dtype).view(len(samples), *at.shape)
