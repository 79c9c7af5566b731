"""The E-step over a span of directions, which each pass over the data widens by K + 1."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.inference.em import Found, Info, State, em
from torch_lla_em.inference.evidence import sigma_of
from torch_lla_em.inference.expectations import Expectations
from torch_lla_em.inference.expected_curvature import ExpectedCurvature
from torch_lla_em.inference.fixed_curvature import FixedCurvature
from torch_lla_em.inference.mackay import Estimate, Expectation, Hyperparameters, MStep, Step
from torch_lla_em.inference.options import FitOptions
from torch_lla_em.inference.over_span import Q
from torch_lla_em.inference.posterior import Posterior
from torch_lla_em.inference.posterior_samples import refuse_noise
from torch_lla_em.inference.span import Span
from torch_lla_em.inference.stochastic_prior import StochasticPrior
from torch_lla_em.problem import Problem, outputs, room
from torch_lla_em.runtime import normals
from torch_lla_em.solvers import BlockKrylov

logger = logging.getLogger("torch_lla_em")

_DRAWS, _FEWEST, _IN_ALL = 16, 4, 16_000
"""Most and fewest draws for an example, and the number for all: sums over examples average them."""

_FALL = 3.0
"""λ may fall by this factor before the space is widened: narrow spaces ask for too much of it."""

_SETTLED = {True: (0.3, 0.1), False: (0.1, 0.03)}
"""Errors of the samples and of the mean at which λ is taken as found, if H moves and if not."""

_GAIN = 0.3
"""Nats of a few rounds that are worth another pass; the bound itself is known to some."""

_START = 0.1
"""λ over the mean squared output of the prior at λ = 1."""

_STEPS = 10
"""Steps of Newton's method for the mean once λ is found."""

_EPSILON_STREAM = 1

_DIRECTIONS, _BLOCKS = 5, 12
"""Fewest directions per sample, and blocks (C, C) per example, for which a fit needs memory."""

_RESTARTS = 10
"""Most restarts of the span when it has no memory for more directions."""

_PATIENCE = 8
"""Steps at a λ that is kept, of which none takes a tenth off the error: what is left is rounding."""

FEWEST_SAMPLES = 4
"""With which a fit goes on where memory allows no more."""

_EXAMPLES, _NUMBERS = 512, 2**21
"""Training examples that are kept for predictions at most, and numbers of all of them."""

_TRUST = 4
"""Power of what is kept of f, by which the network is trusted in predictions."""


class NoSpan(Exception):
    """J w over all examples cannot be kept: there is no memory, or their order changes."""


class Reached(NamedTuple):
    """What the E-step goes on with."""

    q: Q
    residuals: Tensor
    """Residuals of the samples and of the mean, (K + 1, P): the next directions."""

    certificate: Tensor
    """Error bounds of the samples, (K,)."""

    restarts: int
    """How often the span was restarted because it had no memory for more directions."""

    best: float = math.inf
    """The least error so far at a λ that is kept."""

    stalled: int = 0
    """Steps since then."""


