"""Functions of arrays: ranks among reference scores, conformal sets and intervals.

Predictions of posteriors and of students use the same functions. The outputs are the last axis.
Scores that differ only by rounding are ties.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil, nan
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_lla_em.data import as_targets
from torch_lla_em.likelihoods import Likelihood
from torch_lla_em.runtime import NUMBERS

ROUNDING = 1e-9
"""Scores below this are rounding errors of double precision, as are such relative errors of the
product of a level and a count."""


class Interval(NamedTuple):
    """The ends of an interval, as tensors of the same shape."""

    lower: Tensor
    upper: Tensor


class Compared(NamedTuple):
    """The scores of inputs and of validation examples, for each OOD score separately."""

    scores: Tensor
    """The scores of inputs, (B, S)."""

    room: Tensor
    """Differences up to which scores are ties, (B, S)."""

    reference: Tensor
    """The scores of validation examples, (n, S)."""

    groups: tuple[Tensor, Tensor] | None = None
    """The groups of the inputs, (B,), and of the validation examples, (n,)."""

    def parts(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the name of each group, which inputs are in it, and its validation examples."""
        if self.groups is None:
            yield (
                "",
                torch.ones(len(self.scores), dtype=torch.bool, device=self.scores.device),
                self.reference,
            )
            return
        inputs, known = self.groups
        for label in inputs.unique().tolist():
            yield str(label), inputs == label, self.reference[known == label]


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """Return a mean over examples and its standard error, NaN for one example."""
    error = values.std().item() / len(values) ** 0.5 if len(values) > 1 else nan
    return values.mean().item(), error


def rounding(dtype: torch.dtype) -> float:
    """Return the relative difference up to which scores are ties: products differ between batches
    by more than eps."""
    return float(torch.finfo(dtype).eps ** 0.5)


def infinite_if_nan(scores: Tensor) -> Tensor:
    """Return scores with infinity in place of NaN, so that such inputs are the most unusual."""
    return scores.masked_fill(scores.isnan(), torch.inf)


