"""The E-step over a span of directions, to which each pass over the data adds K + 1."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.inference.ascent import Pace, climb, settle
from torch_lla_em.inference.em import Found, Posterior, State
from torch_lla_em.inference.evidence import sigma_of
from torch_lla_em.inference.mackay import (
    Estimate,
    Expectation,
    Hyperparameters,
    MStep,
    Step,
)
from torch_lla_em.inference.options import FitOptions
from torch_lla_em.inference.over_span import OverSpan, Q
from torch_lla_em.inference.posterior_samples import refuse_noise
from torch_lla_em.inference.span import Span
from torch_lla_em.inference.stochastic_prior import StochasticPrior
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.problem import Problem, gathered, room
from torch_lla_em.runtime import PRECISION_BOUNDS, report
from torch_lla_em.solvers import BlockKrylov, dots

_FALL = 3.0
"""Largest factor by which λ may decrease before the span is extended; small spans overestimate it."""

_SETTLED = {True: (0.3, 0.1), False: (0.1, 0.03)}
"""Errors of samples and mean below which λ can be converged, for a variational and a fixed H."""

_GAIN = 0.3
"""Gain of the bound in nats that is worth another pass; its Monte Carlo error is larger."""

_START = 0.1
"""Initial λ relative to the mean squared output of the prior at λ = 1, for outputs of size 1."""

_STEPS = 10
"""Newton steps for the mean once λ has converged."""

_SETTLING = 20, 400
"""Largest numbers of steps of λ and σ (and H) over a span, and over a complete one."""

_DIRECTIONS, _BLOCKS = 5, 6
"""Smallest number of directions per sample, and of (C, C) blocks per example, that must fit."""

_RESTARTS = 10
"""Largest number of restarts of the span when there is no memory for more directions."""

_PATIENCE = 8
"""Steps at a fixed λ without a decrease of the error by 10 % after which only rounding is left."""

_FEWEST = 4
"""Smallest number of samples with which a fit continues when memory is short."""

_EXAMPLES, _NUMBERS = 512, 2**21
"""Largest number of training examples stored for predictions, and of their values."""

_POINTS, _SURE = 0.9, 0.15
"""Largest weight of functions without variance in predictions, and the share of the loss at which it is 1/e
of that; chosen on ten tables (docs/benchmarks.md)."""


class NoSpan(Exception):
    """The span cannot be stored: there is no memory for it, or the order of examples changes."""


class Reached(NamedTuple):
    """The state of the E-step."""

    q: Q
    residuals: Tensor
    """Residuals of the samples and of the mean, (K + 1, P): the next directions."""

    certificate: Tensor
    """Error bounds of the samples, (K,)."""

    pace: Pace
    """The length of the next steps of λ and H."""

    restarts: int
    """How often the span was restarted because it had no memory for more directions."""

    best: float = math.inf
    """The smallest error so far at the fixed λ."""

    stalled: int = 0
    """Steps since then."""


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
        self.span, self.noise = _begin(problem, noise, options, moves, known)
        self.over = OverSpan(problem, self.noise, self.span, moves, options.tolerance)

    def start(self) -> State:
        """Return the state that EM begins with."""
        precision = self._options.prior_precision
        if precision is None:
            precision = _START * self.over.prior_variance()
        return State(Hyperparameters(precision.to(self.span.xi), sigma_of(self.problem)))

    def state(self) -> dict[str, Any]:
        """Return the directions, which are not part of the state of EM."""
        return self.span.state()

    def is_exact(self, state: State) -> bool:
        """Whether samples and mean are within the tolerance."""
        return state.own is not None and state.info.found.error <= self._options.tolerance

    def advance(self, state: State, m_step: MStep, kept: bool) -> Found:
        """Add the residuals to the span, update λ, H and mean, and compute the new residuals."""
        over, old, learns = self.over, state.own, self._options.em_steps > 0
        climbs, at_rest, restarts, pace = old is None or not kept, False, 0, Pace()
        if old is None:
            q = over.first(state.hyper.precision.item(), _outputs_at_point(self.problem))
        else:
            q, restarts, pace = old.q, old.restarts, old.pace
            if not self.span.has_room(len(old.residuals)):
                q, restarts = over.restarted(q), restarts + 1
            at_rest = not self.span.widen(old.residuals)
            q = over.widened(q, _STEPS if kept else 1)
        before, complete, found_all = q, at_rest or self.span.is_complete, False
        climbs = climbs or (complete and self._moves)
        least = PRECISION_BOUNDS[0] if complete else q.precision / _FALL
        least = least if learns else math.inf
        if climbs and self._moves and not complete:
            q, pace = climb(over, q, least, pace)
        elif climbs:
            q, found_all = settle(over, q, m_step, least, _SETTLING[complete])
        residuals = over.residuals(q)
        if residuals is None:
            raise NoSpan
        certificate, found = self._expected(q, residuals)
        step = state.step
        settled = (complete and found_all) or (step is not None and step.settled)
        if climbs:
            step = m_step.taken(step, over.hyper(before), found.hyper, q.effective_dims)
            step = step._replace(settled=settled or self._has_settled(step, before, q, found))
            if learns and not (self._moves or complete) and found.sample_error > 1:
                # steps over a span that is too small do not count
                step = step._replace(number=0 if state.step is None else state.step.number)
        full = not self.span.has_room(len(certificate) + 1) and restarts == _RESTARTS
        best, stalled = (math.inf, 0) if old is None or climbs else (old.best, old.stalled + 1)
        if found.error < 0.9 * best:
            best, stalled = found.error, 0
        own = Reached(q, residuals, certificate, pace, restarts, best, stalled)
        ended = complete if self._moves else at_rest and (kept or step.settled)
        return Found(found, step, own, ended or full or stalled == _PATIENCE)

    def _has_settled(self, step: Step, before: Q, q: Q, found: Expectation) -> bool:
        """Whether λ has converged: by its Monte Carlo error or the gain of the bound, in a large span."""
        moves = self._moves
        still = step.change < 1 or (moves and q.bound - before.bound < _GAIN)
        of_samples, of_mean = _SETTLED[moves]
        return still and found.sample_error < of_samples and found.mode_error < of_mean

    def _expected(self, q: Q, residuals: Tensor) -> tuple[Tensor, Expectation]:
        """Return the certificates of samples, (K,), and the expectations under q."""
        gamma = q.effective_dims.mean().clamp_min(1)
        of_samples, of_mean = (dots(r, r) / q.precision for r in (residuals[:-1], residuals[-1:]))
        norm = (q.precision * q.mean.square().sum()).clamp_min(1)
        errors = (of_mean / norm).sqrt().item(), (of_samples.mean() / gamma).sqrt().item()
        return of_samples.sqrt(), self.over.expectation(q, *errors)

    def posterior(self, state: State) -> Posterior:
        """Return the posterior at the final λ and σ."""
        found = state.info.found
        if found.error > self._options.tolerance:
            _warn(found, self._options.tolerance)
        known = self.cut_short(state)
        if self._moves:
            return known
        return known._replace(log_evidence=Estimate.of(self.over.with_evidence(state.own.q).bounds))

    def cut_short(self, state: State) -> Posterior:
        """Return the posterior of a state without further passes over the data."""
        q, found, over = state.own.q, state.info.found, self.over
        columns = self.span.weights(torch.cat([q.mean[None], q.samples]))
        known = Posterior(
            found.hyper,
            columns[0],
            columns[1:].clone(),
            self.noise.prior.scale,
            found.effective_dim,
            state.own.certificate,
            found.log_evidence,
        )
        if self._moves:
            of_all = _average(self.problem.likelihood.plain, over, q), _at_examples(over, q.samples)
            mixture, examples = (part.to(columns.device) for part in of_all)
            return known._replace(mixture=mixture, examples=examples)
        return known


def _average(likelihood: Likelihood, over: OverSpan, q: Q) -> Tensor:
    """Return the components of predictions: q, its mean alone, and the network.

    Where labels can be predicted surely, q is less certain than it should be, and its mean and the network
    correct it. Their weight decreases with the share of the loss of uniform predictions that q leaves,
    since they are overconfident of labels that are noisy, and with the share of the network's f that
    the mean of q loses, since this is large if the network has overfitted. For targets other than
    classes or labels, q alone is better.
    """
    f, expected = over.f, over.expected
    curved = expected.product(q.curved.H, f.reshape(-1, 1)).view(f.shape)
    kept = (curved * q.outputs).sum() / (curved * f).sum().clamp_min(1e-30)
    points = 0.0
    if likelihood.gives_probabilities:
        left = q.loss / max(expected.loss(torch.zeros_like(f), None), 1e-30)
        points = _POINTS * kept.clamp(0, 1).item() * math.exp(-left / _SURE)
    if q.effective_dims.mean() < 4 / len(
        q.effective_dims
    ):  # collapsed to a prior that keeps nothing
        points = 2 / 3
    parts = [[1 - points, 1, 0, 1], [points / 2, 1, 0, 0], [points / 2, 0, 1, 0]]
    return torch.tensor(parts, dtype=torch.float64, device="cpu")


def _at_examples(over: OverSpan, samples: Tensor) -> Tensor:
    """Return J w_k at training examples that are spread evenly over the data, (n, K, ..., C)."""
    N, *outputs = over.expected.shape
    number = min(N, _EXAMPLES, _NUMBERS // max(1, len(samples) * math.prod(outputs)))
    chosen = torch.linspace(0, N - 1, number, device="cpu").round().long()
    pushed = over.span.of_all.push(samples)
    return pushed[chosen.to(pushed.device)].movedim(-1, 1).contiguous()


def _begin(
    problem: Problem,
    noise: StochasticPrior,
    options: FitOptions,
    moves: bool,
    known: dict[str, Any] | None,
) -> tuple[Span, StochasticPrior]:
    """Return a span of random probes, trained weights and first gradient, or restore a known one."""
    prior, memory = noise.prior, room(problem) / 2
    if isinstance(options.solver, BlockKrylov) and options.solver.memory is not None:
        memory = min(memory, options.solver.memory)
    span = Span(problem, prior, noise.xi, memory)
    if known is not None:
        span.restore(known)
        known.clear()  # of which there would be two
        K = len(span.noise)
        return span, noise._replace(xi=span.noise, eta=noise.eta[:K])
    held = _that_fits(problem, noise, span, moves)
    if held is None:
        raise NoSpan
    span.noise, span.xi = held.xi, span.xi[: len(held.xi)]
    _, gradient = problem.loss_and_gradient(problem.zeros(1)[0])
    pulls = torch.stack([prior.scale * gradient, prior.unscaled(problem.w_MAP)])
    if not span.widen(held.xi, prior.scale * held.eta, pulls):
        raise NoSpan
    return span, held


def _outputs_at_point(problem: Problem) -> Tensor | None:
    """Return J w for the point at which H is evaluated; None for the network's outputs."""
    point = problem.point.w
    if point is None:
        return None
    pushed = problem.push_forward(point.to(problem.device))
    found = gathered(problem, pushed, 1)
    if found is None:
        raise NoSpan
    return found.Jw[0]


def _that_fits(
    problem: Problem, noise: StochasticPrior, span: Span, moves: bool
) -> StochasticPrior | None:
    """Return random probes for as many samples as memory allows; None if these are too few."""
    data, K = problem.data, len(noise.xi)
    blocks = data.num_outputs**2 / max(1, data.num_targets) * noise.xi.element_size()
    left = span.memory - (_BLOCKS * blocks if moves else 0)
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


def _warn(found: Expectation, tolerance: float) -> None:
    refuse_noise(found.error, found.hyper.precision)
    report(
        "warn",
        f"The posterior has a numerical error of {found.error:.1e} and did not reach the tolerance of "
        f"{tolerance:.1e}: there was no memory for more directions, or rounding prevents it. Use "
        "fewer samples, increase `tolerance`, or convert the model and its data to float64.",
    )
