"""Vectors whose entries lie on several ranks: a sum over entries is then a sum over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from torch_lla_em.runtime import Group

_group: ContextVar[Group] = ContextVar("the ranks that hold slices", default=Group())


@contextmanager
def sliced_over(group: Group) -> Iterator[None]:
    """Let vectors be slices (..., P / R), of which each rank of the group holds its own."""
    token = _group.set(group)
    try:
        yield
    finally:
        _group.reset(token)


def over_slices(total: Tensor) -> Tensor:
    """Return a sum over all entries, of the sum over this rank's."""
    return _group.get().sum(total)


def largest_slice(size: float) -> float:
    """Return the largest of a number that every rank has of its own slice."""
    return _group.get().meet("the largest slice", size, max)


def stacked_qr(factors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the QR factors of matrices R (n, m) on top of each other, over all ranks.

    Of the first factor this rank gets its own rows.
    """
    group, own = _group.get(), torch.cat(factors)
    if group.size == 1:
        return (torch.eye(len(own)).to(own), own) if len(factors) == 1 else torch.linalg.qr(own)
    columns, below = own.shape[1], None
    if len(factors) > 1:
        below, own = torch.linalg.qr(own)
    square = own.new_zeros(columns, columns)
    square[: len(own)] = own
    every, r = torch.linalg.qr(group.gather(square))
    turn = every[group.rank * columns : group.rank * columns + len(own)]
    return turn if below is None else below @ turn, r
