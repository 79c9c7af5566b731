"""From options and data to a posterior: which solver, the EM iteration, the last E-step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, NamedTuple

from torch import Tensor

from torch_lla_em.inference.em import Info, State, em
from torch_lla_em.inference.evidence import sigma_of
from torch_lla_em.inference.iterative_e_step import make_e_step, starting_point
from torch_lla_em.inference.mackay import Hyperparameters, MStep
from torch_lla_em.inference.options import FitOptions, allows_span, choose_curvature
from torch_lla_em.inference.posterior import Posterior
from torch_lla_em.inference.span_e_step import FEWEST_SAMPLES, over_span, with_fewer
from torch_lla_em.inference.stochastic_prior import (
    StochasticPrior,
    get_sto_samples,
    with_noise,
)
from torch_lla_em.problem import (
    VECTORS,
    Problem,
    columns_held,
    size_of,
)
from torch_lla_em.runtime import DoesNotFit, Grown, shortage_of

logger = logging.getLogger("torch_lla_em")

# H at the linear mode moves λ, and λ the mode, but little after the first time
_LINEAR_ROUNDS = 5
_LINEAR_CHANGE = 0.05


# γ below which the g-prior has kept nothing of the data
_KEPT = 0.1


_NO_ROWS = (
    'curvature="variational" needs the outputs of a few directions at all examples: there is no '
    "memory for them, or the examples come in another order at every pass. The fit goes on with "
    'curvature="%s", whose predictions are usually worse. Use a loader that does not shuffle, '
    "fewer `parameters`, or more memory; otherwise call `calibrate`."
)


_NO_SPAN = (
    "The outputs of a few directions at all examples cannot be kept: there is no memory for them, or "
    "the examples come in another order at every pass. The fit goes on by products with G."
)


class Progress(NamedTuple):
    """All that a fit goes on with after an EM step, as nested tuples of tensors and numbers."""

    num_steps: int
    """EM steps so far."""

    eta: Grown
    """η of the noise, shape (K, P), as its only part: it is seldom drawn again."""

    scale: Tensor
    """Prior standard deviation of every weight at λ = 1, shape (P,)."""

    sigma: Tensor | None
    """σ that the noise was drawn at, of a Gaussian likelihood."""

    state: State | None = None
    """What the iteration goes on with: None: the noise is drawn, no more."""

    directions: Any = None
    """What the E-step goes on with: directions, and what the data say of them."""

    round: int = 0
    """How often H has been taken at the linear mode."""

    point: Tensor | None = None
    """The weights (P,) that H is taken at; None: at the network's outputs."""

    begun: Tensor | None = None
    """log λ where this round began."""

    other: Posterior | None = None
    """The posterior of the g-prior, where the plain prior is tried beside it."""


Observe = Callable[[Info | None, Progress], None]
"""What is new of λ, None if nothing is; and all that the fit goes on with."""


def learn(
    problem: Problem, options: FitOptions, on_step: Observe, start: Progress | None = None
) -> Posterior:
    """Run EM to its fixed point, then the last E-step; ``on_step`` is called after every step.

    ``start`` is what ``on_step`` was told last in an earlier run, to go on from.
    """
    number = 0 if start is None else start.num_steps

    def tell(info: Info | None, progress: Progress) -> None:
        nonlocal number
        number += info is not None
        told = info and info._replace(step=number)
        on_step(told, progress._replace(num_steps=number, other=found))

    try:
        found = None if start is None else start.other
        if found is None:
            posterior, start = _learn(problem, options, tell, start), None
            if not _collapsed(posterior, options):
                return posterior.assembled(problem)
            found = posterior
        other = replace(options, g_prior=False, prior_precision=None)
        return _better(found, _learn(problem, other, tell, start)).assembled(problem)
    except (RuntimeError, MemoryError) as error:
        raise DoesNotFit(_no_room(problem, options.num_samples, shortage_of(error))) from None


def _collapsed(found: Posterior, options: FitOptions) -> bool:
    """Whether a g-prior has kept nothing of the data, where another may be tried."""
    if options.layerwise or not (options.g_prior and options.em_steps):
        return False
    return found.effective_dim.value.sum().item() < _KEPT


def _better(found: Posterior, plain: Posterior) -> Posterior:
    """Return the posterior of the larger evidence, and tell both."""
    before, after = found.log_evidence.value.item(), plain.log_evidence.value.item()
    logger.warning(
        "With the g-prior the posterior was the prior (γ = %.2g). The plain prior has a log evidence "
        "of %.5g against %.5g, and is %s.",
        *(found.effective_dim.value.item(), after, before),
        "taken" if after > before else "no better",
    )
    return plain if after > before else found


