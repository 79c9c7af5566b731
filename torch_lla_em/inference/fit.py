"""A fit: draws the random probes, chooses what EM runs on, and returns the posterior."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torch_lla_em.inference import whole
from torch_lla_em.inference.em import Engine, e_step, em
from torch_lla_em.inference.head import Head
from torch_lla_em.inference.mackay import mackay_noise
from torch_lla_em.inference.over_head import OverHead, Settings, updated
from torch_lla_em.inference.over_span import OverSpan
from torch_lla_em.inference.prior import StochasticPrior
from torch_lla_em.inference.result import Estimate, FitResult, at_examples, average, record
from torch_lla_em.inference.samples import refuse_noise
from torch_lla_em.inference.schedule import SpanFit
from torch_lla_em.inference.span import Span
from torch_lla_em.inference.state import State, Stored, StoredHead
from torch_lla_em.inference.sto_samples import get_sto_samples, stochastic_prior
from torch_lla_em.problem import COPIES, Problem, TargetFacts, form_of_H, sites_of
from torch_lla_em.runtime import (
    PRECISION_BOUNDS,
    DoesNotFit,
    free_for_each,
    or_float64,
    release,
    report,
)
from torch_lla_em.solvers import BlockCG, DivergenceError, is_accurate

ROOM = 5
"""Directions per sample that must fit into memory; otherwise a fit takes fewer samples, or a
solver. On four tables the NLL was within .5 % of that of unlimited memory; with 2.5 it was up to 40
% higher, with 10 the same."""

COMPLETE = 8
"""Blocks of K directions up to which the fit of a last layer takes a span, which may then have all
directions."""


@dataclass(frozen=True)
class FitOptions:
    """Options of a fit."""

    num_samples: int = 32
    seed: int = 0
    g_prior: bool | None = None
    layerwise: bool = False
    solver: Any = None
    curvature: str | None = None
    tolerance: float = 0.03
    """Largest error of the final samples and mode, in posterior standard deviations."""

    span_memory: float | None = None
    """Largest size of the span in bytes; None: half of the free memory."""

    em_steps: int = 20
    prior_precision: Tensor | None = None
    """Largest number of steps of λ, 0 keeps λ fixed; and its start, None: chosen from the data."""


class Progress(NamedTuple):
    """What a checkpoint stores of a fit: tensors, numbers and tuples."""

    eta: Tensor
    scale: Tensor
    """η of the random probes, (K, P), and the prior standard deviation of every weight at λ = 1,
    (P,)."""

    targets: TargetFacts
    """What is known of continuous targets, with the σ at which η was drawn."""

    state: State | None = None
    span: Stored | None = None
    head: StoredHead | None = None
    """None if only the random probes have been drawn; and what the span adds, or a last layer
    fitted by its features."""

    basis: list[Tensor] | None = None
    memory: float | None = None
    """The directions of the span, in blocks, None: EM runs on the whole problem; and bytes that
    they may take."""


class Step(NamedTuple):
    """A step of a fit."""

    posterior: State
    """The posterior with which a fit ends here, if its time is over."""

    following: State
    """The state from which it goes on, or in which ``why`` says that it has ended."""

    record: dict[str, Any] | None
    """The entry of the history; None: it has none."""

    progress: Callable[[], Progress]
    """Returns what a checkpoint stores."""

    is_last: bool
    """Whether nothing is left to compute."""


class Surroundings(Protocol):
    """What a fit runs in: it shows and stores its steps, and knows when its time is over."""

    def show(self, stage: str) -> None:
        """Show what the fit does from now on."""

    def drawn(self, progress: Callable[[], Progress]) -> None:
        """Note that the random probes are drawn."""

    def run(self, steps: Iterable[Step], q: State | None) -> State:
        """Take steps until they end, or the time is over, and return the last state; without steps
        it is q."""

    def is_late(self) -> bool:
        """Return whether the time of the fit is over."""


def learn(
    problem: Problem, options: FitOptions, around: Surroundings, start: Progress | None = None
) -> FitResult:
    """Draw the random probes, learn λ (and σ), and return the posterior; ``start`` is the last
    state of an earlier run.

    ``why`` of the result is what ended the fit:

    ================================ ===============================================================
    accurate                         λ has converged, or had all its steps, and errors are tolerable
    all directions                   the span has all directions; the rest of the error is rounding
    all steps                        by a solver: λ had all its steps before it converged
    budget                           the time was over
    rounding leaves no new direction residuals are in the span up to rounding, unlike in float64
    no memory for more directions    a span of the allowed size was restricted too often
    rounding dominates ...           at the λ that was learnt it is rounding; it is at a larger one
    the solver has not converged     by a solver: the last solve had all its passes
    ================================ ===============================================================

    ``SpanFit.judged`` decides over a span, ``over_head.updated`` for a last layer, ``by_solver``
    for a solver, and ``around`` when the time is over.
    """
    seed, layerwise, given = options.seed, options.layerwise, options.prior_precision
    if start is None:
        around.show("drawing random numbers")
        noise = get_sto_samples(problem, options.num_samples, seed, options.g_prior, layerwise)
        if not problem.data.facts.num_labelled:
            raise ValueError(
                f"None of the {problem.data.facts.num_rows} training examples has a label that "
                "counts: all are -100, or all weights are 0. Check the targets of the loader, the "
                "adapter and `weights`."
            )
        start = begun = Progress(noise.eta, noise.prior.scale, noise.targets)
        around.drawn(lambda: begun)
    else:
        noise = stochastic_prior(problem, start.eta, start.scale, seed, layerwise)
    problem = problem.with_targets(start.targets)
    blocks = len(noise.prior.layout.names)
    if given is not None and given.dim() and not (layerwise and given.shape == (blocks,)):
        raise ValueError(
            f"prior_precision has shape {tuple(given.shape)}, but the prior has "
            f"{f'{blocks} tensors' if layerwise else 'one precision'}: pass one number"
            f"{', or one per tensor' if layerwise else ''}."
        )
    if problem.likelihood.is_quadratic:
        options = replace(options, curvature="network")  # H is the same everywhere
    around.show("learning the prior and the posterior")
    has_begun = start.basis is not None or start.head is not None
    result, begins = None, start.state is None or has_begun
    if begins and not layerwise and options.solver is None:
        try:
            head = _head_of(problem, noise, options, around, start)
            if head is not None:
                result = over_head(head, noise, options, around, start)
            if result is None:
                start = start if head is None else start._replace(state=None, head=None)
                result = over_span(problem, noise, options, around, start)
        except DoesNotFit as error:
            release()  # what the failed attempt held
            start = start._replace(state=None, span=None, basis=None)
            report(
                "log",
                f"Directions cannot be stored: {error}. The fit takes a solver and H at the "
                "network's outputs, whose predictions are mostly worse. Use fewer `parameters`, "
                "or a loader with a fixed order.",
            )
    if result is None:
        result = by_solver(problem, noise, options, around, start)
    sigma, constant = result.sigma_noise, problem.constant
    if sigma is None:
        result = result._replace(sigma_noise=problem.likelihood.observation_noise)
    elif options.em_steps and problem.network_noise is not None:
        result = result._replace(network_noise=problem.network_noise.to(sigma) / sigma)
    offset = None if constant is None else constant.to(result.w_lin.device, copy=True)
    return result._replace(constant=offset)


def over_span(
    problem: Problem,
    noise: StochasticPrior,
    options: FitOptions,
    around: Surroundings,
    start: Progress,
) -> FitResult:
    """Return the posterior over a span of directions: EM on the restricted problem, and
    extensions."""
    memory, last = _memory(problem, options, start), start.state
    span = Span(problem, noise.prior, noise.xi, memory, sites_of(problem, options.seed))
    moves = options.curvature != "network"
    count = _that_fits(problem, span, moves) if last is None else len(last.samples)
    noise = noise._replace(xi=noise.xi[:count], eta=noise.eta[:count])
    span = Span(problem, noise.prior, noise.xi, memory, span.sites)
    if last is None:
        _, gradient = problem.loss_and_gradient(problem.zeros(1)[0])
        scale = noise.prior.scale
        pulls = torch.stack([scale * gradient, noise.prior.whitened(problem.w_MAP)])
        is_new = span.widen(torch.cat([noise.xi, scale * noise.eta, pulls]))
    else:
        is_new = all(map(span.add, start.basis or ()))
    if not is_new:
        raise DoesNotFit("examples have several shapes, or change their order")
    over = OverSpan(problem, noise, span, moves, options.tolerance)
    if last is not None and isinstance(start.span, Stored):
        last = over.restored(last, start.span)
    schedule = SpanFit(over, options.em_steps, options.tolerance, around.is_late)
    given = options.prior_precision
    has_ended = last is not None and last.fate.why not in ("", "budget")
    states = () if has_ended else schedule.run(last, None if given is None else float(given))
    q = around.run(_steps_over(over, states, start), last)
    learnt = q.precision
    while options.em_steps and given is None and q.fate.why != "budget" and not max(q.errors) <= 10:
        if q.precision >= PRECISION_BOUNDS[1]:
            break
        # at the first of larger λ at which rounding does not dominate, with H as it is
        q = over.measured(e_step(over, over.moved(q, 10 * q.precision, None, None)))
        why = f"rounding dominates at the prior precision of {learnt:.1e}"
        q = q._replace(fate=q.fate._replace(why=why))
    columns = noise.prior.scale * span.scaled(torch.cat([q.mean[None], q.samples]))
    return _ended(over, q, columns, noise, options)


def _head_of(
    problem: Problem,
    noise: StochasticPrior,
    options: FitOptions,
    around: Surroundings,
    start: Progress,
) -> OverHead | None:
    """Return the fit of a last layer by its features; None: the fit takes a span."""
    live, K = int((noise.prior.scale > 0).sum()), len(noise.xi)
    # over a span of all directions, γ and expectations have no Monte Carlo error
    is_complete = live <= COMPLETE * K
    is_last = problem.linear_model.is_last_layer
    if options.curvature == "network" or is_complete or not is_last or start.basis is not None:
        return None
    head = Head.of(problem, sites_of(problem, options.seed))
    if head is None:
        return None
    likelihood, C, itemsize = problem.likelihood, head.classes, problem.dtype.itemsize
    memory = _memory(problem, options, start)
    sites = head.rows.share.total * head.rows.f.shape[1:-1].numel()
    draws = form_of_H(likelihood, C, sites, 0.0, memory)[1]
    many = likelihood.is_softmax and 4 * draws < C  # then products take less arithmetic
    of_H = 1 if likelihood.elementwise else 2 * draws if many else C
    outputs = problem.data.largest_share * sites * C
    left = memory - (3 * of_H + 2 * draws) * outputs * itemsize
    fits = int(left / (8 * (outputs + problem.size) * itemsize))
    if start.state is None and fits < K:
        return None
    settings = Settings(0.9 * options.tolerance, memory, draws, many)
    return OverHead(problem, noise, head, settings)


def over_head(
    over: OverHead,
    noise: StochasticPrior,
    options: FitOptions,
    around: Surroundings,
    start: Progress,
) -> FitResult | None:
    """Return the posterior of a last layer by products of its features; None: not within the
    tolerance, so a span is needed."""
    q, given = start.state, options.prior_precision
    if q is None or start.head is None:
        q = over.first(None if given is None else float(given))
    else:
        q = over.restored(q, start.head)
    try:
        q = around.run(_steps_of_head(over, q, options.em_steps, start), q)
    except DivergenceError as error:
        report("log", f"Products of features diverge: {error} The fit takes a span.")
        return None
    if q.fate.why != "budget" and not is_accurate(max(q.errors), options.tolerance):
        words = f"Products of features reach an error of {max(q.errors):.2g}: the fit takes a span."
        report("log", words)
        return None
    return _ended(over, q, torch.cat([q.mean[None], q.samples]), noise, options)


def _steps_of_head(over: OverHead, q: State, em_steps: int, start: Progress) -> Iterator[Step]:
    """Yield the steps of EM on a last layer, and the accurate posterior at its end."""

    def saved(q: State) -> Progress:
        state, stored = over.saved(q)
        return start._replace(state=state, head=stored, memory=over.settings.memory)

    sweep = over.problem.sweep
    q = q._replace(fate=q.fate._replace(why=q.fate.why.replace("budget", "")))
    states = em(over, q, partial(updated, em_steps=em_steps))
    for posterior, q in states:
        told = record(posterior, sweep.columns)
        yield Step(posterior, q, told, partial(saved, q), is_last=False)
    if q.fate.why != "accurate":
        q = over.with_evidence(e_step(over, over.curved(q, q.in_head.H)))
        yield Step(q, q, record(q, sweep.columns), partial(saved, q), is_last=True)


def _ended(
    over: OverSpan | OverHead,
    q: State,
    columns: Tensor,
    noise: StochasticPrior,
    options: FitOptions,
) -> FitResult:
    """Return the result of a state, with the mean and the samples as parameters, (1 + K, P)."""
    problem = over.problem
    _tell(over, q, options)
    error, tolerance = max(q.errors), options.tolerance
    if q.fate.why != "budget" and not is_accurate(error, tolerance):
        refuse_noise(error, q.precision, problem.dtype, 10.0)
        report(
            "warn",
            f"The posterior has a numerical error of {error:.2g} posterior standard deviations, "
            f"above the tolerance of {tolerance:.2g}: {q.fate.why}. Use fewer samples, or increase "
            f"Compute(tolerance=){or_float64(problem.dtype)}.",
        )
    result = _result(q._replace(mean=columns[0], samples=columns[1:].clone()), noise)
    if over.expected.number:
        result = result._replace(mixture=average(problem.likelihood, over, q).to(columns.device))
        if over.span.sites is None:  # examples are not sites
            examples, leverages = (part.to(columns.device) for part in at_examples(over, q))
            result = result._replace(examples=examples, leverages=leverages)
    return result


def _steps_over(over: OverSpan, states: Iterable[State], start: Progress) -> Iterator[Step]:
    """Yield the extensions of a span as steps, of which those with another λ have a record."""

    def saved(q: State) -> Progress:
        state, stored = over.saved(q)
        progress = start._replace(state=state, span=stored)
        return progress._replace(basis=over.span.blocks, memory=over.span.memory)

    number = 0 if start.state is None else start.state.fate.number
    for q in states:
        new, number = q.fate.number > number, q.fate.number
        tells = new or q.fate.why == "budget" or (q.fate.why and not number)
        told = record(q, over.problem.sweep.columns) if tells else None
        yield Step(q, q, told, partial(saved, q), bool(q.fate.why))


def by_solver(
    problem: Problem,
    noise: StochasticPrior,
    options: FitOptions,
    around: Surroundings,
    start: Progress,
) -> FitResult:
    """Return the posterior of the loop of the paper: EM on the whole problem."""
    solver, prior = options.solver or BlockCG(), noise.prior
    model, q, precision = whole.Whole(problem, noise, solver), start.state, options.prior_precision
    if q is None:
        if precision is None:
            first = whole.starting_precision(problem, noise, prior.layerwise)
            precision = noise.eta.new_tensor(first)
        precision = precision.to(device=noise.eta.device, dtype=torch.float64)
        if prior.layerwise and not precision.dim():
            precision = precision.expand(len(prior.layout.names)).clone()
        q = State(precision, problem.sigma, mean=problem.w_MAP * (prior.scale > 0))
    update = partial(whole.updated, em_steps=options.em_steps)
    states = em(model, q, update) if options.em_steps else ()
    q = around.run(_steps_by_solver(problem, states, start), q)
    _tell(model, q, options)
    if q.fate.why == "budget":
        return _result(q, noise)
    last = whole.Whole(problem, noise, solver, (options.tolerance, options.tolerance))
    posterior, why = e_step(last, q), "all steps"
    if q.fate.converged or not options.em_steps:
        reached = is_accurate(max(posterior.errors), options.tolerance)
        why = "accurate" if reached else "the solver has not converged"
    return _result(posterior._replace(fate=posterior.fate._replace(why=why)), noise)


def _steps_by_solver(
    problem: Problem, states: Iterable[tuple[State, State]], start: Progress
) -> Iterator[Step]:
    """Yield the steps of EM, after which the final samples are still to be computed."""
    for posterior, q in states:
        told = record(posterior, problem.sweep.columns)
        yield Step(posterior, q, told, partial(start._replace, state=q), is_last=False)


def _result(q: State, noise: StochasticPrior) -> FitResult:
    """Return the posterior of a state."""
    return FitResult(
        q.precision,
        q.sigma,
        w_lin=q.mean,
        w_samples=q.samples,
        scale=noise.prior.scale,
        effective_dim=Estimate.of(q.gamma),
        certificate=q.certificate,
        log_evidence=Estimate.of(q.bounds),
        mode_error=q.errors[1],
        why=q.fate.why,
    )


def _memory(problem: Problem, options: FitOptions, start: Progress) -> float:
    """Return the bytes that directions, or the features of a last layer, may take."""
    free = free_for_each(problem.data.group, problem.device) / 2
    return start.memory or min(free, options.span_memory or free)


def _that_fits(problem: Problem, span: Span, moves: bool) -> int:
    """Return for how many samples there is memory, next to H, if it moves."""
    facts, K, left = problem.data.facts, len(span.probes), span.memory
    classes = facts.num_outputs // max(1, facts.num_targets)
    every = facts.num_outputs if span.sites is None else span.sites.outputs
    if moves:
        nbytes, sites = span.entries * span.probes.element_size(), every / classes
        of_H = form_of_H(problem.likelihood, classes, sites, nbytes, left)[2]
        left -= COPIES * nbytes * of_H
    fits = int(left / span.bytes_of(ROOM)) - 1
    if fits < min(K, 4):
        raise DoesNotFit("there is no memory for them")
    if fits < K:
        report(
            "log",
            f"There is memory for {fits} posterior samples instead of {K}. The fit continues with "
            f"{fits}. For more samples free memory, or choose fewer `parameters`.",
        )
    return min(fits, K)


def _tell(model: Engine[Any], q: State, options: FitOptions) -> None:
    """Warn of a fit out of time, of a λ that still moves or is at a bound, and of a σ lost to
    rounding."""
    if q.fate.why == "budget":
        rests = "" if q.fate.converged else ", and the prior precision has not converged"
        report(
            "log",
            f"The budget is spent. The numerical error is {max(q.errors):.2g} posterior standard "
            f"deviations (tolerance {options.tolerance:.2g}){rests}. With "
            "Compute(checkpoint=folder), the same fit continues from here.",
        )
    if q.fate.why == "budget" or not options.em_steps:
        return
    if q.fate.number >= options.em_steps and not q.fate.converged:
        report(
            "log",
            f"The prior precision has not converged after {options.em_steps} EM steps. Increase "
            "em_steps, or pass a prior_precision closer to the result.",
        )
    low, high = PRECISION_BOUNDS
    if not ((low < q.precision) & (q.precision < high)).all():
        report(
            "warn",
            f"The prior precision reached a bound of [{low:g}, {high:g}]: the evidence prefers a "
            "model without these parameters, or without a prior. Check that the network is "
            "trained, and on these targets.",
        )
    if q.sigma is None:
        return
    if mackay_noise(model.problem, q.sigma, q.gamma, model.outputs(q))[1].any():
        dtype, remedy = model.problem.dtype, " If the noise is that small, convert to float64."
        report(
            "warn",
            "Residuals of the linear model are so small that their noise may be lost to rounding: "
            f"sigma_noise is held above {torch.finfo(dtype).eps ** 0.5:.0e} of the size of the "
            f"targets. Check that they vary.{'' if dtype == torch.float64 else remedy}",
        )
