"""Whole fits by every solver, what they spend, and the dense fixed point of λ."""

import re
import time
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from methods.counted import Counted
from methods.plain_cg import PlainCG
from torch_lla_em.inference import FitOptions, Statistics, Watch, learn
from torch_lla_em.inference.linear_mode import optimise_MAP
from torch_lla_em.inference.posterior_samples import Solver
from torch_lla_em.inference.stochastic_prior import StochasticPrior
from torch_lla_em.problem.problem import Problem
from torch_lla_em.solvers import SGD, BlockCG, BlockKrylov, DivergenceError, Newton


class Fit(NamedTuple):
    """How a whole fit is done."""

    solver: Solver
    tolerance: float = 0.05
    layerwise: bool = False


FITS = {
    "block_krylov": Fit(BlockKrylov()),
    "block_cg": Fit(BlockCG()),
    "plain_cg": Fit(PlainCG()),
    "sgd": Fit(SGD(epochs=20)),
    "block_krylov_fine": Fit(BlockKrylov(), 1e-3),
    "layerwise_block_cg": Fit(BlockCG(), layerwise=True),
}
_SGD_STEPS = 4


def whole_fit(problem: Counted, num_samples: int, fit: Fit) -> dict:
    """Return λ's path and what the whole fit spends; or how it failed."""
    path, begin = [], time.monotonic()

    def note(found: Statistics | None, *_: object) -> None:
        if found is not None:
            path.append(found.precision.tolist())

    steps = _SGD_STEPS if isinstance(fit.solver, SGD) else 20
    options = FitOptions(
        num_samples,
        0,
        True,
        fit.layerwise,
        fit.solver,
        fit.tolerance,
        "network",
        "mackay",
        steps,
        None,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            posterior = learn(problem, options, Watch(note))
        except DivergenceError as error:
            passes = problem.spent["columns"] / num_samples
            return {"failed": str(error).split(":")[0], "passes": passes}
    gamma = posterior.effective_dim.value.sum()
    return {
        "path": [*path, posterior.prior_precision.tolist()],
        "passes": problem.spent["columns"] / num_samples,
        "single": problem.spent["single"],
        "seconds": time.monotonic() - begin,
        "gamma": gamma.item(),
        "error": (posterior.certificate.square().mean() / gamma.clamp_min(1)).sqrt().item(),
        "warnings": sorted({re.split(r"[.:](?:\s|$)", str(w.message))[0] for w in caught}),
    }


def dense_fixed_point(
    problem: Problem, noise: StochasticPrior, precision: Tensor, averaged: bool = True
) -> float:
    """Return MacKay's λ with the same noise, by Cholesky factors of G + λ in float64.

    γ is the average of both its estimators, or ⟨w, G w⟩ alone, as in the paper.
    """
    G = dense_ggn(problem, noise)
    xi, eta, w = noise.xi.double(), (noise.prior.scale * noise.eta).double(), None
    for _ in range(20):
        shifted = G.clone()
        shifted.diagonal().add_(precision)
        b = precision.sqrt() * xi + eta
        x = torch.cholesky_solve(b.T, torch.linalg.cholesky(shifted)).T
        shrunk = (xi - precision.sqrt() * x).square().sum(1)
        energy = (x * b).sum(1) - precision * x.square().sum(1)
        w = optimise_MAP(problem, noise.prior, precision, Newton(2e-3, 3000), start=w).w
        gamma = 0.5 * (energy + shrunk) if averaged else energy
        new = gamma.mean() / noise.prior.squared_norm(w)
        settled, precision = abs(new / precision - 1) < 1e-3, new
        if settled:
            break
    return precision.item()


def dense_ggn(problem: Problem, noise: StochasticPrior) -> Tensor:
    """Return the scaled G, shape (P, P), in float64."""
    rows = problem.rows() * noise.prior.scale
    return sum(part.double().T @ part.double() for part in rows.split(2000))
