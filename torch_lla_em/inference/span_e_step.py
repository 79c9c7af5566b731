"""The E-step over a span of directions, to which each pass over the data adds K + 1."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.inference.controller import Controller
from torch_lla_em.inference.expectations import COPIES, entries_of, takes_draws
from torch_lla_em.inference.mean_error import error_of_mean
from torch_lla_em.inference.options import FitOptions
from torch_lla_em.inference.over_span import OverSpan
from torch_lla_em.inference.part import ahead
from torch_lla_em.inference.posterior_samples import refuse_noise
from torch_lla_em.inference.q import Q
from torch_lla_em.inference.records import Estimate, Extent, FitResult, State, Statistics
from torch_lla_em.inference.span import Span
from torch_lla_em.inference.stochastic_prior import StochasticPrior
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.problem import Problem, gathered, room, sites_of
from torch_lla_em.runtime import TensorList, or_float64, report
from torch_lla_em.solvers import dots, is_accurate

_START = 0.1
"""Initial λ relative to the mean squared output of the prior at λ = 1, for outputs of size 1."""

_DIRECTIONS = 5
"""Smallest number of directions per sample that must fit."""

_USABLE = 10.0
"""Largest usable error, in posterior standard deviations: here only rounding leaves one."""

_RESTARTS = 10
"""Largest number of restarts of the span when there is no memory for more directions."""

_FEWEST = 4
"""Smallest number of samples with which a fit continues when memory is short."""

_EXAMPLES, _NUMBERS = 512, 2**21
"""Largest number of training examples stored for predictions, and of their values."""

_POINTS, _SURE = 0.9, 0.15
"""Largest weight of functions without variance in predictions, and the share of the loss at which it is 1/e
of that; chosen on ten tables (docs/benchmarks.md)."""

_WARMEST = 2.0
"""Largest factor of q's variance in predictions, where labels are noisy; chosen on the same tables."""


class NoSpan(Exception):
    """The span cannot be stored: there is no memory for it, or the order of examples changes."""


class Directions(NamedTuple):
    """q over the present span, and what extends it."""

    q: Q
    residuals: Tensor
    """Residuals of the samples and of the mean, (K + 1, P): the next directions."""

    certificate: Tensor
    """Error bounds of the samples, (K,)."""

    restarts: int
    """How often the span was restarted because it had no memory for more directions."""


