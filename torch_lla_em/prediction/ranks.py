"""Ranks of scores among reference scores, in which differences by rounding are ties."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

NUMBERS = 2**22
"""Numbers, of comparisons or of differences between examples, that are held in memory at a time."""

ROUNDING = 1e-9
"""Products of a level and a count are rounded in their last bit."""


def rounding(dtype: torch.dtype) -> float:
    """Return the relative difference up to which scores are ties, for predictions of a dtype.

    The products of a network differ by more than one unit in the last place between batches.
    """
    return float(torch.finfo(dtype).eps ** 0.5)


def p_values(
    reference: Tensor, scores: Tensor, room: float = 0.0, unit: float | Tensor = 0.0
) -> Tensor:
    """Return conformal p-values, (B,), of scores (B, S) among reference scores (n, S).

    Ranks are taken among the reference examples and the input together. A score is at least as large
    as another one s if it exceeds s - ``room`` (s + ``unit``). All examples are treated alike, so the
    p-value is exact without ties, and conservative with them.
    """
    reference, count = reference.to(scores.device), len(reference)
    in_order = reference.sort(0).values.T.contiguous()

    def least(values: Tensor) -> Tensor:
        return values - room * (values + unit).nan_to_num(posinf=0.0)

    def number_above(values: Tensor) -> Tensor:
        return (count - torch.searchsorted(in_order, least(values).T.contiguous())).T

    own = 1 + number_above(scores).min(1).values
    theirs, bounds = number_above(reference), least(reference)

    def not_above(some: Tensor, rank: Tensor) -> Tensor:
        return (theirs + (some[:, None] >= bounds)).min(2).values.le(rank[:, None]).sum(1)

    step = max(1, NUMBERS // max(1, count))
    if len(scores) <= step:  # without a number of rows, so that exported programs take any
        found = not_above(scores, own)
    else:
        found = torch.cat([not_above(*part) for part in zip(scores.split(step), own.split(step))])
    return (1 + found).double() / (1 + count)


def crossed(each: Tensor, counts: Tensor) -> Tensor:
    """Return cross-conformal p-values, (B,), of those among the examples of each fold, (folds, B).

    The ranks of an input among ``counts`` examples are added: P(p <= rate) <= 2 rate + 2 folds / N.
    """
    counts = counts.to(each.device)
    above = each * (1 + counts)[:, None] - 1
    return (1 + above.sum(0)) / (1 + counts.sum())


def quantiles(errors: Tensor, level: float) -> Tensor:
    """Return the conformal quantile of each column of sorted errors, (outputs,)."""
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, not {level}.")
    require(len(errors), ceil(level / (1 - level) - ROUNDING), f"level={level}")
    return errors[ceil((len(errors) + 1) * level - ROUNDING) - 1]


def require(count: int, needed: int, asked: str) -> None:
    if count < needed:
        raise ValueError(
            f"{asked} needs at least {needed} reference examples, and there are {count}. Half of the "
            f"validation set is used as reference: calibrate with {2 * needed} examples or more "
            "(student.calibrate and LaplaceEnsemble.from_folds use all of them)."
        )


def mass_above(probs: Tensor, room: float) -> Tensor:
    """Return, for each class, the probability of all classes that are more probable, (B, C).

    Probabilities up to a factor of 1 + ``room`` are equal. Each is sorted among all of them by its
    product with this factor, which has no mass of its own.
    """
    probs = probs.double()
    mass = torch.cat([torch.zeros_like(probs), probs], 1)
    places = torch.cat([probs * (1 + room), probs], 1)
    order = places.sort(dim=1, descending=True, stable=True).indices
    mass_in_order = mass.gather(1, order)
    above = torch.zeros_like(mass).scatter(1, order, mass_in_order.cumsum(1) - mass_in_order)
    return above[:, : probs.shape[1]]