def p_values(
    reference: Tensor,
    scores: Tensor,
    room: float | Tensor = 0.0,
    unit: float | Tensor = 0.0,
    weights: Tensor | None = None,
    own: Tensor | None = None,
) -> Tensor:
    """Return conformal p-values, (B,), of scores (B, S) among reference scores (n, S).

    For each score, the share of examples with at least this score is computed. The mean of the
    shares (``combined``) is ranked among those of the examples and the input. A score counts as at
    least s from s - ``room`` (s + ``unit``) on. Inputs and examples are treated alike, so
    p-values are exact without ties, and conservative with them. The weights of examples are
    ``weights``, (n,), and those of inputs ``own``, (1 or B,).
    """
    reference = reference.to(scores.device)
    weights, own = _weights(reference, weights, own)
    in_order, order = reference.sort(0)
    in_order = in_order.T.contiguous()
    # the weight of all examples from a place in this order on, (S, n + 1)
    above = pad(weights[order].flip(0).cumsum(0).flip(0), (0, 0, 0, 1)).T

    def least(values: Tensor) -> Tensor:
        return values - room * (values + unit).nan_to_num(posinf=0.0, neginf=0.0)

    def mass_of(values: Tensor) -> Tensor:
        return above.gather(1, torch.searchsorted(in_order, least(values).T.contiguous())).T

    theirs, bounds, is_shared = mass_of(reference), least(reference), len(own) == 1

    def of_some(some: Tensor, mass: Tensor, *each: Tensor) -> Tensor:
        # the share of an example counts the examples and, if the score of the input is at least as
        # large, the input too
        weight = own if is_shared else each[0]
        total = scores.new_zeros(())
        for score, least_of, share in zip(some.T, bounds.T, theirs.T, strict=True):
            is_counted = score[:, None] >= least_of
            total = total + torch.where(is_counted, 1 / (share + weight[:, None]), 1 / share)
        rank = combined(weight[:, None] + mass)
        not_above = 1 / total <= (rank + ROUNDING * rank)[:, None]
        return (weight + not_above.double() @ weights) / (weight + weights.sum())

    given = scores, mass_of(scores), *([] if is_shared else [own])
    return in_parts(of_some, NUMBERS // max(1, len(reference)), *given)


def in_parts(function: Callable[..., Tensor], size: int, *values: Tensor) -> Tensor:
    """Apply a function to ``size`` rows at a time. If there are fewer rows, the number of rows is
    not used, so that exported programs accept any number."""
    if len(values[0]) <= max(1, size):
        return function(*values)
    parts = zip(*(value.split(max(1, size)) for value in values), strict=True)
    return torch.cat([function(*part) for part in parts])


def _weights(reference: Tensor, *given: Tensor | None) -> tuple[Tensor, ...]:
    """Return the weights of reference examples, (n,), and of inputs, (1 or B,): 1 where they are
    not given."""
    sizes = len(reference), 1
    filled = (reference.new_ones(n) if w is None else w for n, w in zip(sizes, given, strict=True))
    return tuple(weights.to(reference.device, torch.float64) for weights in filled)


def combined(shares: Tensor) -> Tensor:
    """Return the harmonic mean of shares in columns, up to a factor: small if one of them is, and
    smaller if all are."""
    return 1 / (1 / shares).sum(-1)


def crossed(each: Tensor, counts: Tensor) -> Tensor:
    """Return cross-conformal p-values, (B,), from those of each fold, (folds, B).

    The ranks of an input among ``counts`` examples are added: P(p <= rate) <= 2 rate + 2 folds / N.
    """
    counts = counts.to(each.device)
    above = each * (1 + counts)[:, None] - 1
    return (1 + above.sum(0)) / (1 + counts.sum())


def quantiles(
    errors: Tensor,
    level: float,
    of: str = "",
    weights: Tensor | None = None,
    own: Tensor | None = None,
) -> Tensor:
    """Return the conformal quantile of each column of errors (n, outputs), (1 or B, outputs).

    ``of`` names the part of the examples in an error message. The error of an input itself counts
    as infinity, so the quantile is infinite if the weight of the input is more than a share 1 -
    ``level`` of all weights.
    """
    require_share(level)
    require(len(errors), ceil(level / (1 - level) - ROUNDING), f"level={level}", of)
    in_order, order = errors.sort(0)
    weights, own = _weights(errors, weights, own)
    sums = weights[order].cumsum(0).T.contiguous()
    # ONNX has single precision for plain numbers, in which 0.8 of 20 would be more than 16
    needed = torch.tensor(level, dtype=sums.dtype, device=sums.device) * (weights.sum() + own)
    needed = needed - ROUNDING * needed
    places = torch.searchsorted(sums, needed.expand(len(sums), -1).contiguous())
    return pad(in_order, (0, 0, 0, 1), value=torch.inf).gather(0, places.T)


def require(count: int, needed: int, asked: str, of: str = "") -> None:
    """Raise an error if there are fewer reference examples than needed, in total or in a part."""
    if count < needed:
        raise ValueError(
            f"{asked} needs at least {needed} reference examples{of}, and there are {count}: "
            f"calibrate with {2 * needed} examples{of}, half of which are the reference, or "
            f"calibrate a student with {needed}."
        )


def require_share(value: float, name: str = "level") -> float:
    """Return a level or a rate; raise an error if it is not between 0 and 1."""
    if not 0 < value < 1:
        raise ValueError(f"{name} must lie between 0 and 1, not {value}.")
    return value


def has_classes(likelihood: Likelihood, f: Tensor) -> bool:
    """Return whether targets are one class label per example."""
    return likelihood.gives_probabilities and not likelihood.elementwise and f.dim() == 2


def has_values(likelihood: Likelihood, f: Tensor) -> bool:
    """Return whether targets are continuous and have no sites."""
    return likelihood.real_valued and f.dim() <= 2


def aligned(likelihood: Likelihood, y: Tensor, f: Tensor, class_dim: int) -> Tensor:
    """Return targets with the axis of the outputs last; raise an error if they do not fit."""
    y = likelihood.align(as_targets(y).to(f.device), class_dim)
    likelihood.check(f, y)
    return y


def conformal_interval(
    mean: Tensor, variance: Tensor, size: Tensor, room: float | Tensor
) -> Interval:
    """Return intervals whose half width is a multiple of the standard deviation, slightly larger so
    that targets at the ends are inside however they are rounded."""
    size = size.flatten() if mean.dim() == 1 else size
    half = size.to(mean) * variance.sqrt() * (1 + room)
    half = half + 8 * torch.finfo(mean.dtype).eps * mean.abs()
    return Interval(mean - half, mean + half)


def mass_above(probs: Tensor, room: float | Tensor) -> Tensor:
    """Return, for each class, the total probability of all classes that are more probable by a
    factor over 1 + ``room``, (B, C)."""
    probs = probs.double()  # sorted together with their products with this factor, of no mass
    mass = torch.cat([torch.zeros_like(probs), probs], 1)
    places = torch.cat([probs * (1 + room), probs], 1)
    order = places.sort(dim=1, descending=True, stable=True).indices
    mass_in_order = mass.gather(1, order)
    above = torch.zeros_like(mass).scatter(1, order, mass_in_order.cumsum(1) - mass_in_order)
    return above[:, : probs.shape[1]]
