"""Variational EM: λ and the posterior that ascend one bound, by one K-column pass a step."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.inference.ascent import Q, Variational
from torch_lla_em.inference.draws import Draws
from torch_lla_em.inference.em import Found, Info, State, em
from torch_lla_em.inference.mackay import Expectation, Hyperparameters, MStep, Step
from torch_lla_em.inference.posterior import Posterior
from torch_lla_em.inference.posterior_samples import refuse_noise
from torch_lla_em.inference.search_space import SearchSpace
from torch_lla_em.inference.stochastic_prior import StochasticPrior
from torch_lla_em.problem import Problem, room
from torch_lla_em.runtime import normals

logger = logging.getLogger("torch_lla_em")

_DRAWS, _FEWEST, _IN_ALL = 16, 4, 16_000
"""Of every row at most and at least, and of all rows together: sums over rows average them."""

_FALL = 3.0
"""λ may fall by this factor before the space is widened: narrow spaces ask for too much of it."""

_SETTLED = 0.3, 0.1
"""Errors of the samples and of the mean at which λ is taken as found."""

_GAIN = 0.3
"""Nats of a few rounds that are worth another pass; the bound itself is known to some."""

_START = 0.1
"""λ over the mean squared output of the prior at λ = 1."""

_STEPS = 10
"""Of Newton's method for the mean, once λ is found."""

_EPSILON_STREAM = 1

_DIRECTIONS, _BLOCKS = 5, 12
"""Directions a sample, and blocks (C, C) a row, that a fit holds at least."""

_RESTARTS = 10
"""Of the span, where memory holds no more directions."""

FEWEST_SAMPLES = 4
"""With which a fit goes on where memory allows no more."""

_EXAMPLES, _NUMBERS = 512, 2**21
"""Training examples that are kept for predictions at most, and numbers of all of them."""

_TRUST = 4
"""Power of what is kept of f, by which the network is trusted in predictions."""


class Wanted(NamedTuple):
    """What is asked of a variational posterior."""

    tolerance: float
    max_steps: int = 20
    """Of λ; 0 keeps it."""

    precision: Tensor | None = None
    """Where λ begins; None has it chosen."""


class NoSpan(Exception):
    """J w over all examples cannot be kept: there is no memory, or their order changes."""


class Ascent(NamedTuple):
    """What the ascent goes on with after a step."""

    q: Q
    residuals: Tensor
    """Of the samples and of the mean, (K + 1, P): the directions that come next."""

    certificate: Tensor
    """Of the samples, (K,)."""

    restarts: int
    """Of the space, where memory held no more directions."""


