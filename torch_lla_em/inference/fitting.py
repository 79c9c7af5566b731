"""From options and data to a posterior: which solver, the EM iteration, the last E-step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.inference.deflated_e_step import DeflatedEStep
from torch_lla_em.inference.empirical_bayes import EmpiricalBayes, EMState, starting_precision
from torch_lla_em.inference.evidence import log_evidences, sigma_of
from torch_lla_em.inference.expectation import EStep, Hyperparameters, IterativeEStep
from torch_lla_em.inference.krylov_e_step import KrylovEStep
from torch_lla_em.inference.mackay import Estimate
from torch_lla_em.inference.posterior_samples import Solver
from torch_lla_em.inference.prior import Prior
from torch_lla_em.inference.stochastic_prior import StochasticPrior, get_sto_samples
from torch_lla_em.problem import VECTORS, Problem, columns_held, size_of
from torch_lla_em.runtime import DoesNotFit, attempt
from torch_lla_em.solvers import BlockCG, BlockKrylov, FunctionSpace, Spectrum

logger = logging.getLogger("torch_lla_em")

_FUNCTION_SPACE_OUTPUTS = 1024
_FUNCTION_SPACE_BYTES = 1e9

# H at the linear mode moves λ, and λ the mode, but little after the first time
_LINEAR_ROUNDS = 5
_LINEAR_CHANGE = 0.05


@dataclass(frozen=True)
class FitOptions:
    """What a fit is to do."""

    num_samples: int
    seed: int
    g_prior: bool
    layerwise: bool
    solver: Solver | None
    tolerance: float
    curvature: str
    update: str
    em_steps: int
    prior_precision: Tensor | None
    earlier_rows: int = 0
    """Rows at the start of the data whose noise features are known."""

    keep_noise: bool = False
    warm: tuple[Tensor, Tensor] | None = None
    """Mode and samples to start from."""


class Posterior(NamedTuple):
    """What a fit has found."""

    hyper: Hyperparameters
    w_lin: Tensor
    w_samples: Tensor
    scale: Tensor
    effective_dim: Estimate
    certificate: Tensor
    log_evidence: Estimate
    loss: float
    mode_error: float
    sample_error: float
    spectrum: Spectrum | None
    """Of scalar priors solved by block Krylov, at the final noise."""

    modes: Tensor
    """log λ, objective and slope of the linear mode where it is known, shape (3, M)."""

    noise: StochasticPrior | None = None
    """As drawn, at the network's outputs and the first σ, if it is to be kept."""

    mixture: Tensor | None = None
    """What predictions are made of, as fitted: rows of weight, share of J w_lin, share of f, and
    scale of the samples' variance, (parts, 4); None: the samples around f."""


def fit_posterior(
    problem: Problem, options: FitOptions, report: Callable[[EMState], None]
) -> Posterior:
    """Run EM to its fixed point, then the last E-step; ``report`` sees every state."""
    posterior, shortage = attempt(lambda: _whole(problem, _fit(problem, options, report)))
    if shortage is not None:
        raise DoesNotFit(_no_room(problem, options.num_samples, shortage))
    return posterior


def _whole(problem: Problem, posterior: Posterior) -> Posterior:
    """Return a posterior whose vectors are whole; where they were in slices, without its noise."""
    if problem.vectors.group is None:
        return posterior
    whole = problem.vectors.whole
    return posterior._replace(
        noise=None,
        w_lin=whole(posterior.w_lin[None])[0],
        w_samples=whole(posterior.w_samples),
        scale=whole(posterior.scale[None])[0],
    )


def _no_room(problem: Problem, num_samples: int, shortage: str) -> str:
    columns = columns_held(problem, num_samples)
    block = columns * problem.linear_model.layout.size * problem.dtype.itemsize
    outputs = problem.data.num_outputs
    return (
        f"Memory on {problem.device} ended outside of the passes over the data ({shortage}). "
        f"{num_samples} samples of {problem.size:,} weights take {size_of(block)}, and a fit "
        f"up to {VECTORS} times that, beside a Krylov basis; FunctionSpace takes a row of "
        f"weights for each of {outputs:,} outputs. What helps: fewer samples (num_samples); "
        'fewer random weights (parameters="last_layer", or name patterns); vectors on the CPU '
        '(compute=Compute(vectors="cpu")); a smaller basis (solver=BlockKrylov(memory=bytes)), '
        "or one in bfloat16 (BlockKrylov(storage=torch.bfloat16))."
    )


