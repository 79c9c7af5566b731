"""Loaders of every kind over the examples of a tiny problem."""

import torch
from tiny import Tiny, batched
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

CUTS = 4, 11, 13, 20


def batches(case: Tiny):
    """Five uneven batches."""
    return batched(CUTS, case.x, case.y)


def in_one_batch(case: Tiny):
    return [(case.x, case.y)]


def in_order(case: Tiny):
    return DataLoader(TensorDataset(case.x, case.y), batch_size=7)


def shuffled(case: Tiny):
    generator = torch.Generator().manual_seed(3)
    return DataLoader(TensorDataset(case.x, case.y), 7, shuffle=True, generator=generator)


def streamed(case: Tiny):
    return DataLoader(Stream(case), batch_size=7)


class Stream(IterableDataset):
    def __init__(self, case: Tiny):
        self.case = case

    def __iter__(self):
        return iter(zip(self.case.x, self.case.y, strict=True))


class InAnyOrder:
    """Batches whose examples are drawn anew at every pass, which no sampler says."""

    def __init__(self, case: Tiny, size: int = 7):
        self.case, self.size = case, size
        self.generator = torch.Generator().manual_seed(0)

    def __iter__(self):
        for rows in torch.randperm(len(self.case.x), generator=self.generator).split(self.size):
            yield self.case.x[rows], self.case.y[rows]


class Loader:
    """Batches that cannot be listed; ``act(number)`` is called in the middle of each pass."""

    def __init__(self, batches, act=lambda number: None):
        self.batches, self.act, self.passes = batches, act, 0

    def __iter__(self):
        self.passes += 1
        first, *others = self.batches
        yield first
        self.act(self.passes)
        yield from others
