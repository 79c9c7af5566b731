"""Calibration: a few numbers of the predictions, fitted to a validation set.

``Predictor.calibrate`` lists them; temperature scaling is a special case. They maximise the posterior
density under weak priors, by L-BFGS on outputs that one pass has stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.prediction.pushforward import Pushforward, Tables
from torch_lla_em.prediction.reference import Reference, Stated, is_second, require_two, warn_of_few
from torch_lla_em.prediction.regions import joint_errors
from torch_lla_em.runtime import Group, report

logger = logging.getLogger("torch_lla_em")

# prior standard deviations of log factors, of log scales, and of the logits of weights
_OF_FACTOR, _OF_SCALE, _OF_LOGIT = 0.5, 1.0, 1.0

# number of functions times outputs that are held in memory at a time
_NUMBERS = 2**22
_STEPS = 100
_DIFFERENCE = 0.05

_ERRORS = 2.0
"""Standard errors above which a difference of NLLs counts as measurable."""

_BETTER_ALONE = (
    "The network alone has a validation NLL of {:.4g}, lower by {:.2g} ± {:.2g} than these predictions. Predict by "
    "the network, or fit again with more `parameters` or `num_samples`."
)


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

    @property
    def is_measurable(self) -> bool:
        """Whether the NLL has improved by more than two standard errors."""
        return self.applied and self.before - self.after > _ERRORS * self.standard_error

    def __str__(self) -> str:
        if not self.applied:
            return (
                f"not applied, because it would not lower the validation NLL ({self.before:.4g} as fitted, "
                f"{self.after:.4g} calibrated): probabilities stay as they were"
            )
        what = "improvement" if self.is_measurable else "no measurable difference:"
        improvement = f"{self.before - self.after:.2g} ± {self.standard_error:.2g}"
        return f"{self.before:.4g} → {self.after:.4g} ({what} {improvement})"


def restored(fields: list[Any] | None) -> Calibration | None:
    """Return the calibration of a file; release 0.3.0 stored coverages before the last field."""
    return None if fields is None else Calibration._make([*fields[:4], fields[-1]])


class Numbers(NamedTuple):
    """The numbers that are fitted, as functions of an unconstrained vector θ."""

    at: Callable[[Tensor], tuple[Tensor, Tensor]]
    """Maps θ (zeros at the start) to a table of components and a factor of σ."""

    deviations: tuple[float, ...]
    """Prior standard deviations of θ."""


class CalibratedComponents(NamedTuple):
    """The table of components and the factor of σ that were fitted; used if the NLL improves."""

    table: Tensor
    noise: Tensor
    calibration: Calibration


def calibrated(
    parts: Sequence[Pushforward], before: Sequence[Tables], group: Group
) -> CalibratedComponents:
    """Fit the numbers to held-out examples, of which ``parts`` are those of this rank.

    ``before`` are the tables by which each part is predicted so far.
    """
    likelihood = parts[0].likelihood
    labels = [likelihood.labelled(part.y).sum().double() for part in parts]
    count = group.sum(torch.stack(labels).sum()).item()
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
    theta = _most_probable(numbers, parts, group)
    table, noise = numbers.at(theta)
    each = zip(parts, before)
    old = torch.cat([_log_probs([part], own, torch.ones_like(noise)) for part, own in each])
    new = _log_probs(parts, table, noise)
    optimism = _determined(numbers, theta, parts, group) / count
    (nll, _), (gain, error) = mean_and_error(-old), mean_and_error(new - old)
    applied = gain > optimism
    calibration = Calibration(int(count), nll, nll - gain + optimism, error, applied)
    if applied:
        logger.info("Validation NLL %s; calibration applied.", calibration)
    else:
        logger.info("Calibration %s.", calibration)
    one, zero = torch.ones_like(noise), torch.zeros_like(noise)
    alone = _log_probs(parts, _table([[one, zero, one, zero]]), one)
    own, (_, error) = mean_and_error(-alone)[0], mean_and_error(alone - (new if applied else old))
    lower = calibration.kept - own
    if lower > _ERRORS * error:
        report("log", _BETTER_ALONE.format(own, lower, error))
    return CalibratedComponents(table, noise, calibration)


def half_as_reference(data: Pushforward, group: Group, stated: Stated = Stated()) -> Reference:
    """Fit the numbers to every other labelled example, and return scores of the remaining ones.

    With groups it is every other one of each group. ``stated`` has those and the weights of all examples.
    """
    kept, numbers = data.likelihood.labelled(data.y), numbers_of(data.likelihood)
    data, stated = data.part(kept), stated.part(kept)
    by_class = isinstance(stated.groups, str)
    if by_class and not data.network()._has_classes:
        raise TypeError(
            'groups="classes" needs one class label per example: pass integers instead.'
        )
    groups = data.y.long() if by_class else stated.groups
    if groups is None:
        second = is_second(torch.zeros_like(kept[kept], dtype=torch.long))
    else:
        require_two(group.gather(groups), "class" if by_class else "group")
        second = is_second(groups)
    table, noise = numbers.at(_most_probable(numbers, [data.part(~second)], group))
    data, stated = data.part(second), stated.part(second)
    judged = data.prediction(table, noise)
    own = None if groups is None else group.gather(groups[second])
    weights = None if stated.weights is None else group.gather(stated.weights)
    is_sorted = own is None and weights is None
    if own is not None:
        warn_of_few(own, data.f.shape[-1] if by_class else None)

    def of_all(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        every = group.gather(values)
        return every.sort(0).values if is_sorted else every

    return Reference(
        table,
        judged.likelihood.observation_noise,
        group.gather(judged._ood_scores()),
        of_all(judged._errors(data.y)),
        joint=of_all(joint_errors(judged, data.y)),
        groups=None if by_class else own,
        classes=own if by_class else None,
        weights=weights,
    )


def folds_as_reference(parts: Sequence[Pushforward], found: CalibratedComponents) -> Reference:
    """Return scores of the examples that each member of an ensemble was not trained on."""
    labelled = [part.part(part.likelihood.labelled(part.y)) for part in parts]
    judged = [part.prediction(found.table, found.noise) for part in labelled]
    each = [joint_errors(by, part.y) for by, part in zip(judged, labelled)]
    joint = [errors for errors in each if errors is not None]
    return Reference(
        found.table,
        judged[0].likelihood.observation_noise,
        torch.cat([by._ood_scores() for by in judged]),
        torch.cat([by._errors(part.y) for by, part in zip(judged, labelled)]).sort(0).values,
        torch.tensor([len(part.y) for part in labelled], device="cpu"),
        joint=torch.cat(joint).sort(0).values if joint else None,
    )


def numbers_of(likelihood: Likelihood) -> Numbers:
    """Return the numbers that the predictions of a likelihood have."""
    if likelihood.observation_noise is not None:

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


def _pieces(parts: Sequence[Pushforward]) -> Iterator[Pushforward]:
    """Yield a few examples at a time, in double precision."""
    for part in parts:
        for piece in part.split(max(1, _NUMBERS // max(1, 64 * part.f[:1].numel()))):
            yield piece.double()


def _log_probs(parts: Sequence[Pushforward], table: Tables, noise: Tensor) -> Tensor:
    """Return log p(y | x) of every example, (N,)."""
    each = [piece.prediction(table, noise)._log_prob(piece.y) for piece in _pieces(parts)]
    return torch.cat(each) if each else noise.new_zeros(0)


def _most_probable(numbers: Numbers, parts: Sequence[Pushforward], group: Group) -> Tensor:
    """Return θ at the maximum of log p(y | x, θ) + log p(θ), by L-BFGS."""
    deviations = torch.tensor(numbers.deviations, dtype=torch.float64, device=parts[0].f.device)
    theta = torch.zeros_like(deviations).requires_grad_()
    search = torch.optim.LBFGS([theta], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        sums = torch.zeros(1 + len(theta), dtype=theta.dtype, device=theta.device)
        for piece in _pieces(parts):
            with torch.enable_grad():
                loss = -piece.prediction(*numbers.at(theta))._log_prob(piece.y).sum()
            sums += torch.cat([loss.detach()[None], *torch.autograd.grad(loss, theta)])
        loss, theta.grad = group.sum(sums).split([1, len(theta)])
        theta.grad = theta.grad + theta.detach() / deviations**2
        penalised: Tensor = loss[0] + 0.5 * (theta.detach() / deviations).square().sum()
        return penalised

    search.step(objective)
    return theta.detach()


def _determined(
    numbers: Numbers, theta: Tensor, parts: Sequence[Pushforward], group: Group
) -> float:
    """Return the number of parameters that the data determine: the optimism of the fitted NLL."""
    steps = _DIFFERENCE * torch.eye(len(theta), dtype=theta.dtype, device=theta.device)

    def rows(theta: Tensor) -> Tensor:
        return _log_probs(parts, *numbers.at(theta))

    slopes = [(rows(theta + step) - rows(theta - step)) / (2 * _DIFFERENCE) for step in steps]
    scaled = torch.stack(slopes) * torch.tensor(numbers.deviations, device="cpu").to(theta)[:, None]
    information = group.sum(scaled @ scaled.T)
    known = torch.linalg.eigvalsh(information).clamp_min(0)
    count: float = (known / (1 + known)).sum().item()
    return count
