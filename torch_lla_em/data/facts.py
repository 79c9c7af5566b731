"""What the first pass over the data finds: the numbers of examples, targets, outputs and labels."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from torch_lla_em.runtime import Group


class Facts(NamedTuple):
    """What the first pass has found about the data of all ranks; 0 before it."""

    num_rows: int = 0
    """N, the number of examples."""

    num_targets: int = 0
    """Entries of all targets, N C where every output has one."""

    num_outputs: int = 0
    """Entries of all outputs of the network, N C."""

    num_labelled: int = 0
    """Number of examples with a label and a weight other than 0."""


class Tally:
    """Counts the outputs and labels of this rank's batches in the first pass."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[int, Tensor]] = {}

    def add(self, first: int, outputs: int, labelled: Tensor) -> None:
        """Note the outputs and the labelled examples, (), of a piece, by the number of its first example.

        A piece that is repeated is counted once. The tensor is read at the end of the pass.
        """
        self._counts[first] = outputs, labelled

    def of_all(self, group: Group) -> list[int]:
        """Return the outputs and the labelled examples of all ranks."""
        own = [int(sum(each)) for each in zip(*self._counts.values())] or [0, 0]
        return group.meet(own, _added)


def _added(every: list[list[int]]) -> list[int]:
    return [sum(each) for each in zip(*every)]