def _learn(
    problem: Problem, options: FitOptions, tell: Observe, start: Progress | None
) -> Posterior:
    if start is not None:
        if start.sigma is not None:
            problem.take_noise(start.sigma)
        noise = with_noise(
            problem, start.eta.parts[0], start.scale, options.seed, options.layerwise
        )
    else:
        with problem.cost.stage("noise"):
            noise = get_sto_samples(
                problem, options.num_samples, options.seed, options.g_prior, options.layerwise
            )
        start = Progress(0, Grown.of(noise.eta), noise.prior.scale, sigma_of(problem))
        tell(None, start)
    _check_start(options.prior_precision, options, len(noise.prior.layout.names))
    curvature, quadratic = options.curvature, problem.likelihood.is_quadratic
    curvature = curvature or choose_curvature(problem, options)
    if curvature == "variational" and not quadratic:
        if start.state is None or start.state.own is not None:
            found = _over_span(problem, noise, options, tell, start, moves=True)
            if found is not None:
                return found
            start = start._replace(state=None, directions=None)
        curvature = "network" if options.curvature is None else "linear"
        logger.warning(_NO_ROWS, curvature)
    rounds = 0
    if curvature != "network" and not quadratic:
        # a loss with several modes would wander from one to the next
        rounds = _LINEAR_ROUNDS if problem.likelihood.convex else 1
    while True:
        at = problem if start.point is None else problem.with_curvature_at(start.point)
        found = None
        if allows_span(problem, options) and (start.state is None or start.state.own is not None):
            found = _over_span(at, noise, options, tell, start, moves=False)
            if found is None:
                logger.warning(_NO_SPAN)
                start = start._replace(state=None, directions=None)
        if found is None:
            found, noise = _by_solves(at, noise, options, tell, start)
        log_precision, moved = found.hyper.precision.log(), inf
        if start.begun is not None:
            moved = (log_precision - start.begun).abs().max().item()
        if start.round == rounds or moved < _LINEAR_CHANGE:
            return found
        noise = noise.drawn_again(problem.with_curvature_at(found.w_lin))
        options = replace(options, prior_precision=found.hyper.precision)
        start = start._replace(
            eta=Grown.of(noise.eta),
            state=None,
            directions=None,
            round=start.round + 1,
            point=found.w_lin,
            begun=log_precision,
        )


def _over_span(
    problem: Problem,
    noise: StochasticPrior,
    options: FitOptions,
    tell: Observe,
    start: Progress,
    moves: bool,
) -> Posterior | None:
    """Return the posterior over a span, None where there is none: H ``moves``, or is fixed.

    Out of memory, a fit whose curvature moves goes on with fewer samples.
    """
    known = None if start.state is None else (start.state, start.directions)

    def observe(state: State, directions: Any) -> None:
        told = state.info if state.fresh else None
        tell(told, start._replace(state=state, directions=directions))

    with problem.cost.stage("ascent" if moves else "span"):
        while True:
            run = partial(over_span, problem, noise, options, moves, observe, known)
            found, shortage = problem.attempt(run)
            if found is not None or not (moves and shortage) or len(noise.xi) <= FEWEST_SAMPLES:
                return found
            noise, known = with_fewer(noise, max(FEWEST_SAMPLES, len(noise.xi) // 2)), None


def _by_solves(
    problem: Problem, noise: StochasticPrior, options: FitOptions, tell: Observe, start: Progress
) -> tuple[Posterior, StochasticPrior]:
    """Return the posterior by solves at one λ after the other, and the noise, η of which may be new."""
    if start.state is None:
        hyper = Hyperparameters(starting_point(problem, noise, options), sigma_of(problem))
        start = start._replace(state=State(hyper))
    m_step, state = MStep(problem, noise.prior, options.update), start.state
    e_step = make_e_step(problem, noise, options, state.hyper, start.directions)
    if start.directions is not None:
        start.directions.clear()  # the E-step may let go of what it takes
    progress = start._replace(directions=None)
    for reached in em(e_step, m_step, state, options.em_steps):
        state = reached
        if e_step.noise.eta is not progress.eta.parts[0]:
            progress = progress._replace(eta=Grown.of(e_step.noise.eta))
        now = progress._replace(state=state, directions=e_step.state())
        tell(state.info, now)
        del now
    return e_step.posterior(state.hyper, options.tolerance), e_step.noise


def _no_room(problem: Problem, num_samples: int, shortage: str) -> str:
    columns = columns_held(problem, num_samples)
    block = columns * problem.linear_model.layout.size * problem.dtype.itemsize
    outputs = problem.data.num_outputs
    return (
        f"Memory on {problem.device} ended outside of the passes over the data ({shortage}). "
        f"{num_samples} samples of {problem.size:,} weights take {size_of(block)}, and a fit "
        f"up to {VECTORS} times that, beside a span of directions; FunctionSpace takes a row of "
        f"weights for each of {outputs:,} outputs. What helps: fewer samples (num_samples); "
        'fewer random weights (parameters="last_layer", or name patterns); vectors on the CPU '
        '(compute=Compute(vectors="cpu")); a smaller span (solver=BlockKrylov(memory=bytes)).'
    )


def _check_start(start: Tensor | None, options: FitOptions, blocks: int) -> None:
    shapes = ((), (blocks,)) if options.layerwise else ((),)
    if start is not None and start.shape not in shapes:
        raise ValueError(
            f"prior_precision has shape {tuple(start.shape)}, but the prior has "
            f"{f'{blocks} tensors' if options.layerwise else 'one precision'}: pass one number"
            f"{', or one per tensor' if options.layerwise else ''}."
        )
