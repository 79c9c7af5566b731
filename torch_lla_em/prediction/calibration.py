"""What held-out rows call for: the posterior's scale, a factor of its mean, and which mean."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import product
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.prediction.prediction import Prediction, score
from torch_lla_em.problem import Problem
from torch_lla_em.runtime import Group

logger = logging.getLogger("torch_lla_em")

_SCALES = 1e-4, 1e2
_FACTORS = 0.1, 10.0
DEVIATION = 0.5
"""Prior standard deviation of log τ and log c around 0."""

# all in logarithms: the grid's spacing, that of differences, and when a maximum is found
_SPACING = 1.2
_DIFFERENCE = 0.1
_CLOSE = 0.005
_ROUNDS = 20

CLEARLY = 4.0
"""Standard errors by which the network's mean is to be better than the linear mode."""

LogProb = Callable[[float, float], float]
"""(τ, c) -> Σ log p(y | x) of held-out data, with deviations √τ J w_k around c times the mean."""


Scores = Callable[[float, float], Tensor]
"""(τ, c) -> log p(y_n | x_n) of this rank's rows, (N,)."""


class Calibration(NamedTuple):
    """What held-out data say."""

    scale: float
    """τ."""

    factor: float
    """c, one over the temperature of the mean; 1 where outputs are no scores of classes."""


def calibration(log_prob: LogProb, with_factor: bool) -> Calibration:
    """Return the most probable τ and c under log-normal priors of deviation ½ around 1.

    Few held-out rows hold few errors, and their likelihood alone then asks for no
    uncertainty at all; of many rows it overrules the prior. The average of softmaxes is
    flatter than the softmax of the average, which the factor makes up for.
    """

    def objective(point: Tensor) -> float:
        scale, *factor = point.exp().tolist()
        return log_prob(scale, *factor or (1.0,)) + _log_prior(point)

    bounds = torch.tensor([_SCALES, _FACTORS][: 1 + with_factor], dtype=torch.float64).log()
    # classes have probabilities, whose logarithms are never positive
    start, value = _best_of_grid(objective, bounds, 0.0 if with_factor else inf)
    scale, *factor = _climbed(objective, bounds, start, value).exp().tolist()
    if scale < 1.01 * _SCALES[0] or scale > 0.99 * _SCALES[1]:
        logger.warning(
            "The posterior scale lies at the edge of [%g, %g]: the held-out data %s. Check that "
            "they come from the same source as the training data, and were not trained on.",
            *_SCALES,
            "ask for no uncertainty" if scale < 1 else "ask for more than the prior holds",
        )
    return Calibration(scale, *factor or (1.0,))


def best_scale(log_prob: Callable[[float], float]) -> float:
    """Return the most probable τ alone."""
    return calibration(lambda scale, _: log_prob(scale), with_factor=False).scale


def _log_prior(point: Tensor) -> float:
    return -0.5 * point.square().sum().item() / DEVIATION**2


def _best_of_grid(
    objective: Callable[[Tensor], float], bounds: Tensor, ceiling: float
) -> tuple[Tensor, float]:
    """Return the best point of a grid, the likely ones first, and its value.

    The search ends where the prior alone is worse, as the likelihood is at most ``ceiling``.
    """
    axes = [
        torch.linspace(
            *ends.tolist(), 1 + round((ends[1] - ends[0]).item() / _SPACING), dtype=bounds.dtype
        )
        for ends in bounds
    ]
    points = sorted((torch.stack(point) for point in product(*axes)), key=_log_prior, reverse=True)
    best, value = points[0], -inf
    for point in points:
        if _log_prior(point) + ceiling <= value:
            break
        found = objective(point)
        if found > value:
            best, value = point, found
    return best, value


def _climbed(
    objective: Callable[[Tensor], float], bounds: Tensor, point: Tensor, value: float
) -> Tensor:
    """Return the maximum near a point: Newton's method with differences, never downhill."""
    reach = _SPACING
    for _ in range(_ROUNDS):
        gradient, hessian = _differences(objective, point, value)
        curvatures, axes = torch.linalg.eigh(hessian)
        step = axes @ (axes.T @ gradient / curvatures.abs().clamp_min(1e-12))
        step = step * min(1.0, reach / step.norm().clamp_min(1e-300).item())
        candidate = torch.clamp(point + step, bounds[:, 0], bounds[:, 1])
        found = objective(candidate)
        moved = (candidate - point).norm().item()
        if found > value:
            point, value = candidate, found
        else:
            reach = 0.25 * moved
        if moved < _CLOSE:
            break
    return point


def _differences(
    objective: Callable[[Tensor], float], point: Tensor, value: float
) -> tuple[Tensor, Tensor]:
    """Return gradient and Hessian by central differences."""
    steps = _DIFFERENCE * torch.eye(len(point), dtype=point.dtype)
    up = [objective(point + step) for step in steps]
    down = [objective(point - step) for step in steps]
    gradient = torch.tensor([(a - b) for a, b in zip(up, down)], dtype=point.dtype) / (
        2 * _DIFFERENCE
    )
    hessian = torch.zeros(len(point), len(point), dtype=point.dtype)
    for i in range(len(point)):
        hessian[i, i] = up[i] - 2 * value + down[i]
        for j in range(i):
            both = objective(point + steps[i] + steps[j])
            hessian[i, j] = hessian[j, i] = both - up[i] - up[j] + value
    return gradient, hessian / _DIFFERENCE**2


def calibrated(problem: Problem, columns: Tensor, means: Iterable[str]) -> tuple[str, Calibration]:
    """Return the best mean, and scale and factor with it; one pass.

    ``columns`` are w_lin and the samples, (1 + K, P); the data of the problem the held-out rows.
    """
    parts = [(f, Jw, batch.targets) for batch, f, Jw in problem.push_forward(columns)]
    scores = {mean: _scores(problem, parts, mean) for mean in means}
    group = problem.data.group

    def total(own: Scores, scale: float, factor: float) -> float:
        return group.sum(own(scale, factor).sum().to(problem.device)).item()

    with_factor = problem.likelihood.gives_probabilities
    found = {
        mean: calibration(lambda s, c, own=own: total(own, s, c), with_factor)
        for mean, own in scores.items()
    }
    best = next(iter(found))
    if len(found) > 1:
        rows = {mean: own(*found[mean]) for mean, own in scores.items()}
        best = _better((rows["network"] - rows["linear"]).to(problem.device), group)
    return best, found[best]


def _scores(problem: Problem, parts: list[tuple[Tensor, Tensor, Tensor]], mean: str) -> Scores:
    if not parts:  # a rank without data
        return lambda *_: torch.zeros(0, dtype=torch.float64)
    f, Jw, y = zip(*parts)
    Jw = torch.cat(Jw, dim=1)
    centre = torch.cat(f) if mean == "network" else Jw[0]
    return score(Prediction(problem.likelihood, centre, Jw[1:]), torch.cat(y))


def _better(gain: Tensor, group: Group) -> str:
    """Return the mean to take, by how much more probable rows are by the network's, (N,).

    The linear model's own mode goes with its posterior, and was the better mean on nearly
    every data set of the benchmarks. Among a few hundred rows the gain is that of a handful,
    whose spread says too little: gains of three standard errors turned into losses.
    """
    moments = torch.stack([torch.ones_like(gain), gain, gain.square()]).sum(1)
    count, total, squares = group.sum(moments).tolist()
    variance = max(squares - total**2 / count, 0.0) / max(count - 1, 1)
    return "network" if total > CLEARLY * (count * variance) ** 0.5 else "linear"
