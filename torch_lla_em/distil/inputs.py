"""Unlabelled inputs: gathered from what a user passes, and more of them made from those."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from torch_lla_em.data import (
    inputs_in_order,
    inputs_of,
    map_tensors,
    merged,
    rows_of,
    tensors_in,
    to_device,
    unlabelled,
)
from torch_lla_em.runtime import check_choice

Way = str | Callable[[Any], Any]

BATCH = 256
"""Number of inputs in each step, and of inputs that are predicted or made at once. Half or 1.5
times this number changes the KL of tables by a fifth at most."""

_FEW = 20
"""A column with at most this many values is a category, if there are ten examples of each value on
average. On two tables with only such columns, this reduces the KL of students to .7 of that with
noise in these columns."""


def gathered(inputs: Any, device: torch.device, num_inputs: int = 0) -> Any:
    """Return all inputs as one tree of tensors on a device; ``num_inputs`` is as in
    ``unlabelled``."""
    if isinstance(inputs, Iterator):  # it is read once
        inputs = list(inputs)
    batches: Iterable[Any] = [inputs_of(inputs) if isinstance(inputs, dict) else inputs]
    if isinstance(inputs, (DataLoader, Dataset, list)):
        batches = (unlabelled(batch, num_inputs) for batch in inputs_in_order(inputs))
    parts = [to_device(batch, device) for batch in batches]
    count = sum(map(number_of, parts))
    if count < 10:
        raise ValueError(f"distil needs at least 10 inputs, not {count}.")
    return merged(parts)


def number_of(x: Any) -> int:
    """Return the number of examples of inputs, which must be rows of tensors."""
    sizes = {len(tensor) if tensor.dim() else 0 for tensor in tensors_in(x)}
    if len(sizes) != 1:
        rows = f"have {sorted(sizes) or 'no'} rows, but must be tensors with one row per example"
        raise TypeError(f"Inputs of distil {rows}, alone or in a tuple or dict.")
    return sizes.pop()


def pieces(tree: Any) -> Iterator[Any]:
    """Yield a few examples at a time."""
    for start in range(0, number_of(tree), BATCH):
        yield rows_of(tree, slice(start, start + BATCH))


def chosen_ways(x: Any, augment: Way | Sequence[Way] | None) -> tuple[Way, ...]:
    """Return the ways in which inputs are made: those of ``augment``, or the default for the types
    of x."""
    if augment is None:
        augment = ("noise", "swap") if any(map(torch.is_floating_point, tensors_in(x))) else "swap"
    ways = tuple(augment) if isinstance(augment, (list, tuple)) else (augment,)
    for way in ways:
        if not callable(way):
            check_choice("augment", way, ("noise", "swap"))
    return ways


def augmented(x: Any, count: int, ways: Sequence[Way], generator: torch.Generator) -> Iterator[Any]:
    """Yield ``count`` inputs in total, made from examples of x by each way in turn."""
    forms = map_tensors(_Form.of, x)
    noisy, swapped = (partial(change, generator=generator) for change in (_noisy, _swapped))
    rows = torch.randint(number_of(x), (2, count), generator=generator, device="cpu")
    for way, own in zip(ways, rows.tensor_split(len(ways), 1), strict=True):
        for some, others in zip(*(numbers.split(BATCH) for numbers in own), strict=True):
            given = rows_of(x, some)
            if callable(way):
                yield way(given)
            else:
                change = noisy if way == "noise" else swapped
                yield map_tensors(change, given, rows_of(x, others), forms)


class _Form(NamedTuple):
    """Facts about the values of a tensor, which determine how it is changed."""

    spread: Tensor | None
    """The standard deviation of each column of a table, or of all values of another floating-point
    tensor; None for other tensors."""

    is_category: Tensor | None = None
    """Which columns of a table have few values, (D,); None for other tensors."""

    first: Tensor | None = None
    """For each column, the first column of the same one-hot category, or the column itself,
    (D,)."""

    @classmethod
    def of(cls, t: Tensor) -> _Form:
        """Return the form of all examples."""
        if not t.is_floating_point():
            return cls(None)
        if t.dim() != 2 or len(t) < 2:
            return cls(t.std())
        t = t.cpu()
        ordered = t.sort(0).values
        number = 1 + (ordered[1:] > ordered[:-1]).sum(0)
        few = (number <= _FEW) & (10 * number <= len(t))
        return cls(t.std(0), few, _one_hot((t == ordered[-1]) & (number == 2), few & (number <= 2)))

    def chosen(self, shape: torch.Size, size: Tensor, generator: torch.Generator) -> Tensor:
        """Return a mask of random entries of each example; columns of one category are chosen
        together."""
        chosen = torch.rand(shape, generator=generator, device="cpu") < size
        return chosen if self.first is None else chosen[:, self.first]


def _one_hot(is_one: Tensor, is_binary: Tensor) -> Tensor:
    """Return the first of neighbouring columns of which exactly one is 1 in every example, (D,)."""
    first = torch.arange(is_one.shape[1], device="cpu")
    start, total = 0, torch.zeros(len(is_one), dtype=torch.long, device="cpu")
    for column, ones in enumerate(is_one.T):
        total = total + ones
        while total.max() > 1:  # then the first column does not belong to the others
            total = total - is_one[:, start].long()
            start += 1
        is_whole = bool(is_binary[column] and total.min() == 1)
        if is_whole:
            first[start : column + 1] = start
        if is_whole or not is_binary[column]:
            start, total = column + 1, torch.zeros_like(total)
    return first


def _noisy(t: Tensor, other: Tensor, form: _Form, generator: torch.Generator) -> Tensor:
    """Add noise of up to two standard deviations to floating-point values. A random share of the
    categories is replaced by those of another example instead."""
    if form.spread is None:
        return t
    noise = torch.randn(t.shape, generator=generator, device="cpu") * _sizes(t, generator)
    made = t + 2 * form.spread.to(t) * noise.to(t)
    if form.is_category is None:
        return made
    chosen = form.chosen(t.shape, _sizes(t, generator), generator)
    swapped = torch.where(chosen.to(t.device), other, t)
    return torch.where(form.is_category.to(t.device), swapped, made)


def _swapped(t: Tensor, other: Tensor, form: _Form, generator: torch.Generator) -> Tensor:
    """Replace a random share of the entries of each example by those of another one.

    Half of the examples of floating-point tensors are mixed with the other example instead, except
    for their categories. Masks and segments, which are 0 or 1, are not changed.
    """
    size = _sizes(t, generator)
    chosen = form.chosen(t.shape, size, generator)
    if t.is_floating_point():
        is_mixed = _sizes(t, generator) < 0.5
        if form.is_category is not None:
            is_mixed = is_mixed & ~form.is_category
        return t.lerp(other, torch.where(is_mixed, size, chosen.to(size.dtype)).to(t))
    are_tokens = not t.is_complex() and t.dtype != torch.bool and t.numel() and int(t.max()) > 1
    return torch.where(chosen.to(t.device), other, t) if are_tokens else t


def _sizes(t: Tensor, generator: torch.Generator) -> Tensor:
    """Return a random number between 0 and 1 for each example."""
    return torch.rand(len(t), *(1,) * (t.dim() - 1), generator=generator, device="cpu")