class VariationalEStep:
    """The posterior whose H is an expectation under itself: every step widens its space."""

    def __init__(
        self,
        problem: Problem,
        noise: StochasticPrior,
        wanted: Wanted,
        known: dict[str, Any] | None = None,
    ):
        self._problem, self._noise, self._wanted = problem, noise, wanted
        self._steps = _begin(problem, noise, known)

    def start(self) -> State:
        """Return the state that EM begins with."""
        precision, space = self._wanted.precision, self._steps.space
        if precision is None:
            square = (space.J @ space.xi.T.to(space.J)).square().mean()
            precision = _START * square.double()
        return State(Hyperparameters(precision.to(space.xi)))

    def state(self) -> dict[str, Any]:
        """Return the directions, beside what EM's own state holds."""
        return self._steps.space.state()

    def is_exact(self, state: State) -> bool:
        """Whether samples and mean are within the tolerance."""
        return state.own is not None and _error(state.info) <= self._wanted.tolerance

    def advance(self, state: State, m_step: MStep, kept: bool) -> Found:
        """Widen the space by what was missing, move λ, H and mean over it, see what is missing."""
        steps, old, settled = self._steps, state.own, state.step is not None and state.step.settled
        climbs, at_rest, restarts = old is None or not kept, False, 0
        if old is None:
            q = _first(steps, state.hyper.precision.item())
        else:
            q, restarts = old.q, old.restarts
            if not steps.space.has_room(len(old.residuals)):
                q, restarts = steps.restarted(q), restarts + 1
            at_rest = not steps.space.widen(old.residuals)
            q = q if at_rest else steps.widened(q, _STEPS if kept else 1)
        before, learns = q, self._wanted.max_steps > 0
        if at_rest or steps.space.is_complete:
            q, settled = steps.settle(q, learns)
            q, at_rest = steps.at(q.spectrum, q.precision, q.mean, 5 * _STEPS), True
        elif climbs:
            q = steps.ascend(q, q.precision / _FALL if learns else math.inf)
        residuals = steps.residuals(q)
        if residuals is None:
            raise NoSpan
        certificate, found = _expected(self._problem, steps, q, residuals)
        step = state.step
        if at_rest or climbs:
            here = Hyperparameters(torch.full_like(found.hyper.precision, before.precision))
            step = m_step.taken(step, here, found.hyper, q.effective_dims)
            settled = settled or _has_settled(step, q.bound - before.bound, found)
            step = step._replace(settled=settled)
        full = not steps.space.has_room(len(certificate) + 1) and restarts == _RESTARTS
        return Found(
            found, step, Ascent(q, torch.cat(residuals), certificate, restarts), at_rest or full
        )

    def posterior(self, state: State) -> Posterior:
        """Return the posterior that EM has ended with."""
        q, info = state.own.q, state.info
        if _error(info) > self._wanted.tolerance:
            _warn(info, self._wanted.tolerance)
        columns = self._steps.space.weights(torch.cat([q.mean[None], q.samples]))
        return Posterior(
            info.hyper,
            columns[0],
            columns[1:].clone(),
            self._noise.prior.scale,
            info.effective_dim,
            state.own.certificate,
            info.log_evidence,
            info.loss,
            info.mode_error,
            info.sample_error,
            None,
            None,
            mixture=_average(self._steps, q).to(columns.device),
            examples=_at_examples(self._steps, q.samples).to(columns.device),
        )


def variational(
    problem: Problem,
    noise: StochasticPrior,
    wanted: Wanted,
    on_step: Callable[[State, Any], None],
    start: tuple[State, Any] | None = None,
) -> Posterior | None:
    """Return the variational posterior; None where J w over all rows cannot be kept.

    ``on_step`` gets the state of EM and the directions, from which a later call can ``start``.
    """
    state, known = start or (None, None)
    try:
        e_step = VariationalEStep(problem, noise, wanted, known)
        state = state or e_step.start()
        states = em(e_step, MStep(problem, noise.prior), state, wanted.max_steps)
        for state in states:
            on_step(state, e_step.state())
        return e_step.posterior(state)
    except NoSpan:
        return None


def _average(steps: Variational, q: Q) -> Tensor:
    """Return the parts of predictions: q, and in some measure its mean alone and the network.

    They are wrong in different places, and equal weights do best, but where the network has learnt
    noise by heart: its mean then keeps less than the whole of the network's f, and so do they.
    """
    f = steps.space.rows.f
    curved = steps.draws.masked((q.spectrum.curvature @ f.unsqueeze(-1)).squeeze(-1))
    kept = (curved * steps.outputs(q.mean)).sum() / (curved * f).sum().clamp_min(1e-30)
    collapsed = q.effective_dims.mean() < 4 / len(q.effective_dims)  # to a prior that keeps nothing
    w = (1 / 3) if collapsed else kept.clamp(0, 1).item() ** _TRUST / 3
    parts = [[1 - 2 * w, 1, 0, 1], [w, 1, 0, 0], [w, 0, 1, 0]]
    return torch.tensor(parts, dtype=torch.float64, device="cpu")


