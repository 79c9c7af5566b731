"""The examples of this rank among those of all ranks, and sums over all examples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_lla_em.runtime import Group


@dataclass(frozen=True)
class Share:
    """The n examples of this rank among the N of all ranks.

    A rank stores only its own rows of tensors with a row for each example. Sums over examples are
    added over ranks. Results that every rank computes in the same way are taken from rank 0,
    because rounding may differ.
    """

    numbers: Tensor
    """Numbers of this rank's examples, ascending, (n,), on the CPU."""

    total: int
    """N."""

    group: Group = Group()

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of every column over the examples of all ranks, (C,), for rows (m, C)
        with the same number of rows for each example."""
        weight = len(self.numbers) / max(1, self.total)
        return self.group.sum(weight * (values.sum(0) / max(1, len(values))))

    def gathered(self, values: Tensor) -> Tensor:
        """Return the rows of the examples of all ranks, (N, ...), in the order of their numbers."""
        order = self.group.gather(self.numbers.to(values.device)).argsort()
        return self.group.gather(values)[order]

    def rows_here(self, values: Tensor) -> Tensor:
        """Return this rank's rows, (n, ...), of a tensor from ``gathered``."""
        numbers = self.numbers.to(values.device)
        every = self.group.gather(numbers).sort()[0]
        return values[torch.searchsorted(every, numbers)]

    def find(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the places of this rank's examples among ``numbers``, and their rows here."""
        rows = torch.searchsorted(self.numbers, numbers)
        places = (rows < len(self.numbers)).nonzero()[:, 0]
        rows = rows[places]
        is_here = self.numbers[rows] == numbers[places]
        return places[is_here], rows[is_here]
