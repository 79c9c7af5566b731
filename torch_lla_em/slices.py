"""Vectors whose entries lie on several ranks: a sum over entries is then a sum over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from torch_lla_em.group import Group

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


def stacked_qr(q: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Return the QR factors of a matrix whose rows lie on several ranks, of those of its parts.

    ``q`` (P / R, m) is this rank's rows, ``r`` (m, m) the same on every rank.
    """
    group = _group.get()
    if group.size == 1:
        return q, r
    columns = r.shape[1]
    square = r.new_zeros(columns, columns)
    square[: len(r)] = r
    below, r = torch.linalg.qr(group.gather(square))
    own = below[group.rank * columns : group.rank * columns + q.shape[1]]
    return q @ own, r
