"""From options and data to a posterior: which solver, the EM iteration, the last E-step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from math import inf

import torch
from torch import Tensor

from torch_lla_em.inference.e_step import Deflation, EStep, Hyperparameters, IterativeEStep
from torch_lla_em.inference.em import Info, MStep, em
from torch_lla_em.inference.evidence import log_evidences, sigma_of
from torch_lla_em.inference.krylov_e_step import KrylovEStep
from torch_lla_em.inference.mackay import Estimate
from torch_lla_em.inference.mode_search import ModeSearch
from torch_lla_em.inference.posterior import Posterior
from torch_lla_em.inference.posterior_samples import Solver
from torch_lla_em.inference.stochastic_prior import StochasticPrior, get_sto_samples
from torch_lla_em.inference.variational import (
    FEWEST_SAMPLES,
    MOST_OUTPUTS,
    Wanted,
    variational,
    with_fewer,
)
from torch_lla_em.problem import (
    VECTORS,
    Problem,
    WhitenedGGN,
    WhitenedLoss,
    columns_held,
    size_of,
)
from torch_lla_em.runtime import DoesNotFit, shortage_of
from torch_lla_em.solvers import SGD, BlockCG, BlockKrylov, FunctionSpace, Newton

logger = logging.getLogger("torch_lla_em")

_FUNCTION_SPACE_OUTPUTS = 1024
_FUNCTION_SPACE_BYTES = 1e9

# H at the linear mode moves λ, and λ the mode, but little after the first time
_LINEAR_ROUNDS = 5
_LINEAR_CHANGE = 0.05


# of γ, at or below which the g-prior has kept nothing: a tenth of a weight
_KEPT = 0.1


_NO_ROWS = (
    'curvature="variational" needs the outputs of a few directions at all examples: there is no '
    "memory for them, or the examples come in another order at every pass. The fit goes on with "
    'curvature="%s", whose predictions are usually worse. Use a loader that does not shuffle, '
    "fewer `parameters`, or more memory; otherwise call `calibrate`."
)


@dataclass(frozen=True)
class FitOptions:
    """What a fit is to do."""

    num_samples: int
    seed: int
    g_prior: bool
    layerwise: bool
    solver: Solver | None
    tolerance: float
    curvature: str | None
    update: str
    em_steps: int
    prior_precision: Tensor | None


Observe = Callable[[Info], None]


def learn(problem: Problem, options: FitOptions, on_step: Observe) -> Posterior:
    """Run EM to its fixed point, then the last E-step; ``on_step`` is told of every step."""
    steps = count(1)

    def tell(info: Info) -> None:
        on_step(info._replace(step=next(steps)))

    try:
        found = _learn(problem, options, tell)
        if _collapsed(found, options):
            other = replace(options, g_prior=False, prior_precision=None)
            found = _better(found, _learn(problem, other, tell))
        return found.assembled(problem)
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
        "With g_prior=True the posterior was the prior (γ = %.2g). The plain prior has a log evidence "
        "of %.5g against %.5g, and is %s.",
        *(found.effective_dim.value.item(), after, before),
        "taken" if after > before else "no better",
    )
    return plain if after > before else found


def _learn(problem: Problem, options: FitOptions, tell: Observe) -> Posterior:
    with problem.cost.stage("noise"):
        noise = get_sto_samples(
            problem, options.num_samples, options.seed, options.g_prior, options.layerwise
        )
    _check_start(options.prior_precision, options, len(noise.prior.layout.names))
    curvature = options.curvature or choose_curvature(problem, options)
    if curvature == "variational" and not problem.likelihood.is_quadratic:
        wanted = Wanted(options.tolerance, options.em_steps, options.prior_precision)
        with problem.cost.stage("ascent"):
            found = _variational(problem, noise, wanted, tell)
        if found is not None:
            return found
        curvature = "network" if options.curvature is None else "linear"
        logger.warning(_NO_ROWS, curvature)
    hyper = Hyperparameters(_starting_point(problem, noise, options), sigma_of(problem))
    e_step = make_e_step(problem, noise, options, hyper)

    def climb(e_step: EStep, hyper: Hyperparameters) -> Hyperparameters:
        m_step = MStep(problem, noise.prior, options.update)
        for state in em(e_step, m_step, hyper, options.em_steps):
            hyper = state.hyper
            tell(state.info)
        return hyper

    hyper = climb(e_step, hyper)
    if curvature != "network" and not problem.likelihood.is_quadratic:
        # a loss with several modes would wander from one to the next
        for _ in range(_LINEAR_ROUNDS if problem.likelihood.convex else 1):
            before = hyper.precision.log()
            bent = problem.with_curvature_at(e_step.mode(hyper, options.tolerance).w)
            noise = noise.drawn_again(bent)
            e_step = make_e_step(bent, noise, options, hyper)
            hyper = climb(e_step, hyper)
            if (hyper.precision.log() - before).abs().max() < _LINEAR_CHANGE:
                break
    return _posterior(e_step, noise, hyper, options.tolerance)


def _variational(
    problem: Problem, noise: StochasticPrior, wanted: Wanted, tell: Observe
) -> Posterior | None:
    """Return the variational posterior, with fewer samples where memory allows no more."""
    while True:
        found, shortage = problem.attempt(lambda: variational(problem, noise, wanted, tell))
        if found is not None or not shortage or len(noise.xi) <= FEWEST_SAMPLES:
            return found
        noise = with_fewer(noise, max(FEWEST_SAMPLES, len(noise.xi) // 2))


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


def make_e_step(
    problem: Problem, noise: StochasticPrior, options: FitOptions, hyper: Hyperparameters
) -> EStep:
    """Return the E-step of the solver asked for, or of one chosen by size."""
    solver = options.solver or choose_solver(problem, options.layerwise)
    of_mode = solver if isinstance(solver, SGD) else Newton()
    search = ModeSearch(problem, noise.prior, of_mode)
    if isinstance(solver, BlockKrylov) and _shifts(problem, options.layerwise):
        return KrylovEStep(problem, noise, solver, search)
    deflation = None
    if isinstance(solver, BlockCG) and _has_one_noise(problem) and solver.deflate:
        deflation = Deflation.of(problem, noise, hyper.precision)
    return IterativeEStep(problem, noise, solver, search, deflation)


def choose_curvature(problem: Problem, options: FitOptions) -> str:
    """Return "variational" where one λ, an H that moves, and nothing asked of EM allow it."""
    data, likelihood = problem.data, problem.likelihood
    sites = data.num_rows if likelihood.elementwise else data.num_targets
    reasons = {
        "a Gaussian likelihood has one H everywhere": likelihood.is_quadratic,
        "there is a precision for each tensor": options.layerwise,
        "a solver was chosen": options.solver is not None,
        'update="em" was chosen': options.update == "em",
        "outputs are many": data.num_outputs > MOST_OUTPUTS * max(sites, 1),
    }
    against = [why for why, holds in reasons.items() if holds]
    curvature = "network" if against else "variational"
    logger.info("Curvature %s: %s.", curvature, *against[:1] or ("it predicts best as fitted",))
    return curvature


def choose_solver(problem: Problem, layerwise: bool) -> Solver:
    """Return the solver that suits the sizes, and log it."""
    outputs = problem.data.num_outputs
    bytes_of_rows = outputs * problem.linear_model.layout.size * problem.dtype.itemsize
    if _shifts(problem, layerwise):
        solver: Solver = BlockKrylov()
        why = "one factorisation serves every λ"
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


def _starting_point(problem: Problem, noise: StochasticPrior, options: FitOptions) -> Tensor:
    blocks = len(noise.prior.layout.names)
    start = options.prior_precision
    if start is None:
        number = starting_precision(problem, noise, options.layerwise)
        start = torch.tensor(number, dtype=torch.float64, device="cpu")
    start = start.to(device=noise.eta.device, dtype=torch.float64)
    return start.expand(blocks).clone() if options.layerwise and not start.dim() else start


def _check_start(start: Tensor | None, options: FitOptions, blocks: int) -> None:
    shapes = ((), (blocks,)) if options.layerwise else ((),)
    if start is not None and start.shape not in shapes:
        raise ValueError(
            f"prior_precision has shape {tuple(start.shape)}, but the prior has "
            f"{f'{blocks} tensors' if options.layerwise else 'one precision'}: pass one number"
            f"{', or one per tensor' if options.layerwise else ''}."
        )


def starting_precision(problem: Problem, noise: StochasticPrior, layerwise: bool = False) -> float:
    """Return a λ at which the mode and γ are cheap, and the fixed point is near.

    G along the gradient at w = 0, in the prior's scaled coordinates: above it, the data
    hardly move the mode even where it would go first. Layerwise, the mean of diag(G).
    """
    scale = noise.prior.scale
    features = scale * noise.eta
    mean = problem.space.dots(
        features, features
    ).mean() / noise.prior.num_weights().sum().clamp_min(1)
    start = mean.clamp_min(1e-8).item()
    if layerwise:
        return start
    _, gradient = WhitenedLoss(problem, scale).value_and_gradient(problem.zeros(1)[0])
    size = problem.space.norm(gradient)
    if not 0 < size < inf:
        return start
    direction = (gradient / size)[None]
    return max(start, problem.space.dot(direction[0], WhitenedGGN(problem, scale)(direction)[0]))


def _posterior(
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
