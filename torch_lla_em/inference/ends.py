"""The end of a fit: its reason, its messages, and its result.

``why`` of a ``Fate``, of the result and of the last entry of ``history`` states what ended the fit:

================================ ===================================================================
accurate                         λ has converged, or used all steps, and errors are tolerable
all directions                   the span has all directions; the rest of the error is rounding
all steps                        by a solver: λ used all its steps before it converged
budget                           the time was over
rounding leaves no new direction residuals are in the span up to rounding; float64 has less
no memory for more directions    a span of the allowed size was restricted too often
rounding dominates ...           at the learnt λ; the posterior is at a larger λ instead
the solver has not converged     by a solver: the last solve used all its passes
================================ ===================================================================

``SpanFit`` decides over a span, ``over_head`` for a last layer, and ``by_solver`` for a solver; the
session decides when the time is over. All of them use the functions of this file. For a last layer
or a solver, EM itself ends first, with "converged" or "all steps"; the accurate solution that
follows replaces this reason.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_lla_em.inference.em import Engine
from torch_lla_em.inference.mackay import mackay_noise
from torch_lla_em.inference.over_head import OverHead
from torch_lla_em.inference.over_span import OverSpan
from torch_lla_em.inference.prior import StochasticPrior
from torch_lla_em.inference.result import Estimate, FitResult, at_examples, average
from torch_lla_em.inference.samples import refuse_noise
from torch_lla_em.inference.state import FitOptions, State
from torch_lla_em.runtime import CALL, PRECISION_BOUNDS, or_float64, report
from torch_lla_em.solvers import is_accurate

DETERMINED = 0.3
"""γ per target above which training residuals do not determine the noise, chosen on seven
regressions with 200 and 800 examples: above it 90 % intervals covered 72 to 88 %, below it at least
80 %."""


def by_directions(
    over: OverSpan | OverHead,
    q: State,
    columns: Tensor,
    noise: StochasticPrior,
    options: FitOptions,
) -> FitResult:
    """Return the result of a fit over a span, or of a last layer by its features. ``columns`` are
    the mean and the samples as parameters, (1 + K, P), which the state of a span does not have."""
    tell(over, q, noise, options)
    problem, error, tolerance = over.problem, max(q.errors), options.tolerance
    if q.fate.why != "budget" and not is_accurate(error, tolerance):
        refuse_noise(error, q.precision, problem.dtype, 10.0)
        report(
            "warn",
            f"The posterior has a numerical error of {error:.2g} posterior standard deviations, "
            f"above the tolerance of {tolerance:.2g}: {q.fate.why}. Use fewer samples, or increase "
            f"Compute(tolerance=){or_float64(problem.dtype)}.",
        )
    result = result_of(q._replace(mean=columns[0], samples=columns[1:].clone()), noise)
    if over.expected.number:
        result = result._replace(mixture=average(problem.likelihood, over, q).to(columns.device))
        if over.span.sites is None:  # examples are not sites
            examples, leverages = (part.to(columns.device) for part in at_examples(over, q))
            result = result._replace(examples=examples, leverages=leverages)
    return result


def result_of(q: State, noise: StochasticPrior) -> FitResult:
    """Return the result of a state."""
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


def tell(model: Engine[Any], q: State, noise: StochasticPrior, options: FitOptions) -> None:
    """Warn if the time of the fit was over, if λ has not converged or is at a bound, if γ is close
    to 0 or to the number of targets, or if σ is lost to rounding."""
    problem, (low, high), effective_dim = model.problem, PRECISION_BOUNDS, Estimate.of(q.gamma)
    em_steps = options.em_steps
    gamma = effective_dim.value.sum().item()
    error = effective_dim.standard_error.nan_to_num(0.0).norm().item()
    collapsed = gamma < max(4 / len(q.gamma), 2 * error)
    # if all λ are at their bound, that warning is enough
    if collapsed and (q.precision < high).any():
        scaling = 'prior="isotropic", ' if (noise.prior.scale != 1).any() else ""
        report(
            "log",
            f"The data determine hardly any parameters (γ = {gamma:.2g} ± {error:.1g}): the "
            f"posterior is close to the prior. Try {scaling}a smaller prior_precision, or "
            "parameters of later layers.",
        )
    likelihood, facts = problem.likelihood, problem.data.facts
    if likelihood.elementwise and likelihood.observation_noise is not None and not collapsed:
        share = gamma * facts.num_rows / max(1, facts.num_labelled * facts.num_targets)
        if share > DETERMINED:
            report(
                "log",
                f"The network has overfitted (γ is {share:.0%} of the number of targets), so σ is "
                f"probably too small. {CALL} to learn it from other examples, or use more data.",
            )
    if q.fate.why == "budget":
        rests = "" if q.fate.converged else ", and the prior precision has not converged"
        report(
            "log",
            f"The budget is spent. The numerical error is {max(q.errors):.2g} posterior standard "
            f"deviations (tolerance {options.tolerance:.2g}){rests}. With "
            "Compute(checkpoint=folder), the same fit continues from here.",
        )
    if q.fate.why == "budget" or not em_steps:
        return
    if q.fate.number >= em_steps and not q.fate.converged:
        report(
            "log",
            f"The prior precision has not converged after {em_steps} EM steps. Increase "
            "em_steps, or pass a prior_precision closer to the result.",
        )
    if not ((low < q.precision) & (q.precision < high)).all():
        report(
            "warn",
            f"The prior precision reached a bound of [{low:g}, {high:g}]: the evidence prefers a "
            "model without these parameters, or without a prior. Check that the network is "
            "trained, and on these targets.",
        )
    if q.sigma is None:
        return
    if mackay_noise(problem, q.sigma, q.gamma, model.outputs(q))[1].any():
        dtype, remedy = problem.dtype, " If the noise is that small, convert to float64."
        report(
            "warn",
            "Residuals of the linear model are so small that their noise may be lost to rounding: "
            f"sigma_noise is held above {torch.finfo(dtype).eps ** 0.5:.0e} of the size of the "
            f"targets. Check that they vary.{'' if dtype == torch.float64 else remedy}",
        )
