"""E-steps and EM of a problem, constructed as in a fit."""

from torch_lla_em.inference.e_step import Deflation, IterativeEStep
from torch_lla_em.inference.em import State, em
from torch_lla_em.inference.krylov_e_step import KrylovEStep
from torch_lla_em.inference.mackay import MStep
from torch_lla_em.inference.mode_search import ModeSearch


def krylov_e_step(problem, noise, solver):
    return KrylovEStep(problem, noise, solver, ModeSearch(problem, noise.prior))


def iterative_e_step(problem, noise, solver, *, deflated_at=None, kind=IterativeEStep):
    known = None if deflated_at is None else Deflation.of(problem, noise, deflated_at)
    search = ModeSearch(problem, noise.prior)
    return kind(problem, noise, solver, search, {"deflation": known})


def states_of_em(problem, prior, e_step, hyper, *, update="mackay", max_steps=20):
    return em(e_step, MStep(problem, prior, update), State(hyper), max_steps)