class SpanEStep:
    """The posterior over a span, to which every step adds the residuals."""

    def __init__(
        self,
        problem: Problem,
        noise: StochasticPrior,
        options: FitOptions,
        moves: bool,
        known: dict[str, Any] | None = None,
    ):
        self.problem, self._options, self._moves = problem, options, moves
        self._rows = [] if known is None else known.pop("q").parts
        self.span, self.noise = _begin(problem, noise, options, moves, known)
        self.over = OverSpan(problem, self.noise, self.span, moves, options.tolerance)

    def start(self, known: State | None = None) -> State:
        """Return the state that EM begins with; ``known`` is that of ``saved``, in an earlier run."""
        if known is not None:
            q = self.over.filled(known.own.q, self._rows)
            return known._replace(own=known.own._replace(q=q))
        precision = self._options.prior_precision
        if precision is None:
            precision = _START * self.over.prior_variance()
        return State(precision.to(self.span.xi), self.problem.sigma)

    def saved(self, state: State) -> tuple[State, dict[str, Any]]:
        """Return a state without rows for examples; these, and the directions."""
        q, rows = state.own.q.parted()
        of_q = TensorList.of(*rows, numbers=self.over.share.numbers)
        return state._replace(own=state.own._replace(q=q)), {**self.span.state(), "q": of_q}

    def is_exact(self, state: State) -> bool:
        """Whether samples and mean are within the tolerance."""
        found = state.statistics
        return found is not None and found.error <= self._options.tolerance

    def advance(self, state: State, controller: Controller) -> State:
        """Add the residuals to the span, where the controller moves λ, H and mean; compute new residuals."""
        over, span, old, grew, restarts = self.over, self.span, state.own, True, 0
        if old is None:
            q = over.first(state.precision.item(), _outputs_at_point(self.problem, self.span))
        else:
            q, restarts = old.q, old.restarts
            if not span.has_room(len(old.residuals)):
                q, restarts = over.restarted(q), restarts + 1
            grew = span.widen(ahead(over, q, old.residuals))
            q = over.widened(q, controller.is_fixed(state))
        full = not span.has_room(len(q.samples) + 1) and restarts == _RESTARTS
        extent = Extent(grew, not grew or span.is_complete, full, span.size)
        ascent = controller.ascend(over, q, state, extent)
        residuals = over.residuals(ascent.q)
        if residuals is None:
            raise NoSpan
        certificate, found = self._measured(ascent.q, residuals)
        own = Directions(ascent.q, residuals, certificate, restarts)
        return controller.judge(state, ascent, extent, found)._replace(own=own)

    def _measured(self, q: Q, residuals: Tensor) -> tuple[Tensor, Statistics]:
        """Return the certificates of samples, (K,), and the result of the E-step at q.

        Within the span, where G is known, residuals are rounding errors.
        """
        gamma = q.effective_dims.mean().clamp_min(1)
        inside = self.span.coordinates(residuals).double()
        theta = q.curved.spectrum.at_noise(q.noise).eigenvalues
        squares = ((inside @ q.curved.vectors).square() / (theta + q.precision)).sum(1)
        if not self.span.is_complete:
            outside = dots(residuals, residuals) - inside.square().sum(1)
            squares += outside.clamp_min(0) / q.precision
        of_samples, of_mean = squares[:-1], squares[-1:]
        norm = (q.precision * q.mean.square().sum()).clamp_min(1)
        errors = (of_mean / norm).sqrt().item(), (of_samples.mean() / gamma).sqrt().item()
        return of_samples.sqrt(), self.over.statistics(q, *errors)

    def posterior(self, state: State) -> FitResult:
        """Return the posterior at the final λ and σ."""
        found: Any = state.statistics
        if not is_accurate(found.error, self._options.tolerance):
            _warn(found, self._options.tolerance, self.problem.dtype)
        known = self.cut_short(state)
        if self._moves:
            return known
        return known._replace(log_evidence=Estimate.of(self.over.with_evidence(state.own.q).bounds))

    def cut_short(self, state: State) -> FitResult:
        """Return the posterior of a state without further passes over the data."""
        q, found, over = state.own.q, state.statistics, self.over
        columns = self.span.weights(torch.cat([q.mean[None], q.samples]))
        known = FitResult(
            found.precision,
            found.sigma,
            columns[0],
            columns[1:].clone(),
            self.noise.prior.scale,
            found.effective_dim,
            state.own.certificate,
            found.log_evidence,
        )
        if self._moves:
            of_all = _average(self.problem.likelihood, over, q), error_of_mean(over, q)
            mixture, of_mean = (part.to(columns.device) for part in of_all)
            known = known._replace(mixture=mixture, mean_error=of_mean)
            if self.span.sites is None:  # predictions have all sites
                examples, leverages = (part.to(columns.device) for part in _at_examples(over, q))
                known = known._replace(examples=examples, leverages=leverages)
        return known


def _average(likelihood: Likelihood, over: OverSpan, q: Q) -> Tensor:
    """Return the components of predictions: q, its mean alone, and the network.

    Where labels can be predicted surely, q is less certain than it should be, and its mean and the network
    correct it. Their weight decreases with the share of the loss of uniform predictions that q leaves,
    since they are overconfident of labels that are noisy, and with the share of the network's f that
    the mean of q loses, since this is large if the network has overfitted. Of noisy labels q is overconfident
    too, since its features and its mean were learnt from the same noise, and its variance is scaled up. For
    targets other than classes or labels, q alone is better.
    """
    f, expected = over.f, over.expected
    curved = expected.product(q.curved.H, f.reshape(-1, 1)).view(f.shape)
    sums = torch.stack([(curved * q.outputs).sum(), (curved * f).sum()])
    of_mean, of_f = over.share.sum(sums)
    kept = of_mean / of_f.clamp_min(1e-30)
    points, scale = 0.0, 1.0
    if likelihood.gives_probabilities:
        left = q.loss / max(expected.loss(torch.zeros_like(f), None), 1e-30)
        points = _POINTS * kept.clamp(0, 1).item() * math.exp(-left / _SURE)
        scale = min(_WARMEST, max(1.0, left / _SURE))
    if q.effective_dims.mean() < 4 / len(
        q.effective_dims
    ):  # collapsed to a prior that keeps nothing
        points = 2 / 3
    parts = [[1 - points, 1, 0, scale], [points / 2, 1, 0, 0], [points / 2, 0, 1, 0]]
    return torch.tensor(parts, dtype=torch.float64, device="cpu")


