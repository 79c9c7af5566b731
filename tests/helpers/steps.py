"""Fits of a problem with given random probes, made as a fit makes them."""

import torch

from torch_lla_em.inference import FitOptions, Progress
from torch_lla_em.inference.fit import by_solver, over_span
from torch_lla_em.inference.over_span import OverSpan
from torch_lla_em.inference.schedule import SpanFit
from torch_lla_em.inference.span import Span


class Alone:
    """Nothing happens around a fit."""

    def run(self, steps, saved, number):
        for step in steps:
            q = step[1]
        return q

    def is_late(self):
        return False


def begin(problem, noise):
    return Progress(noise.eta, noise.prior.scale, noise.targets, memory=1e12)


def posterior_at(problem, noise, precision, tolerance=1e-9, *, run=over_span, **options):
    """Return the posterior at a given λ and σ."""
    own = {"curvature": "network", "em_steps": 0, "prior_precision": torch.tensor(precision)}
    options = FitOptions(tolerance=tolerance, **{**own, **options})
    return run(problem, noise, options, Alone(), begin(problem, noise))


def solved_at(problem, noise, precision, tolerance=1e-9, **options):
    """Return the posterior at a given λ and σ by an iterative solver."""
    return posterior_at(problem, noise, precision, tolerance, run=by_solver, **options)


def complete_span(problem, noise, tolerance=1e-9, **options):
    """Return the problem over a span of all directions, and the schedule of a fit."""
    options = FitOptions(tolerance=tolerance, **{"curvature": "network", **options})
    span = Span(problem, noise.prior, noise.xi, 1e12)
    assert span.widen(torch.eye(problem.size).to(noise.xi))
    moves = options.curvature != "network" and not problem.likelihood.is_quadratic
    over = OverSpan(problem, noise, span, moves, tolerance)
    return over, SpanFit(over, options.em_steps, tolerance, lambda: False)
