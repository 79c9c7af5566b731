"""A test of whether one noise for all inputs is right, by the sizes of residuals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.prediction.conformal import ROUNDING

_PERMUTATIONS, _MOST = 999, 2_000
"""Number of permutations, and largest number of examples of the test."""


class ResidualSize(NamedTuple):
    """How the size of residuals depends on the inputs."""

    p_value: float
    """The p-value of a permutation test: P(p_value <= rate) <= rate for every rate if sizes do not
    depend on the inputs."""

    most: str
    """The quantity on which sizes depend most: the predicted mean, a column of the inputs, or the
    distance of one of these from its median."""

    correlation: float
    """The correlation of the ranks of this quantity with the half-normal scores of sizes."""


def residual_size(sizes: Tensor, families: Sequence[dict[str, Tensor]]) -> ResidualSize:
    """Test whether sizes of residuals, (n, outputs), depend on the columns, (n,), of families.

    The largest correlation within a family is compared with the largest one after each permutation
    of the examples; the smallest p-value is multiplied by the number of families (Bonferroni).
    """
    rows = slice(None, None, -(-len(sizes) // _MOST))
    ranks = _ranks(sizes[rows])
    # scores of normal residuals are more powerful than ranks, and as robust
    scores = _standardised(torch.erfinv(ranks))
    generator = torch.Generator("cpu").manual_seed(0)
    shape = _PERMUTATIONS, len(scores)
    orders = torch.rand(shape, generator=generator, device="cpu").argsort(1).to(scores.device)
    each = [_of_family(scores, orders, columns, rows) for columns in families if columns]
    least = min(each, key=lambda found: (found.p_value, -abs(found.correlation)))
    return least._replace(p_value=min(1.0, len(each) * least.p_value))


def _of_family(
    scores: Tensor, orders: Tensor, columns: dict[str, Tensor], rows: slice
) -> ResidualSize:
    """Return the result of one family of columns."""
    names = list(columns)
    given = _ranks(torch.stack(list(columns.values()), 1)[rows])
    # noise can be large at both ends of a column
    known = _standardised(torch.cat([given, _ranks((given - given.mean(0)).abs())], 1)).T
    found = known @ scores
    largest = torch.stack([(known @ scores[order]).abs().amax() for order in orders])
    reached = (largest >= found.abs().amax() - ROUNDING).sum().item()
    row, output = divmod(int(found.abs().argmax()), found.shape[1])
    name = names[row % len(names)]
    name = name if row < len(names) else f"the distance of {name} from its median"
    return ResidualSize((1 + reached) / (1 + len(orders)), name, found[row, output].item())


def _ranks(values: Tensor) -> Tensor:
    """Return the ranks within each column, (n, columns), between 0 and 1, ties in the middle."""
    columns = values.T.double().contiguous()
    ordered = columns.sort().values
    places = (torch.searchsorted(ordered, columns, right=right) for right in (False, True))
    return torch.stack(list(places)).double().mean(0).T / len(values)


def _standardised(ranks: Tensor) -> Tensor:
    """Return columns with mean 0 and norm 1; those of equal values are 0."""
    centred = ranks - ranks.mean(0)
    standardised: Tensor = centred / centred.norm(dim=0).clamp_min(ROUNDING)
    return standardised