class SpanEStep:
    """The posterior over a span, which every step widens by what was missing."""

    def __init__(
        self,
        problem: Problem,
        noise: StochasticPrior,
        options: FitOptions,
        moves: bool,
        known: dict[str, Any] | None = None,
    ):
        self._problem, self._options, self._moves = problem, options, moves
        self._at = _outputs_at_point(problem) if known is None else known.pop("at")
        """Outputs (N, ..., C) that H is taken at, where they are not the network's."""

        span, self.noise = _begin(problem, noise, options, moves, known)
        self.span, (f, targets, _) = span, span.rows
        likelihood: Any = problem.likelihood
        if not moves:
            likelihood = likelihood if sigma_of(problem) is None else likelihood.without_constant()
            expected = Expectations(likelihood, targets, f, noise.seed, 0)
            self.over: Any = FixedCurvature(
                problem, self.noise, span, expected, options.tolerance, self._at
            )
            return
        rows, K = torch.arange(len(f), device=f.device), len(self.noise.xi)
        epsilon = normals(noise.seed, _EPSILON_STREAM, range(K), rows, f[0].numel())
        number = min(_DRAWS, max(_FEWEST, -(-_IN_ALL // len(f))))
        expected = Expectations(likelihood, targets, f, noise.seed, number)
        self.over = ExpectedCurvature(span, expected, epsilon.to(f).view(K, *f.shape))

    def start(self) -> State:
        """Return the state that EM begins with."""
        precision, span = self._options.prior_precision, self.span
        if precision is None:
            square = (span.J @ span.xi.T.to(span.J)).square().mean()
            precision = _START * square.double()
        return State(Hyperparameters(precision.to(span.xi), sigma_of(self._problem)))

    def state(self) -> dict[str, Any]:
        """Return the directions, beside what EM's own state holds."""
        return {**self.span.state(), "at": self._at}

    def is_exact(self, state: State) -> bool:
        """Whether samples and mean are within the tolerance."""
        return state.own is not None and _error(state.info) <= self._options.tolerance

    def advance(self, state: State, m_step: MStep, kept: bool) -> Found:
        """Widen the span by what was missing, move λ, H and mean over it, see what is missing."""
        over, old, learns = self.over, state.own, self._options.em_steps > 0
        climbs, at_rest, restarts = old is None or not kept, False, 0
        if old is None:
            q = over.first(state.hyper.precision.item())
        else:
            q, restarts = old.q, old.restarts
            if not self.span.has_room(len(old.residuals)):
                q, restarts = over.restarted(q), restarts + 1
            at_rest = not self.span.widen(old.residuals)
            q = over.widened(q, _STEPS if kept else 1)
        before, complete = q, at_rest or self.span.is_complete
        if not complete and (old is None or state.info.sample_error > 1):
            m_step = replace(m_step, warns=False)  # λ and σ are far from known
        if complete and (climbs or self._moves):
            q, found_all = over.settle(q, m_step, learns)
        elif climbs:
            q, found_all = (
                over.ascend(q, m_step, q.precision / _FALL if learns else math.inf),
                False,
            )
        else:
            found_all = False
        residuals = over.residuals(q)
        if residuals is None:
            raise NoSpan
        certificate, found = self._expected(q, residuals)
        step = state.step
        settled = found_all or (step is not None and step.settled)
        if climbs or (complete and self._moves):
            step = m_step.taken(step, over.hyper(before), found.hyper, q.effective_dims)
            step = step._replace(settled=settled or self._has_settled(step, before, q, found))
            if learns and not (self._moves or complete) and found.sample_error > 1:
                # a span that is still narrow has taken no step
                step = step._replace(number=0 if state.step is None else state.step.number)
        full = not self.span.has_room(len(certificate) + 1) and restarts == _RESTARTS
        best, stalled = (math.inf, 0) if old is None or climbs else (old.best, old.stalled + 1)
        error = max(found.mode_error, found.sample_error)
        if error < 0.9 * best:
            best, stalled = error, 0
        own = Reached(q, torch.cat(residuals), certificate, restarts, best, stalled)
        ended = complete if self._moves else at_rest and (kept or step.settled)
        return Found(found, step, own, ended or full or stalled == _PATIENCE)

    def _has_settled(self, step: Step, before: Q, q: Q, found: Expectation) -> bool:
        """Whether λ has moved by less than its Monte Carlo error, or in vain, in a wide span."""
        moves = self._moves
        still = step.change < 1 or (moves and q.bound - before.bound < _GAIN)
        of_samples, of_mean = _SETTLED[moves]
        return still and found.sample_error < of_samples and found.mode_error < of_mean

    def _expected(self, q: Q, residuals: tuple[Tensor, Tensor]) -> tuple[Tensor, Expectation]:
        """Return the certificates of samples, (K,), and the expectations under q."""
        dots, gamma = self._problem.space.dots, q.effective_dims.mean().clamp_min(1)
        of_samples, of_mean = (dots(r, r) / q.precision for r in residuals)
        norm = (q.precision * q.mean.square().sum()).clamp_min(1)
        errors = (of_mean / norm).sqrt().item(), (of_samples.mean() / gamma).sqrt().item()
        return of_samples.sqrt(), self.over.expectation(q, *errors)

    def posterior(self, state: State) -> Posterior:
        """Return the posterior that EM has ended with."""
        q, info = state.own.q, state.info
        if _error(info) > self._options.tolerance:
            _warn(info, self._options.tolerance)
        columns = self.span.weights(torch.cat([q.mean[None], q.samples]))
        spectrum = modes = mixture = examples = None
        evidence = info.log_evidence
        if self._moves:
            mixture = _average(self.over, q).to(columns.device)
            examples = _at_examples(self.over, q.samples).to(columns.device)
        else:
            q = self.over.with_evidence(q)
            evidence, spectrum = Estimate.of(q.bounds), q.curved.spectrum.at_noise(q.noise)
            modes = torch.stack(self.over.modes(q))
        return Posterior(
            info.hyper,
            columns[0],
            columns[1:].clone(),
            self.noise.prior.scale,
            info.effective_dim,
            state.own.certificate,
            evidence,
            info.loss,
            info.mode_error,
            info.sample_error,
            spectrum,
            modes,
            mixture,
            examples,
        )


def over_span(
    problem: Problem,
    noise: StochasticPrior,
    options: FitOptions,
    moves: bool,
    on_step: Callable[[State, Any], None],
    start: tuple[State, Any] | None = None,
) -> Posterior | None:
    """Return the posterior over a span; None where J w over all rows cannot be kept.

    ``on_step`` gets the state of EM and the directions, from which a later call can ``start``.
    """
    state, known = start or (None, None)
    try:
        e_step = SpanEStep(problem, noise, options, moves, known)
        state = state or e_step.start()
        for reached in em(
            e_step, MStep(problem, noise.prior, options.update), state, options.em_steps
        ):
            state = reached
            on_step(state, e_step.state())
        return e_step.posterior(state)
    except NoSpan:
        return None


def _average(over: ExpectedCurvature, q: Q) -> Tensor:
    """Return the parts of predictions: q, and in some measure its mean alone and the network.

    They are wrong at different inputs, and equal weights do best unless the network has overfitted:
    the mean of q then keeps only a share of the network's f, and their weights fall with this share.
    """
    f = over.span.rows.f
    curved = over.expected.masked((q.curved.blocks @ f.unsqueeze(-1)).squeeze(-1))
    kept = (curved * over.outputs(q.mean)).sum() / (curved * f).sum().clamp_min(1e-30)
    collapsed = q.effective_dims.mean() < 4 / len(q.effective_dims)  # to a prior that keeps nothing
    w = (1 / 3) if collapsed else kept.clamp(0, 1).item() ** _TRUST / 3
    parts = [[1 - 2 * w, 1, 0, 1], [w, 1, 0, 0], [w, 0, 1, 0]]
    return torch.tensor(parts, dtype=torch.float64, device="cpu")


def _at_examples(over: ExpectedCurvature, samples: Tensor) -> Tensor:
    """Return J w_k at training examples that are spread evenly over the data, (n, K, ..., C)."""
    N, *outputs = shape = over.expected.shape
    number = min(N, _EXAMPLES, _NUMBERS // max(1, len(samples) * math.prod(outputs)))
    chosen = torch.linspace(0, N - 1, number, device="cpu").round().long()
    J = over.span.J.view(*shape, -1)[chosen.to(over.span.J.device)]
    return (J @ samples.T.to(J)).movedim(-1, 1).contiguous()


def _begin(
    problem: Problem,
    noise: StochasticPrior,
    options: FitOptions,
    moves: bool,
    known: dict[str, Any] | None,
) -> tuple[Span, StochasticPrior]:
    """Return a span of the noise, the network's weights and the first gradient, or a known one."""
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
    if not span.widen(torch.cat([held.xi, prior.scale * held.eta, pulls])):
        raise NoSpan
    return span, held


def _outputs_at_point(problem: Problem) -> Tensor | None:
    """Return J w for the weights that H is taken at, None where it is taken at the network's outputs."""
    point = problem.point.w
    if point is None:
        return None
    found = outputs(problem, problem.vectors.own(point).to(problem.device))
    if found is None:
        raise NoSpan
    return found.Jw[0]


def _that_fits(
    problem: Problem, noise: StochasticPrior, span: Span, moves: bool
) -> StochasticPrior | None:
    """Return the noise of as many samples as memory allows, None where it allows too few."""
    data, K = problem.data, len(noise.xi)
    sites = data.num_rows if problem.likelihood.elementwise else data.num_targets
    blocks = data.num_outputs**2 / max(1, sites) * noise.xi.element_size()
    left = span.memory - (_BLOCKS * blocks if moves else 0)
    fits = int(left / span.bytes_of(_DIRECTIONS)) - 1
    if fits < (min(K, FEWEST_SAMPLES) if moves else K):
        return None
    return noise if fits >= K else with_fewer(noise, fits)


def with_fewer(noise: StochasticPrior, number: int) -> StochasticPrior:
    """Return the noise of the first samples, and log that they are fewer than was asked for."""
    logger.warning(
        'Memory allows %d posterior samples with curvature="variational", not %d: the fit goes on '
        "with %d. Free memory, or choose fewer `parameters`, for more.",
        *(number, len(noise.xi), number),
    )
    return noise._replace(xi=noise.xi[:number], eta=noise.eta[:number])


def _error(info: Info) -> float:
    """Return that of the samples and of the mean."""
    return max(info.sample_error, info.mode_error)


def _warn(info: Info, tolerance: float) -> None:
    error = _error(info)
    refuse_noise(error, info.hyper.precision)
    warnings.warn(
        f"The posterior is known to an error of {error:.1e} only, not "
        f"{tolerance:.1e}: there was no room for more directions, or rounding allows no more. "
        "Take fewer samples, raise `tolerance`, or convert the model and its data to float64.",
        stacklevel=2,
    )