def _at_examples(steps: Variational, samples: Tensor) -> Tensor:
    """Return J w_k at training examples that are spread evenly over the data, (n, K, ..., C)."""
    N, *outputs = shape = steps.draws.shape
    number = min(N, _EXAMPLES, _NUMBERS // max(1, len(samples) * math.prod(outputs)))
    chosen = torch.linspace(0, N - 1, number, device="cpu").round().long()
    J = steps.space.J.view(*shape, -1)[chosen.to(steps.space.J.device)]
    return (J @ samples.T.to(J)).movedim(-1, 1).contiguous()


def _begin(problem: Problem, noise: StochasticPrior, known: dict[str, Any] | None) -> Variational:
    """Return a space of the noise, the network's weights and the first gradient, or a known one."""
    space = SearchSpace(problem, noise.prior, noise.xi, room(problem) / 2)
    prior, seed = noise.prior, noise.seed
    if known is not None:
        space.restore(known)
        known.clear()  # of which there would be two
        noise = noise._replace(xi=space.noise)
    else:
        held = _that_fits(problem, noise, space)
        if held is None:
            raise NoSpan
        noise, space.noise, space.xi = held, held.xi, space.xi[: len(held.xi)]
        _, gradient = problem.loss_and_gradient(problem.zeros(1)[0])
        pulls = torch.stack([prior.scale * gradient, prior.unscaled(problem.w_MAP)])
        if not space.widen(torch.cat([noise.xi, prior.scale * noise.eta, pulls])):
            raise NoSpan
    f, targets, _ = space.rows
    rows, K = torch.arange(len(f), device=f.device), len(noise.xi)
    epsilon = normals(seed, _EPSILON_STREAM, range(K), rows, f[0].numel())
    number = min(_DRAWS, max(_FEWEST, -(-_IN_ALL // len(f))))
    draws = Draws(problem.likelihood, targets, f, seed, number)
    return Variational(space, draws, epsilon.to(f).view(K, *f.shape))


def _that_fits(
    problem: Problem, noise: StochasticPrior, space: SearchSpace
) -> StochasticPrior | None:
    """Return the noise of as many samples as memory allows, None where it allows too few."""
    data, K = problem.data, len(noise.xi)
    sites = data.num_rows if problem.likelihood.elementwise else data.num_targets
    blocks = data.num_outputs**2 / max(1, sites) * noise.xi.element_size()
    left = room(problem) / 2 - _BLOCKS * blocks
    fits = int(left / space.bytes_of(_DIRECTIONS)) - 1
    if fits < min(K, FEWEST_SAMPLES):
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


def _first(steps: Variational, precision: float) -> Q:
    """Return q at the curvature of undecided outputs and of the network's."""
    draws, f = steps.draws, steps.space.rows.f
    H = 0.5 * (draws.curvature(0 * f, None) + draws.curvature(f, None))
    return steps.at(steps.spectrum(H), precision, torch.zeros_like(steps.space.xi[0]))


def _expected(
    problem: Problem, steps: Variational, q: Q, residuals: tuple[Tensor, Tensor]
) -> tuple[Tensor, Expectation]:
    """Return the certificates of samples, (K,), and the expectations under q."""
    dots, gamma = problem.space.dots, q.effective_dims.mean().clamp_min(1)
    of_samples, of_mean = (dots(r, r) / q.precision for r in residuals)
    norm = q.mean.square().sum()
    precision = torch.full_like(norm, q.precision)
    return of_samples.sqrt(), Expectation(
        Hyperparameters(precision),
        q.effective_dims,
        norm,
        steps.draws.loss(steps.outputs(q.mean), None),
        None,
        None,
        None,
        q.bounds,
        (of_mean / (precision * norm).clamp_min(1)).sqrt().item(),
        (of_samples.mean() / gamma).sqrt().item(),
    )


def _has_settled(step: Step, gained: float, found: Expectation) -> bool:
    """Whether λ has moved by less than its Monte Carlo error, or in vain, in a wide space."""
    still = step.change < 1 or gained < _GAIN
    return still and found.sample_error < _SETTLED[0] and found.mode_error < _SETTLED[1]


def _error(info: Info) -> float:
    """Return that of the samples and of the mean."""
    return max(info.sample_error, info.mode_error)


def _warn(info: Info, tolerance: float) -> None:
    error = _error(info)
    refuse_noise(error, info.hyper.precision)
    warnings.warn(
        f"The variational posterior is known to an error of {error:.1e} only, not "
        f"{tolerance:.1e}: there was no room for more directions, or rounding allows no more. "
        "Take fewer samples, raise `tolerance`, or convert the model and its data to float64.",
        stacklevel=2,
    )
