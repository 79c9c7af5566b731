"""Unlabelled inputs: gathered from what a user passes, and more of them made from those."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from torch_lla_em.data import (
    inputs_in_order,
    inputs_of,
    map_tensors,
    merged,
    tensors_in,
    to_device,
    unlabelled,
)
from torch_lla_em.runtime import check_choice

Way = str | Callable[[Any], Any]

BATCH = 256
"""Inputs in each step, and predicted or made at once. Half and 1.5 times as many change the KL of
tables by a fifth at most."""


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


def rows_of(tree: Any, rows: Tensor | slice) -> Any:
    """Return some examples of a tree of tensors."""
    return map_tensors(lambda tensor: tensor[rows], tree)


def pieces(tree: Any) -> Iterator[Any]:
    """Yield a few examples at a time."""
    for start in range(0, number_of(tree), BATCH):
        yield rows_of(tree, slice(start, start + BATCH))


def chosen_ways(x: Any, augment: Way | Sequence[Way] | None) -> tuple[Way, ...]:
    """Return the ways in which inputs are made: those asked for, or the default for their types."""
    if augment is None:
        augment = ("noise", "swap") if any(map(torch.is_floating_point, tensors_in(x))) else "swap"
    ways = tuple(augment) if isinstance(augment, (list, tuple)) else (augment,)
    for way in ways:
        if not callable(way):
            check_choice("augment", way, ("noise", "swap"))
    return ways


def augmented(x: Any, count: int, ways: Sequence[Way], generator: torch.Generator) -> Iterator[Any]:
    """Yield ``count`` inputs altogether, made from examples of x, in turns by each way."""
    noisy, swapped = (partial(change, generator=generator) for change in (_noisy, _swapped))
    spreads = map_tensors(_spread, x)
    rows = torch.randint(number_of(x), (2, count), generator=generator, device="cpu")
    for way, own in zip(ways, rows.tensor_split(len(ways), 1), strict=True):
        for some, others in zip(*(numbers.split(BATCH) for numbers in own), strict=True):
            given = rows_of(x, some)
            if callable(way):
                yield way(given)
            elif way == "noise":
                yield map_tensors(noisy, given, spreads)
            else:
                yield map_tensors(swapped, given, rows_of(x, others))


def _spread(t: Tensor) -> Tensor | None:
    """Return the standard deviation of each column of a table, or of all other real numbers
    together."""
    if not t.is_floating_point():
        return None
    return t.std(0) if t.dim() == 2 and len(t) > 1 else t.std()


def _noisy(t: Tensor, spread: Tensor | None, generator: torch.Generator) -> Tensor:
    """Add noise of up to two standard deviations to real numbers."""
    if spread is None:
        return t
    noise = torch.randn(t.shape, generator=generator, device="cpu") * _sizes(t, generator)
    return t + 2 * spread * noise.to(t)


def _swapped(t: Tensor, other: Tensor, generator: torch.Generator) -> Tensor:
    """Replace a random share of the entries of each example by those of another one.

    Half of the examples with real numbers are mixed with the other one instead. Masks and segments,
    which are 0 or 1, are not changed.
    """
    size = _sizes(t, generator)
    chosen = torch.rand(t.shape, generator=generator, device="cpu") < size
    if t.is_floating_point():
        share = torch.where(_sizes(t, generator) < 0.5, size, chosen.to(size.dtype))
        return t.lerp(other, share.to(t))
    are_tokens = not t.is_complex() and t.dtype != torch.bool and t.numel() and int(t.max()) > 1
    return torch.where(chosen.to(t.device), other, t) if are_tokens else t


def _sizes(t: Tensor, generator: torch.Generator) -> Tensor:
    """Return a random number between 0 and 1 for each example."""
    return torch.rand(len(t), *(1,) * (t.dim() - 1), generator=generator, device="cpu")
