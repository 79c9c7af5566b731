"""Fits of a problem with given random probes, made as a fit makes them."""

import torch

from torch_lla_em.inference import FitOptions, Progress, Watch
from torch_lla_em.inference.fit import by_solver, over_span
from torch_lla_em.inference.options import choose_curvature
from torch_lla_em.inference.over_span import OverSpan
from torch_lla_em.inference.schedule import SpanFit
from torch_lla_em.inference.span import Span
from torch_lla_em.runtime import TensorList

WATCH = Watch(lambda *_: False)


def begin(problem, noise):
    return Progress(TensorList.of(noise.eta), noise.prior.scale, problem.sigma, None)


def posterior_at(problem, noise, precision, tolerance=1e-9, *, run=over_span, **options):
    """Return the posterior at a given λ and σ."""
    options = {
        "curvature": "network",
        "em_steps": 0,
        "prior_precision": torch.tensor(precision),
        **options,
    }
    return run(
        problem, noise, FitOptions(tolerance=tolerance, **options), WATCH, begin(problem, noise)
    )


def solved_at(problem, noise, precision, tolerance=1e-9, **options):
    """Return the posterior at a given λ and σ by an iterative solver."""
    return posterior_at(problem, noise, precision, tolerance, run=by_solver, **options)


def complete_span(problem, noise, tolerance=1e-9, **options):
    """Return the problem over a span of all directions, and the schedule of a fit."""
    options = FitOptions(tolerance=tolerance, **{"curvature": "network", **options})
    span = Span(problem, noise.prior, noise.xi, 1e12)
    assert span.widen(torch.eye(problem.size).to(noise.xi))
    over = OverSpan(problem, noise, span, choose_curvature(problem, options), tolerance)
    return over, SpanFit(over, options.em_steps, tolerance, lambda: False)
