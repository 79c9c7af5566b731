"""The order that a loader's rows come in: torch's generators, whose states a checkpoint keeps."""

from __future__ import annotations

from typing import Any

import torch


def states(loader: Any) -> list[str]:
    """Return the state of every generator that the next pass may draw its order from."""
    return [g.get_state().numpy().tobytes().hex() for g in _generators(loader)]


def restore(loader: Any, known: list[str]) -> None:
    """Put the generators where they were, if there are as many as then."""
    generators = _generators(loader)
    if len(known) == len(generators):
        for generator, state in zip(generators, known):
            generator.set_state(torch.tensor(list(bytes.fromhex(state)), dtype=torch.uint8))


def _generators(loader: Any) -> list[torch.Generator]:
    """Return torch's own generator, and those of a loader and of its samplers."""
    found = {id(torch.default_generator): torch.default_generator}
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
