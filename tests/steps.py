"""E-steps and EM of a problem, made as a fit makes them."""

import torch

from torch_lla_em.inference.em import State, em
from torch_lla_em.inference.evidence import sigma_of
from torch_lla_em.inference.iterative_e_step import IterativeEStep
from torch_lla_em.inference.mackay import Hyperparameters, MStep
from torch_lla_em.inference.options import FitOptions
from torch_lla_em.inference.span_e_step import SpanEStep


def hyper_of(problem, precision):
    return Hyperparameters(torch.tensor(precision, dtype=torch.float64), sigma_of(problem))


def iterative_e_step(problem, noise, solver, tolerance=1e-9, *, kind=IterativeEStep):
    return kind(problem, noise, FitOptions(tolerance=tolerance, solver=solver))


def span_e_step(problem, noise, tolerance=1e-9, *, moves=False, **options):
    return SpanEStep(problem, noise, FitOptions(tolerance=tolerance, **options), moves)


def states_of_em(problem, prior, e_step, hyper, *, update="mackay", max_steps=20):
    return em(e_step, MStep(problem, prior, update), State(hyper), max_steps)


def posterior_at(problem, noise, hyper, tolerance=1e-9, *, moves=False, **options):
    """Return the posterior over a span at given hyper-parameters."""
    e_step = span_e_step(problem, noise, tolerance, moves=moves, em_steps=0, **options)
    *_, last = states_of_em(problem, noise.prior, e_step, hyper, max_steps=0)
    return e_step.posterior(last)
