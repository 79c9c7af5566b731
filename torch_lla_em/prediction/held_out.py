"""The scale, the factor and the mean that held-out rows call for, on however many ranks they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from torch_lla_em.prediction.calibration import Calibration, calibration
from torch_lla_em.prediction.prediction import Prediction, score
from torch_lla_em.problem import Problem
from torch_lla_em.runtime import Group

CLEARLY = 4.0
"""Standard errors by which the network's mean is to be better than the linear mode."""

Scores = Callable[[float, float], Tensor]
"""(τ, c) -> log p(y_n | x_n) of this rank's rows, (N,)."""


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