def _at_examples(over: OverSpan, q: Q) -> tuple[Tensor, Tensor]:
    """Return J w_k at training examples spread evenly over the data, (n, K, ..., C), and their leverages.

    The leverages are (J w_k)ᵀ H J w_l / K, (n, K, K).
    """
    (_, *outputs), K, N = over.expected.shape, len(q.samples), over.share.total
    number = min(N, _EXAMPLES, _NUMBERS // max(1, K * math.prod(outputs)))
    chosen = torch.linspace(0, N - 1, number, device="cpu").round().long()
    pushed = over.span.of_all.push(q.samples)
    places, rows = (part.to(pushed.device) for part in over.share.find(chosen))
    Jw = pushed[rows]
    curved = over.expected.product(q.curved.H, Jw.flatten(0, -2), rows).view_as(Jw)
    leverages = Jw.flatten(1, -2).mT @ curved.flatten(1, -2) / K
    found = Jw.movedim(-1, 1).contiguous(), leverages
    every = [part.new_zeros(number, *part.shape[1:]).index_copy_(0, places, part) for part in found]
    examples, leverages = map(over.share.sum, every)
    return examples, leverages


def _begin(
    problem: Problem,
    noise: StochasticPrior,
    options: FitOptions,
    moves: bool,
    known: dict[str, Any] | None,
) -> tuple[Span, StochasticPrior]:
    """Return a span of random probes, trained weights and first gradient, or restore a known one."""
    prior, memory = noise.prior, options.memory_of_span(room(problem))
    span = Span(problem, prior, noise.xi, memory, sites_of(problem, options.seed))
    if known is not None:
        span.restore(known)
        known.clear()  # of which there would be two
        K = len(span.noise)
        return span, noise._replace(xi=span.noise, eta=noise.eta[:K])
    held = _that_fits(problem, noise, span, moves)
    if held is None:
        raise NoSpan
    span.keep(len(held.xi))
    _, gradient = problem.loss_and_gradient(problem.zeros(1)[0])
    pulls = torch.stack([prior.scale * gradient, prior.unscaled(problem.w_MAP)])
    if not span.widen(held.xi, prior.scale * held.eta, pulls):
        raise NoSpan
    return span, held


def _outputs_at_point(problem: Problem, span: Span) -> Tensor | None:
    """Return J w for the point at which H is evaluated; None for the network's outputs."""
    point = problem.point.w
    if point is None:
        return None
    pushed = problem.push_forward(point.to(problem.device), span.part)
    found = gathered(problem, pushed, 1)
    if found is None:
        raise NoSpan
    return found.Jw[0]


def _that_fits(
    problem: Problem, noise: StochasticPrior, span: Span, moves: bool
) -> StochasticPrior | None:
    """Return random probes for as many samples as memory allows; None if these are too few."""
    data, K = problem.data, len(noise.xi)
    sites = max(1, data.facts.num_targets)
    classes = data.facts.num_outputs // sites
    kept = sites if span.sites is None else span.sites.outputs / classes
    outputs = span.num_outputs * noise.xi.element_size()
    many = takes_draws(problem.likelihood, classes, outputs, span.memory)
    blocks = outputs * entries_of(problem.likelihood, classes, kept, many)
    left = span.memory - (COPIES * blocks if moves else 0)
    fits = int(left / span.bytes_of(_DIRECTIONS)) - 1
    if fits < K:
        span.store_in_half()
        fits = int(left / span.bytes_of(_DIRECTIONS)) - 1
    if fits < (min(K, _FEWEST) if moves else K):
        return None
    if fits >= K:
        return noise
    report(
        "log",
        f'There is memory for {fits} posterior samples with curvature="variational" instead of {K}. The '
        f"fit continues with {fits}. For more samples free memory, or choose fewer `parameters`.",
    )
    return noise._replace(xi=noise.xi[:fits], eta=noise.eta[:fits])


def _warn(found: Statistics, tolerance: float, dtype: torch.dtype) -> None:
    refuse_noise(found.error, found.precision, dtype, _USABLE)
    report(
        "warn",
        f"The posterior has a numerical error of {found.error:.2g} posterior standard deviations, above the "
        f"tolerance of {tolerance:.2g}: there was no memory for more directions, or rounding prevents it. Use "
        f"fewer samples, or increase `tolerance`{or_float64(dtype)}.",
    )
