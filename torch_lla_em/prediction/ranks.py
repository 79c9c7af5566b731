"""Ranks of scores among reference scores, in which differences by rounding are ties."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

NUMBERS = 2**22
"""Numbers, of comparisons, of differences between examples, or of functions, that are held in memory at a time."""

_FIRST = 4.0
"""Weight of the first of three scores, where the others have the weight 1."""

ROUNDING = 1e-9
"""Scores below this are rounding errors of double precision, and products of a level and a count round in their last bit."""


def rounding(dtype: torch.dtype) -> float:
    """Return the relative difference up to which scores are ties, for predictions of a dtype.

    The products of a network differ by more than one unit in the last place between batches.
    """
    return float(torch.finfo(dtype).eps ** 0.5)


def infinite_if_nan(scores: Tensor) -> Tensor:
    """Return scores with infinity in place of NaN, so that such inputs are the most unusual."""
    return scores.masked_fill(scores.isnan(), torch.inf)


class Masses(NamedTuple):
    """The weights of reference examples, (n,), and of inputs, (B,) or (1,)."""

    reference: Tensor
    inputs: Tensor


def p_values(
    reference: Tensor,
    scores: Tensor,
    room: float | Tensor = 0.0,
    unit: float | Tensor = 0.0,
    masses: Masses | None = None,
) -> Tensor:
    """Return conformal p-values, (B,), of scores (B, S) among reference scores (n, S).

    The share of examples with at least the same score is taken for each score, and a mean of these
    shares is ranked (``combined``), among the reference examples and the input together. A score is
    at least as large as another one s if it exceeds s - ``room`` (s + ``unit``). All examples are treated
    alike, so the p-value is exact without ties, and conservative with them. With ``masses``, examples count
    by their weights.
    """
    reference, count = reference.to(scores.device), len(reference)
    if masses is None:
        weights, own = scores.new_ones(count).double(), scores.new_ones(1).double()
    else:
        weights, own = (part.to(scores.device, torch.float64) for part in masses)
    in_order, order = reference.sort(0)
    in_order = in_order.T.contiguous()
    # the weight of all examples from a place in this order on, (S, n + 1)
    above = torch.nn.functional.pad(weights[order].flip(0).cumsum(0).flip(0), (0, 0, 0, 1)).T

    def least(values: Tensor) -> Tensor:
        return values - room * (values + unit).nan_to_num(posinf=0.0, neginf=0.0)

    def mass_of(values: Tensor) -> Tensor:
        return above.gather(1, torch.searchsorted(in_order, least(values).T.contiguous())).T

    own = own.expand(len(scores))
    shares, total = own[:, None] + mass_of(scores), own + weights.sum()
    rank = combined(shares / total[:, None])
    theirs, bounds = mass_of(reference), least(reference)

    def not_above(some: Tensor, rank: Tensor, own: Tensor) -> Tensor:
        total = own[:, None, None] + weights.sum()
        found = combined((theirs + own[:, None, None] * (some[:, None] >= bounds)) / total)
        return found.le(rank[:, None] * (1 + ROUNDING)).double() @ weights

    step = max(1, NUMBERS // max(1, count))
    if len(scores) <= step:  # without a number of rows, so that exported programs take any
        found = not_above(scores, rank, own)
    else:
        parts = zip(*(part.split(step) for part in (scores, rank, own)))
        found = torch.cat([not_above(*part) for part in parts])
    return (own + found) / total


def combined(shares: Tensor) -> Tensor:
    """Return the weighted harmonic mean of shares in columns, up to a factor.

    It is small if one of them is, and smaller if all are. On six CNNs for digits, and six tables, the weights
    (2, 1, 1), (3, 1, 1) and (4, 1, 1) differ by up to 0.02 in the AUROC of any shift.
    """
    first, *others = shares.unbind(-1)
    total = (_FIRST if len(others) > 1 else 1) / first
    for share in others:
        total = total + 1 / share
    return 1 / total


def crossed(each: Tensor, counts: Tensor) -> Tensor:
    """Return cross-conformal p-values, (B,), of those among the examples of each fold, (folds, B).

    The ranks of an input among ``counts`` examples are added: P(p <= rate) <= 2 rate + 2 folds / N.
    """
    counts = counts.to(each.device)
    above = each * (1 + counts)[:, None] - 1
    return (1 + above.sum(0)) / (1 + counts.sum())


def quantiles(errors: Tensor, level: float, of: str = "") -> Tensor:
    """Return the conformal quantile of each column of sorted errors, (outputs,).

    ``of`` says in an error which part of the examples these are.
    """
    _require_enough(errors, level, of)
    return errors[ceil((len(errors) + 1) * level - ROUNDING) - 1]


def weighted_quantiles(errors: Tensor, level: float, masses: Masses, of: str = "") -> Tensor:
    """Return the weighted conformal quantiles of errors (n, outputs), (B or 1, outputs).

    The error of an input itself counts as infinity, and so the quantile is infinite if its weight is more
    than a share 1 - ``level`` of all weights.
    """
    _require_enough(errors, level, of)
    weights, own = (part.to(errors.device, torch.float64) for part in masses)
    in_order, order = errors.sort(0)
    sums = weights[order].cumsum(0).T.contiguous()
    needed = level * (weights.sum() + own) * (1 - ROUNDING)
    places = torch.searchsorted(sums, needed.expand(len(sums), -1).contiguous())
    padded = torch.nn.functional.pad(in_order, (0, 0, 0, 1), value=torch.inf)
    return padded.gather(0, places.T)


def _require_enough(errors: Tensor, level: float, of: str) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, not {level}.")
    require(len(errors), ceil(level / (1 - level) - ROUNDING), f"level={level}", of)


def require(count: int, needed: int, asked: str, of: str = "") -> None:
    """Raise an error if there are fewer reference examples, or of a part of them, than needed."""
    if count < needed:
        raise ValueError(
            f"{asked} needs at least {needed} reference examples{of}, and there are {count}: calibrate with "
            f"{2 * needed} examples{of}, half of which are the reference, or a student with {needed}."
        )


def mass_above(probs: Tensor, room: float | Tensor) -> Tensor:
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