def _fit(problem: Problem, options: FitOptions, report: Callable[[EMState], None]) -> Posterior:
    noise = get_sto_samples(
        problem, options.num_samples, options.seed, options.g_prior, options.layerwise
    )
    drawn = noise if options.keep_noise else None
    hyper = Hyperparameters(_start(problem, noise, options), sigma_of(problem))
    e_step = make_e_step(problem, noise, options)
    steps = 0
    for state in _learn(problem, noise.prior, e_step, hyper, options):
        hyper, steps = state.proposed, state.step
        report(state)
    if options.curvature == "linear" and not problem.likelihood.is_quadratic:
        # a loss with several modes would wander from one to the next
        for _ in range(_LINEAR_ROUNDS if problem.likelihood.convex else 1):
            before = hyper.precision.log()
            problem = problem.with_curvature_at(e_step.mode(hyper, options.tolerance).w)
            eta = problem.noise_features(options.num_samples, options.seed).eta
            noise = noise._replace(eta=eta)
            e_step, done = make_e_step(problem, noise, options), steps
            for state in _learn(problem, noise.prior, e_step, hyper, options):
                hyper, steps = state.proposed, done + state.step
                report(state._replace(step=steps))
            if (hyper.precision.log() - before).abs().max() < _LINEAR_CHANGE:
                break
    return _finish(e_step, noise, hyper, options.tolerance)._replace(noise=drawn)


def make_e_step(problem: Problem, noise: StochasticPrior, options: FitOptions) -> EStep:
    """Return the E-step of the solver asked for, or of one chosen by size."""
    solver = options.solver or choose_solver(problem, options.layerwise)
    if isinstance(solver, BlockKrylov) and _shifts(problem, options.layerwise):
        e_step = KrylovEStep(problem, noise, solver)
    elif isinstance(solver, BlockCG) and _has_one_noise(problem) and solver.deflate:
        e_step = DeflatedEStep(problem, noise, solver, options.seed)
    else:
        e_step = IterativeEStep(problem, noise, solver, options.seed)
    if options.warm is not None:
        e_step.warm_start(*(problem.vectors.own(w.to(problem.device)) for w in options.warm))
    return e_step


def choose_solver(problem: Problem, layerwise: bool) -> Solver:
    """Return the solver that suits the sizes, and log it."""
    outputs = problem.data.num_outputs
    bytes_of_rows = outputs * problem.linear_model.layout.size * problem.dtype.itemsize
    if _shifts(problem, layerwise):
        solver, why = BlockKrylov(), "one factorisation serves every λ"
    elif outputs <= _FUNCTION_SPACE_OUTPUTS and bytes_of_rows <= _FUNCTION_SPACE_BYTES:
        solver, why = FunctionSpace(), f"there are only {outputs} outputs in all"
    else:
        kind = "prior precision" if layerwise else "noise"
        solver, why = (
            BlockCG(),
            f"one {kind} per {'tensor' if layerwise else 'output'} allows no shift",
        )
    logger.info("Solver %s: %s.", type(solver).__name__, why)
    return solver


def _shifts(problem: Problem, layerwise: bool) -> bool:
    """Whether a new λ and σ only shift and scale G."""
    return not layerwise and _has_one_noise(problem)


def _has_one_noise(problem: Problem) -> bool:
    """Whether what EM learns of the noise only scales G."""
    sigma = sigma_of(problem)
    return sigma is None or not sigma.dim()


def _start(problem: Problem, noise: StochasticPrior, options: FitOptions) -> Tensor:
    blocks = len(noise.prior.layout.names)
    start = options.prior_precision
    if start is None:
        number = starting_precision(problem, noise, options.layerwise)
        start = torch.tensor(number, dtype=torch.float64)
    start = start.to(device=noise.eta.device, dtype=torch.float64)
    if options.layerwise and not start.dim():
        return start.expand(blocks).clone()
    if start.shape != ((blocks,) if options.layerwise else ()):
        raise ValueError(
            f"prior_precision has shape {tuple(start.shape)}, but the prior has "
            f"{f'{blocks} tensors' if options.layerwise else 'one precision'}: pass one number"
            f"{', or one per tensor' if options.layerwise else ''}."
        )
    return start


def _learn(
    problem: Problem,
    prior: Prior,
    e_step: EStep,
    hyper: Hyperparameters,
    options: FitOptions,
) -> Iterator[EMState]:
    """Yield the states of EM."""
    em = EmpiricalBayes(problem, prior, e_step, options.update, options.em_steps)
    return em.steps(hyper)


def _finish(
    e_step: EStep, noise: StochasticPrior, hyper: Hyperparameters, tolerance: float
) -> Posterior:
    mode, samples, log_dets = e_step.finish(hyper, tolerance)
    norm = noise.prior.squared_norm(mode.w)
    evidences = log_evidences(mode.loss, hyper.precision, norm, log_dets)
    return Posterior(
        hyper,
        mode.w,
        samples.w,
        noise.prior.scale,
        Estimate.of(samples.effective_dims),
        samples.certificate,
        Estimate.of(evidences),
        mode.loss,
        mode.error,
        samples.error,
        e_step.spectrum(hyper),
        torch.stack(e_step.modes(hyper)),
    )
