"""Calibration: a few numbers of the predictions, fitted to a validation set.

``Predictor.calibrate`` lists them; temperature scaling is a special case. They maximise the posterior
density under weak priors, by L-BFGS on outputs that one pass has stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood, Regression
from torch_lla_em.prediction.conformal import Reference
from torch_lla_em.prediction.pushed import Pushed, Tables
from torch_lla_em.runtime import Group, report

logger = logging.getLogger("torch_lla_em")

# prior standard deviations of log factors, of log scales, and of the logits of weights
_OF_FACTOR, _OF_SCALE, _OF_LOGIT = 0.5, 1.0, 1.0

# number of functions times outputs that are held in memory at a time
_NUMBERS = 2**22
_STEPS = 100
_DIFFERENCE = 0.05


class Calibration(NamedTuple):
    """The result of ``calibrate`` on a validation set; ``print`` it for one sentence.

    Example:
        >>> improvement = la.calibration.before - la.calibration.after
    """

    num_rows: int
    """Number of validation examples with a label."""

    before: float
    """Their mean negative log-likelihood (NLL) before calibration."""

    after: float
    """The NLL after it, corrected for having been fitted to the same examples."""

    standard_error: float
    """Standard error of the difference over examples; NaN for a single example."""

    applied: bool
    """Whether predictions were changed: not if the NLL before was lower."""

    @property
    def kept(self) -> float:
        """The NLL of the predictions that are in use."""
        return self.after if self.applied else self.before

    def __str__(self) -> str:
        improvement = f"{self.before - self.after:.2g} ± {self.standard_error:.2g}"
        return f"{self.before:.4g} → {self.after:.4g} (improvement {improvement})"


def restored(fields: list[Any] | None) -> Calibration | None:
    """Return the calibration of a file; release 0.3.0 stored coverages before the last field."""
    return None if fields is None else Calibration._make([*fields[:4], fields[-1]])


class Numbers(NamedTuple):
    """The numbers that are fitted, as functions of an unconstrained vector θ."""

    at: Callable[[Tensor], tuple[Tensor, Tensor]]
    """Maps θ (zeros at the start) to a table of components and a factor of σ."""

    deviations: tuple[float, ...]
    """Prior standard deviations of θ."""


class Kept(NamedTuple):
    """The table of components and the factor of σ that are kept, and how they were found."""

    table: Any
    """One table, or that of each member of an ensemble if they are kept as they were."""

    noise: float
    calibration: Calibration
    reference: Reference


def calibrated(data: Pushed, group: Group, before: Tables) -> Kept:
    """Fit the numbers to a validation set, of which ``data`` are the examples of this rank.

    ``before`` is the table so far, which is kept if its validation NLL is lower.
    """
    likelihood = data.likelihood
    count = group.sum(likelihood.labelled(data.y).sum().double()).item()
    if not count:
        raise ValueError(
            "None of the validation examples has a label (all are ignored), so calibration is not "
            "possible. Pass labelled examples."
        )

    def mean_and_error(values: Tensor) -> tuple[float, float]:
        sums = group.sum(torch.stack([values.sum(), values.square().sum()]))
        first, second = (sums / count).tolist()
        error = (max(second - first**2, 0.0) / (count - 1)) ** 0.5 if count > 1 else nan
        return first, error

    numbers = numbers_of(likelihood)
    theta = _most_probable(numbers, data, group)
    table, noise = found = numbers.at(theta)
    so_far = before, torch.ones_like(noise)
    old, new = (_log_probs(data, *which) for which in (so_far, found))
    optimism = _determined(numbers, theta, data, group) / count
    (nll, _), (gain, error) = mean_and_error(-old), mean_and_error(new - old)
    applied, reference = gain > optimism, _split(numbers, data, group)
    calibration = Calibration(int(count), nll, nll - gain + optimism, error, applied)
    if not applied:
        report("log", f"Validation NLL {calibration}; predictions are kept as they were.")
        return Kept(before, 1.0, calibration, reference)
    logger.info("Validation NLL %s; calibration applied.", calibration)
    return Kept(table, noise.item(), calibration, reference)


def _split(numbers: Numbers, data: Pushed, group: Group) -> Reference:
    """Fit the numbers to every other labelled example, and compute scores of the remaining ones."""
    data = data.part(data.likelihood.labelled(data.y))
    table, noise = numbers.at(_most_probable(numbers, data.part(slice(None, None, 2)), group))
    judged = data.part(slice(1, None, 2)).prediction(table, noise)
    sigma = judged.likelihood.sigma_noise if isinstance(judged.likelihood, Regression) else None
    scores = group.gather(judged._ood_scores()), group.gather(judged._errors(data.y[1::2]))
    return Reference(table, sigma, scores[0], scores[1].sort(0).values)


def numbers_of(likelihood: Likelihood) -> Numbers:
    """Return the numbers that the predictions of a likelihood have."""
    if isinstance(likelihood, Regression):

        def mixed_mean(theta: Tensor) -> tuple[Tensor, Tensor]:
            a = theta[2].sigmoid()
            return _table([[theta.new_ones(()), a, 1 - a, (2 * theta[0]).exp()]]), theta[1].exp()

        return Numbers(mixed_mean, (_OF_SCALE, _OF_SCALE, 2 * _OF_LOGIT))
    factors = likelihood.gives_probabilities

    def mixture(theta: Tensor) -> tuple[Tensor, Tensor]:
        one, zero, w = theta.new_ones(()), theta.new_zeros(()), theta[-3:].softmax(0)
        t, c = theta[1:3].exp() if factors else (one, one)
        posterior = [w[0], one, zero, (2 * theta[0]).exp()]
        return _table([posterior, [w[1], c, zero, zero], [w[2], zero, t, zero]]), one

    return Numbers(mixture, (_OF_SCALE, *(_OF_FACTOR,) * 2 * factors, *(_OF_LOGIT,) * 3))


def _table(rows: list[list[Tensor]]) -> Tensor:
    return torch.stack([torch.stack(row) for row in rows])


def _pieces(data: Pushed) -> Iterator[Pushed]:
    """Yield a few examples at a time, in double precision."""
    for piece in data.split(max(1, _NUMBERS // max(1, 64 * data.f[:1].numel()))):
        yield piece.double()


def _log_probs(data: Pushed, table: Tables, noise: Tensor) -> Tensor:
    """Return log p(y | x) of every example, (N,)."""
    parts = [piece.prediction(table, noise)._log_prob(piece.y) for piece in _pieces(data)]
    return torch.cat(parts) if parts else noise.new_zeros(0)


def _most_probable(numbers: Numbers, data: Pushed, group: Group) -> Tensor:
    """Return θ at the maximum of log p(y | x, θ) + log p(θ), by L-BFGS."""
    deviations = torch.tensor(numbers.deviations, dtype=torch.float64, device=data.f.device)
    theta = torch.zeros_like(deviations).requires_grad_()
    search = torch.optim.LBFGS([theta], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        sums = torch.zeros(1 + len(theta), dtype=theta.dtype, device=theta.device)
        for piece in _pieces(data):
            with torch.enable_grad():
                loss = -piece.prediction(*numbers.at(theta))._log_prob(piece.y).sum()
            sums += torch.cat([loss.detach()[None], *torch.autograd.grad(loss, theta)])
        loss, theta.grad = group.sum(sums).split([1, len(theta)])
        theta.grad = theta.grad + theta.detach() / deviations**2
        penalised: Tensor = loss[0] + 0.5 * (theta.detach() / deviations).square().sum()
        return penalised

    search.step(objective)
    return theta.detach()


def _determined(numbers: Numbers, theta: Tensor, data: Pushed, group: Group) -> float:
    """Return the number of parameters that the data determine: the optimism of the fitted NLL."""
    steps = _DIFFERENCE * torch.eye(len(theta), dtype=theta.dtype, device=theta.device)

    def rows(theta: Tensor) -> Tensor:
        return _log_probs(data, *numbers.at(theta))

    slopes = [(rows(theta + step) - rows(theta - step)) / (2 * _DIFFERENCE) for step in steps]
    scaled = torch.stack(slopes) * torch.tensor(numbers.deviations, device="cpu").to(theta)[:, None]
    information = group.sum(scaled @ scaled.T)
    known = torch.linalg.eigvalsh(information).clamp_min(0)
    count: float = (known / (1 + known)).sum().item()
    return count
