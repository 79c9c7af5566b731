"""What is gone over: loaders as people have them, and the order that their rows come in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, SequentialSampler

from torch_lla_em.data.batch import TargetFn

EMPTY = "The loader is empty: it yielded no rows."
OTHER_COUNT = (
    "The loader yielded {} rows in this pass but {} in the first. Every pass must see the same data: "
    "make the loader re-iterable and finite, or pass a list of its batches."
)
_ROWS_AT_ONCE = 100


class Chain:
    """Several loaders, one after the other, at every pass."""

    def __init__(self, loaders: Sequence[Iterable[Any]]):
        self.loaders = tuple(loaders)

    def __iter__(self) -> Iterator[Any]:
        for loader in self.loaders:
            yield from loader

    def __deepcopy__(self, memo: dict[int, Any]) -> Chain:
        return self

    def __reduce__(self) -> tuple[type[Chain], tuple[tuple[()]]]:
        """Leave the data out of pickles."""
        return Chain, ((),)


def as_loader(data: Any, target_fn: TargetFn | None = None) -> Iterable[Any]:
    """Return batches to go over again and again: ``data``, or made of (X, y) or a Dataset."""
    if isinstance(data, Iterator):
        raise ValueError(
            "The loader is a generator or an iterator, which is exhausted after one pass; "
            "fitting takes several. Pass a DataLoader, or a list of its batches."
        )
    if target_fn is None and (is_pair(data) or (isinstance(data, Mapping) and "labels" in data)):
        return [data]
    if isinstance(data, Dataset) and not isinstance(data, Iterable):
        return DataLoader(data, _ROWS_AT_ONCE)
    if not isinstance(data, Iterable):
        raise TypeError(
            f"The loader is a {type(data).__name__}, which cannot be iterated over: pass a "
            "DataLoader, or a list of batches, as [(X, y)]."
        )
    return data


def paired(data: Any, targets: Tensor | None) -> Any:
    """Return a loader as it is, or one of inputs and their targets."""
    return data if targets is None else [(data, targets)]


def is_pair(data: Any) -> bool:
    """Whether this is (X, y): without targets, no two tensors are batches."""
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        return False
    kinds = Tensor, np.ndarray
    arrays = all(isinstance(p, kinds) or hasattr(p, "to_numpy") for p in data)
    arrays = arrays and all(part.ndim for part in data)
    return arrays and len(data[0]) == len(data[1])


def states(loader: Any) -> list[str]:
    """Return the state of every generator that the next pass may draw its order from."""
    return [g.get_state().numpy().tobytes().hex() for g in _generators(loader)]


def restore(loader: Any, known: list[str]) -> None:
    """Put the generators where they were, if there are as many of the same kinds as then."""
    generators = _generators(loader)
    if [len(state) for state in known] == [len(state) for state in states(loader)]:
        for generator, state in zip(generators, known):
            generator.set_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))


def _generators(loader: Any) -> list[torch.Generator]:
    """Return torch's own generators, and those of a loader and of its samplers."""
    own = [torch.default_generator]
    device = torch.get_default_device()
    if device.type == "cuda":  # where samplers without a generator draw a seed
        here = torch.cuda.current_device() if device.index is None else device.index
        own.append(torch.cuda.default_generators[here])
    found = {id(generator): generator for generator in own}
    left, seen = [loader], set()
    while left:
        part = left.pop(0)
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
        left += [getattr(part, name, None) for name in ("batch_sampler", "sampler")]
        several = getattr(part, "loaders", ())
        left += several if isinstance(several, (list, tuple)) else ()
    return list(found.values())


def changes_of(loader: Any) -> str:
    """Return what is said where two passes over a loader disagree."""
    if _drops_random_rows(loader):
        return (
            "The loader shuffles and has drop_last=True, so every pass leaves out other rows. "
            "The posterior is that of fixed data: set drop_last=False."
        )
    return (
        "Two passes over the loader disagree: its data change from pass to pass, as under "
        "random augmentation. The posterior is that of fixed data: fit on a loader without "
        "augmentation."
    )


def _drops_random_rows(loader: Any) -> bool:
    if isinstance(loader, Chain):
        return any(map(_drops_random_rows, loader.loaders))
    if not isinstance(loader, DataLoader) or not loader.drop_last:
        return False
    try:
        drops = len(loader.dataset) % loader.batch_size != 0  # type: ignore[arg-type]
    except TypeError:  # an iterable dataset without a length
        return False
    return drops and not isinstance(loader.sampler, SequentialSampler)
