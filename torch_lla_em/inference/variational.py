"""Variational EM: λ and the posterior that ascend one bound, by one K-column pass a step."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.inference.ascent import Q, Variational
from torch_lla_em.inference.draws import Draws
from torch_lla_em.inference.em import Info
from torch_lla_em.inference.mackay import (
    Estimate,
    Hyperparameters,
    monte_carlo_error,
    warn_unsettled,
)
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

_TRUST = 4
"""Power of what is kept of f, by which the network is trusted in predictions."""


class Wanted(NamedTuple):
    """What is asked of a variational posterior."""

    tolerance: float
    max_steps: int = 20
    """Of λ; 0 keeps it."""

    precision: Tensor | None = None
    """Where λ begins; None has it chosen."""


class Ascent(NamedTuple):
    """What the ascent goes on with after a step."""

    q: Q
    residuals: Tensor
    """Of the samples and of the mean, (K + 1, P): the directions that come next."""

    certificate: Tensor
    """Of the samples, (K,)."""

    told: Info
    moved: float
    """The last step of log λ."""

    found: bool
    """Whether λ has settled."""

    settled: bool
    """Whether λ is kept from now on: it has settled, or may take no more steps."""

    ended: bool
    """Whether the space could not be widened."""

    restarts: int
    """Of the space, where memory held no more directions."""

    @property
    def error(self) -> float:
        """That of the samples and of the mean."""
        return max(self.told.sample_error, self.told.mode_error)


def variational(
    problem: Problem,
    noise: StochasticPrior,
    wanted: Wanted,
    on_step: Callable[[Info | None, Ascent, Any], None],
    start: tuple[Ascent, Any] | None = None,
) -> Posterior | None:
    """Return the variational posterior; None where J w over all rows cannot be kept.

    ``on_step`` gets what is new of λ, and both parts of what a later call can ``start`` from.
    """
    at, known = start or (None, None)
    steps = _begin(problem, noise, known)
    if steps is None:
        return None
    learns, began = wanted.max_steps > 0, time.monotonic() - (at.told.seconds if at else 0.0)
    while at is None or not (at.settled and at.error <= wanted.tolerance):
        found, settled, ended, number, restarts = False, False, False, 0, 0
        if at is None:
            q = _first(steps, wanted.precision)
        else:
            full = not steps.space.has_room(len(at.residuals))
            if at.ended or (full and at.restarts == _RESTARTS):
                _warn(at.told, wanted.tolerance)
                break
            found, settled, number = at.found, at.settled, at.told.step
            q, restarts = (steps.restarted(at.q) if full else at.q), at.restarts + full
            if steps.space.widen(at.residuals):
                q = steps.widened(q, _STEPS if settled else 1)
            else:
                (q, found), ended, settled = _at_rest(steps, q, learns), True, False
        before = q
        if steps.space.is_complete and not ended:
            (q, found), ended, settled = _at_rest(steps, q, learns), True, False
        elif not (settled or ended):
            q = steps.ascend(q, q.precision / _FALL if learns else math.inf)
        residuals = steps.residuals(q)
        if residuals is None:
            return None
        certificate, told = _told(problem, steps, q, residuals)
        number += not settled
        told = told._replace(step=number, seconds=time.monotonic() - began)
        fresh = None if settled else told
        if not settled:
            found = found or _has_settled(before, q, told)
            settled = ended or found or number >= max(1, wanted.max_steps)
        moved = abs(math.log(q.precision / before.precision))
        now = torch.cat(residuals), certificate, told, moved, found, settled, ended, restarts
        at = Ascent(q, *now)
        on_step(fresh, at, steps.space.state())
    if learns and not at.found:
        warn_unsettled(at.told.step, at.moved)
    columns = steps.space.weights(torch.cat([at.q.mean[None], at.q.samples]))
    return Posterior(
        at.told.hyper,
        columns[0],
        columns[1:].clone(),
        noise.prior.scale,
        at.told.effective_dim,
        at.certificate,
        at.told.log_evidence,
        at.told.loss,
        at.told.mode_error,
        at.told.sample_error,
        None,
        None,
        mixture=_average(steps, at.q).to(columns.device),
    )


def _at_rest(steps: Variational, q: Q, learns: bool) -> tuple[Q, bool]:
    """Return q at its fixed point over a span that cannot grow, and whether it was reached."""
    q, found = steps.settle(q, learns)
    return steps.at(q.spectrum, q.precision, q.mean, 5 * _STEPS), found


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


def _begin(
    problem: Problem, noise: StochasticPrior, known: dict[str, Any] | None
) -> Variational | None:
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
            return None
        noise, space.noise, space.xi = held, held.xi, space.xi[: len(held.xi)]
        _, gradient = problem.loss_and_gradient(problem.zeros(1)[0])
        pulls = torch.stack([prior.scale * gradient, prior.unscaled(problem.w_MAP)])
        if not space.widen(torch.cat([noise.xi, prior.scale * noise.eta, pulls])):
            return None
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


def _first(steps: Variational, precision: Tensor | None) -> Q:
    """Return q at the curvature of undecided outputs and of the network's."""
    space, draws = steps.space, steps.draws
    f = space.rows.f
    H = 0.5 * (draws.curvature(0 * f, None) + draws.curvature(f, None))
    if precision is None:
        start = _START * (space.J @ space.xi.T.to(space.J)).square().mean().item()
    else:
        start = precision.item()
    return steps.at(steps.spectrum(H), start, torch.zeros_like(space.xi[0]))


def _told(
    problem: Problem, steps: Variational, q: Q, residuals: tuple[Tensor, Tensor]
) -> tuple[Tensor, Info]:
    """Return the certificates of samples, (K,), and what is told of a step."""
    dots, gamma = problem.space.dots, q.effective_dims.mean().clamp_min(1)
    of_samples, of_mean = (dots(r, r) / q.precision for r in residuals)
    norm = q.mean.square().sum()
    precision = torch.tensor(q.precision, dtype=torch.float64, device="cpu").to(norm)
    return of_samples.sqrt(), Info(
        0,
        Hyperparameters(precision),
        Estimate.of(q.effective_dims),
        norm,
        steps.draws.loss(steps.outputs(q.mean), None),
        Estimate.of(q.bounds),
        (of_mean / (precision * norm).clamp_min(1)).sqrt().item(),
        (of_samples.mean() / gamma).sqrt().item(),
        problem.cost.columns,
        0.0,
    )


def _has_settled(before: Q, q: Q, told: Info) -> bool:
    """Whether λ has moved by less than its Monte Carlo error, or in vain, in a wide space."""
    allowed = monte_carlo_error(q.effective_dims.mean(), len(q.effective_dims)).item()
    still = abs(math.log(q.precision / before.precision)) < allowed
    still |= q.bound - before.bound < _GAIN
    return still and told.sample_error < _SETTLED[0] and told.mode_error < _SETTLED[1]


def _warn(told: Info, tolerance: float) -> None:
    error = max(told.sample_error, told.mode_error)
    refuse_noise(error, told.hyper.precision)
    if error > tolerance:
        warnings.warn(
            f"The variational posterior is known to an error of {error:.1e} only, not "
            f"{tolerance:.1e}: there was no room for more directions, or rounding allows no more. "
            "Take fewer samples, raise `tolerance`, or convert the model and its data to float64.",
            stacklevel=2,
        )
