"""A test of whether one observation noise for all inputs is right: residuals' sizes must not depend on the inputs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.prediction.arrays import ROUNDING

_PERMUTATIONS, _MOST = 999, 2_000
"""Permutations, and most examples of the test."""


class ResidualSize(NamedTuple):
    """How the size of residuals depends on the inputs."""

    p_value: float
    """That of a permutation test: if sizes do not depend on the inputs, P(p_value <= rate) <= rate for every rate."""

    most: str
    """What sizes depend on most: the predicted mean, a column of the inputs, or its distance from the median."""

    correlation: float
    """The rank correlation of sizes with that."""


def residual_size(sizes: Tensor, columns: dict[str, Tensor]) -> ResidualSize:
    """Test whether sizes of residuals, (n, outputs), depend on columns, (n,), by their largest rank correlation.

    All columns are tested together: the largest correlation is compared with the largest of each permutation.
    """
    names = list(columns)
    rows = slice(None, None, -(-len(sizes) // _MOST))
    given = _ranks(torch.stack(list(columns.values()), 1)[rows])
    # noise can be large at both ends of a column
    known = _standardised(torch.cat([given, _ranks((given - given.mean(0)).abs())], 1)).T
    own = _standardised(_ranks(sizes[rows]))
    generator = torch.Generator("cpu").manual_seed(0)
    shape = _PERMUTATIONS, own.shape[0]
    orders = torch.rand(shape, generator=generator, device="cpu").argsort(1).to(own.device)
    found = known @ own
    largest = torch.stack([(known @ own[order]).abs().amax() for order in orders])
    reached = (largest >= found.abs().amax() - ROUNDING).sum().item()
    row, output = divmod(int(found.abs().argmax()), found.shape[1])
    name = names[row % len(names)]
    name = name if row < len(names) else f"the distance of {name} from its median"
    return ResidualSize((1 + reached) / (1 + _PERMUTATIONS), name, found[row, output].item())


def _ranks(values: Tensor) -> Tensor:
    """Return the ranks within each column, (n, columns), ties in the middle."""
    columns = values.T.double().contiguous()
    ordered = columns.sort().values
    places = (torch.searchsorted(ordered, columns, right=right) for right in (False, True))
    return torch.stack(list(places)).double().mean(0).T


def _standardised(ranks: Tensor) -> Tensor:
    """Return columns with mean 0 and norm 1; those of equal values are 0."""
    centred = ranks - ranks.mean(0)
    return centred / centred.norm(dim=0).clamp_min(ROUNDING)
