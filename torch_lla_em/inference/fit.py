"""A fit: draws the random probes, chooses what EM runs on, and returns the posterior."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torch_lla_em.inference import whole
from torch_lla_em.inference.em import Step, e_step, em
from torch_lla_em.inference.ends import by_directions, result_of, tell
from torch_lla_em.inference.head import Head
from torch_lla_em.inference.over_head import OverHead, Settings, updated
from torch_lla_em.inference.over_span import OverSpan
from torch_lla_em.inference.prior import StochasticPrior
from torch_lla_em.inference.result import FitResult
from torch_lla_em.inference.schedule import SpanFit
from torch_lla_em.inference.span import Span
from torch_lla_em.inference.state import FitOptions, State, Stored, StoredHead
from torch_lla_em.inference.sto_samples import get_sto_samples, stochastic_prior
from torch_lla_em.problem import COPIES, ENTRIES, Problem, TargetFacts, form_of_H, sites_of
from torch_lla_em.runtime import DoesNotFit, free_for_each, release, report
from torch_lla_em.solvers import BlockCG, DivergenceError, is_accurate

ROOM = 5
"""Number of directions per sample that must fit into memory; otherwise a fit uses fewer samples, or
a solver. On four tables the NLL was within .5 % of that with unlimited memory; with 2.5 it was up
to 40 % higher, and with 10 it was the same."""

COMPLETE = 8
"""A last layer with at most this many parameters per sample is fitted over a span, which may then
contain all directions."""


class Progress(NamedTuple):
    """The part of a fit that a checkpoint stores: tensors, numbers and tuples."""

    eta: Tensor
    scale: Tensor
    """η of the random probes, (K, P), and the prior standard deviation of every weight at λ = 1,
    (P,)."""

    targets: TargetFacts
    """Facts about continuous targets, with the σ at which η was drawn."""

    state: State | None = None
    stored: Stored | StoredHead | None = None
    """The state, None if only the random probes have been drawn; and the parts that a span, or a
    last layer fitted by its features, adds."""

    basis: list[Tensor] | None = None
    memory: float = 0.0
    """The directions of the span in blocks (None: there is no span), and the memory in bytes for
    them or for the features of a last layer (0: not decided yet)."""


class Surroundings(Protocol):
    """The surroundings of a fit: they show and store its steps, and decide when its time is
    over."""

    def drawn(self, progress: Progress) -> None:
        """Note that the random probes are drawn."""

    def run(self, steps: Iterable[Step], saved: Callable[[State], Progress], number: int) -> State:
        """Run steps until they end or the time is over, and return the last state. ``saved``
        converts a state for a checkpoint; ``number`` is the number of steps of an earlier run."""

    def is_late(self) -> bool:
        """Return whether the time of the fit is over."""


def learn(
    problem: Problem, options: FitOptions, around: Surroundings, start: Progress | None = None
) -> FitResult:
    """Draw the random probes, learn λ (and σ), and return the posterior; ``start`` is the last
    state of an earlier run.

    EM uses the first of these engines for which there is memory: the features of a last layer, a
    span of directions, or a solver on the whole problem. ``ends.py`` lists the reasons why it ends.
    """
    seed, layerwise, given = options.seed, options.layerwise, options.prior_precision
    if start is None:
        noise = get_sto_samples(problem, options.num_samples, seed, options.g_prior, layerwise)
        if not problem.data.facts.num_labelled:
            raise ValueError(
                f"None of the {problem.data.facts.num_rows} training examples has a label that "
                "counts: all are -100, or all weights are 0. Check the targets of the loader, the "
                "adapter and `weights`."
            )
        start = Progress(noise.eta, noise.prior.scale, noise.targets)
        around.drawn(start)
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
    result, begins = None, start.state is None or start.stored is not None
    if begins and not layerwise and options.solver is None:
        free = free_for_each(problem.data.group, problem.device) / 2
        start = start._replace(memory=start.memory or options.span_memory or free)
        try:
            result = over_head(problem, noise, options, around, start)
            if result is None and isinstance(start.stored, StoredHead):
                start = start._replace(state=None, stored=None)
            result = result or over_span(problem, noise, options, around, start)
        except DoesNotFit as error:
            release()  # frees what the failed attempt held
            start = start._replace(state=None, stored=None, basis=None)
            report(
                "log",
                f"Directions cannot be stored: {error}. The fit uses a solver and H at the "
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
    last = start.state
    span = Span(problem, noise.prior, noise.xi, start.memory, sites_of(problem, options.seed))
    moves = options.curvature != "network"
    count = _that_fits(problem, span, moves) if last is None else len(last.samples)
    noise = noise._replace(xi=noise.xi[:count], eta=noise.eta[:count])
    span = Span(problem, noise.prior, noise.xi, start.memory, span.sites)
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
    if last is not None and isinstance(start.stored, Stored):
        last = over.restored(last, start.stored)

    def saved(q: State) -> Progress:
        state, stored = over.saved(q)
        return start._replace(state=state, stored=stored, basis=span.blocks)

    schedule = SpanFit(over, options.em_steps, options.tolerance, around.is_late)
    given = options.prior_precision
    if last is None or last.fate.why in ("", "budget"):
        number = 0 if last is None else last.fate.number
        states = schedule.run(last or over.first(None if given is None else float(given)))
        q = around.run(((q, q) for q in states), saved, number)
    else:
        q = last
    if options.em_steps and given is None:
        q = schedule.raised(q)
    columns = noise.prior.scale * span.scaled(torch.cat([q.mean[None], q.samples]))
    return by_directions(over, q, columns, noise, options)


def over_head(
    problem: Problem,
    noise: StochasticPrior,
    options: FitOptions,
    around: Surroundings,
    start: Progress,
) -> FitResult | None:
    """Return the posterior of a last layer, fitted by its features; None if it needs a span."""
    over = _head_of(problem, noise, options, start)
    if over is None:
        return None
    q, given = start.state, options.prior_precision
    if q is None or not isinstance(start.stored, StoredHead):
        q = over.first(None if given is None else float(given))
    else:
        q = over.restored(q, start.stored)
    q = q._replace(fate=q.fate._replace(why=q.fate.why.replace("budget", "")))

    def saved(q: State) -> Progress:
        state, stored = over.saved(q)
        return start._replace(state=state, stored=stored)

    def steps(begun: State) -> Iterator[Step]:
        """Yield the steps of EM, and the accurate posterior at its end."""
        q = begun
        for posterior, q in em(over, begun, partial(updated, em_steps=options.em_steps)):
            yield posterior, q
        q = e_step(over, over.curved(q, q.in_head.H))
        q = q._replace(fate=q.fate._replace(number=q.fate.number + 1, why="accurate"))
        yield q, q

    try:
        if q.fate.why != "accurate":
            q = around.run(steps(q), saved, q.fate.number)
    except DivergenceError as error:
        report("log", f"The fit by features diverged: {error} A span is used instead.")
        return None
    if q.fate.why != "budget" and not is_accurate(max(q.errors), options.tolerance):
        words = f"The fit by features has an error of {max(q.errors):.2g}: a span is used instead."
        report("log", words)
        return None
    columns = torch.cat([q.mean[None], q.samples])
    return by_directions(over, q, columns, noise, options)


def _head_of(
    problem: Problem, noise: StochasticPrior, options: FitOptions, start: Progress
) -> OverHead | None:
    """Return the engine for the features of a last layer, or None if the fit needs a span."""
    live, K = int((noise.prior.scale > 0).sum()), len(noise.xi)
    if not takes_features(problem, live, K) or start.basis is not None:
        return None
    head = Head.of(problem, sites_of(problem, options.seed))
    if head is None:
        return None
    sites = head.rows.share.total * head.rows.f.shape[1:-1].numel()
    settings, nbytes = settings_of(problem, options, sites, head.classes, start.memory)
    if start.state is None and not has_memory(nbytes, start.memory):
        return None
    return OverHead(problem, noise, head, settings)


def takes_features(problem: Problem, live: int, num_samples: int) -> bool:
    """Whether the parameters are a last layer that is fitted by its features if there is memory.
    ``live`` is the number of parameters that change an output."""
    # over a span of all directions, γ and expectations have no Monte Carlo error
    is_complete = live <= COMPLETE * num_samples
    is_last = problem.linear_model.is_last_layer
    return is_last and not is_complete and not problem.likelihood.is_quadratic


def settings_of(
    problem: Problem, options: FitOptions, sites: float, classes: int, memory: float
) -> tuple[Settings, float]:
    """Return the settings of the fit of a last layer within this memory, for the number of sites of
    all ranks, and the bytes that they need."""
    likelihood = problem.likelihood
    draws = form_of_H(likelihood, classes, sites, 0.0, memory)[1]
    draws = 0 if options.curvature == "network" else draws
    many = likelihood.is_softmax and 0 < 4 * draws < classes  # then products take less arithmetic
    of_H = 1 if likelihood.elementwise or not draws else 2 * draws if many else classes
    outputs, K = problem.data.largest_share * sites * classes, options.num_samples
    # copies of H, of draws and of outputs, ε, and vectors; and the tensors of one part
    numbers = (5 * of_H + 4 * draws + K + 10) * outputs + 8 * K * problem.size
    numbers += 5 * max(ENTRIES, K * problem.size)
    nbytes = numbers * problem.dtype.itemsize
    return Settings(0.9 * options.tolerance, memory, draws, many), nbytes


def has_memory(nbytes: float, memory: float) -> bool:
    """Whether the fit of a last layer by its features, which needs this many bytes, fits into
    memory. If it does not, log a remedy."""
    if nbytes > memory:
        report(
            "log",
            f"The fit of this last layer by its features needs {nbytes / 1e9:.2g} GB, but may use "
            "only half of the free memory, or Compute(span_memory=bytes): a span of directions or "
            "a solver is used instead. Use fewer samples or fewer examples.",
        )
    return nbytes <= memory


def by_solver(
    problem: Problem,
    noise: StochasticPrior,
    options: FitOptions,
    around: Surroundings,
    start: Progress,
) -> FitResult:
    """Return the posterior by the loop of the paper, which is EM on the whole problem."""
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
    if options.em_steps and not q.fate.why:  # EM may have ended before the checkpoint
        steps = em(model, q, partial(whole.updated, em_steps=options.em_steps))
        q = around.run(steps, lambda q: start._replace(state=q), q.fate.number)
    if q.fate.why != "budget":
        last = whole.Whole(problem, noise, solver, (options.tolerance, options.tolerance))
        q, why = e_step(last, q), "all steps"
        if q.fate.converged or not options.em_steps:
            reached = is_accurate(max(q.errors), options.tolerance)
            why = "accurate" if reached else "the solver has not converged"
        q = q._replace(fate=q.fate._replace(why=why))
    tell(model, q, noise, options)
    return result_of(q, noise)


def _that_fits(problem: Problem, span: Span, moves: bool) -> int:
    """Return the number of samples that fit into memory, besides H if H moves."""
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
            f"{fits}. For more samples, free memory or choose fewer `parameters`.",
        )
    return min(fits, K)
