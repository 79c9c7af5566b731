"""Unlabelled inputs: gathered from what a user passes, split, and cut into pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from torch_lla_em.data import (
    TargetFn,
    as_loader,
    as_targets,
    default_targets,
    inputs_of,
    map_tensors,
    tensors_in,
    to_device,
)

# share of inputs that measure the error of a student, and the largest number
_HELD_OUT, _MOST_HELD_OUT = 0.1, 1000
# smallest number of inputs that can be split
_FEWEST = 10
# number of examples that are predicted at once
_AT_ONCE = 250


def gathered(inputs: Any, targets: Any, device: torch.device) -> list[Any]:
    """Return inputs on a device, as few trees as possible: one for each shape of examples.

    Targets are not used, but there must be one for each example.
    """
    if inputs is None:
        raise ValueError(
            "distil needs inputs, because the posterior does not keep its training data. Pass "
            "unlabelled inputs, or the training data: la.distil(train_loader)."
        )
    if isinstance(inputs, Iterator):  # they are read once
        inputs = list(inputs)
    listed = isinstance(inputs, (DataLoader, Dataset, list))
    batches = map(inputs_of, as_loader(inputs)) if listed else [inputs]
    if isinstance(inputs, dict):
        batches = [inputs_of(inputs)]
    found = concatenated(to_device(batch, device) for batch in batches)
    count = sum(map(number_of, found))
    if targets is not None and len(as_targets(targets)) != count:
        raise ValueError(
            f"There are {count} inputs but {len(targets)} targets. distil needs inputs only: "
            "la.distil(x), and labelled data as validation=(x, y)."
        )
    if count < _FEWEST:
        raise ValueError(f"distil needs at least {_FEWEST} inputs, not {count}.")
    return found


def concatenated(trees: Iterable[Any]) -> list[Any]:
    """Concatenate trees of tensors that have the same shapes."""
    groups: dict[str, list[Any]] = {}
    for tree in trees:
        if number_of(tree):
            groups.setdefault(str([t.shape[1:] for t in tensors_in(tree)]), []).append(tree)
    return [_whole(group) for group in groups.values()]


def number_of(x: Any) -> int:
    """Return the number of examples of inputs; raise an error if they are not rows of tensors."""
    sizes = {len(tensor) if tensor.dim() else None for tensor in tensors_in(x)}
    if len(sizes) != 1 or None in sizes:
        raise TypeError(
            "Inputs for distillation must be tensors with one row per example, alone or in a tuple "
            f"or dict. These hold tensors with {sorted(map(str, sizes)) or 'no'} rows."
        )
    count: int = sizes.pop()
    return count


def rows_of(x: Any, rows: Tensor | slice) -> Any:
    """Return some examples of inputs."""
    if isinstance(rows, Tensor):
        return map_tensors(lambda tensor: tensor[rows.to(tensor.device)], x)
    return map_tensors(lambda tensor: tensor[rows], x)


def split(given: list[Any], generator: torch.Generator) -> tuple[list[Any], list[Any]]:
    """Return inputs to train on, and a random part that is held out."""
    total = sum(map(number_of, given))
    used: list[Any] = []
    held: list[Any] = []
    share = min(_HELD_OUT, _MOST_HELD_OUT / total)
    order = torch.randperm(total, generator=generator, device="cpu")
    is_held = torch.zeros(total, dtype=torch.bool, device="cpu")
    is_held[order[: max(2, round(share * total))]] = True
    for x in given:
        own, is_held = is_held[: number_of(x)], is_held[number_of(x) :]
        for part, mask in ((used, ~own), (held, own)):
            if mask.any():
                part.append(rows_of(x, mask.nonzero()[:, 0]))
    return used, held


def pieces(trees: Iterable[Any]) -> Iterator[Any]:
    """Yield a few examples of inputs at a time."""
    for x in trees:
        for start in range(0, number_of(x), _AT_ONCE):
            yield rows_of(x, slice(start, start + _AT_ONCE))


def labelled(loader: Any, target_fn: TargetFn | None) -> Iterator[tuple[Any, Tensor]]:
    """Yield inputs and targets of each batch."""
    for batch in as_loader(loader, target_fn):
        given = None if target_fn is None else target_fn(batch)
        targets = default_targets(batch) if given is None else given
        yield inputs_of(batch, given), as_targets(targets)


def _whole(trees: list[Any]) -> Any:
    if len(trees) == 1:
        return trees[0]
    every = iter([torch.cat(each) for each in zip(*map(tensors_in, trees))])
    return map_tensors(lambda _: next(every), trees[0])
