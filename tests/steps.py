"""E-steps and EM of a problem, made as a fit makes them."""

import torch

from torch_lla_em.inference.controller import Controller
from torch_lla_em.inference.em import em
from torch_lla_em.inference.iterative_e_step import IterativeEStep
from torch_lla_em.inference.options import FitOptions
from torch_lla_em.inference.records import State
from torch_lla_em.inference.span_e_step import SpanEStep


def start_of(problem, precision):
    return State(torch.tensor(precision, dtype=torch.float64), problem.sigma)


def iterative_e_step(problem, noise, solver, tolerance=1e-9, *, kind=IterativeEStep):
    return kind(problem, noise, FitOptions(tolerance=tolerance, solver=solver))


def span_e_step(problem, noise, tolerance=1e-9, *, moves=False, **options):
    return SpanEStep(problem, noise, FitOptions(tolerance=tolerance, **options), moves)


def states_of_em(e_step, start, **options):
    """Return the states of EM; ``options`` are those of a fit, such as em_steps."""
    moves = isinstance(e_step, SpanEStep) and e_step.over.moves
    controller = Controller(e_step.problem, e_step.noise.prior, FitOptions(**options), moves)
    return em(e_step, controller, start)


def posterior_at(problem, noise, start, tolerance=1e-9, *, moves=False, **options):
    """Return the posterior over a span at given λ and σ."""
    e_step = span_e_step(problem, noise, tolerance, moves=moves, em_steps=0, **options)
    *_, last = states_of_em(e_step, start, em_steps=0)
    return e_step.posterior(last)
