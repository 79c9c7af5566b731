"""Further inputs made from given ones, near the data and away from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import pi
from types import NoneType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_lla_em.data import map_tensors, tensors_in
from torch_lla_em.distil.inputs import number_of, rows_of
from torch_lla_em.runtime import check_choice

Widen = Callable[[Any], Any]
Change = Callable[[Tensor, Tensor, torch.Generator], Tensor]

# number of examples that are made at once
_AT_ONCE = 250
# largest noise, in standard deviations
_NOISE = 2.0
# largest shift of an image, in heights and widths
_SHIFT = 0.25


def widened(
    x: Any, count: int, ways: Sequence[str | Widen], generator: torch.Generator
) -> Iterator[Any]:
    """Yield batches of ``count`` inputs altogether, made from the examples of x in turns.

    A way is a name of ``WAYS``, or a function of inputs.
    """
    rows = number_of(x)
    for number, way in enumerate(ways):
        left = count // len(ways) + (number < count % len(ways))
        while left > 0:
            n = min(left, _AT_ONCE)
            some, others = (
                rows_of(x, torch.randint(rows, (n,), generator=generator, device="cpu"))
                for _ in range(2)
            )
            yield way(some) if callable(way) else _changed(WAYS[way], x, some, others, generator)
            left -= n


def chosen_ways(
    x: Any, augment: str | Sequence[str] | None, mask_token: int | None, widen: Widen | None
) -> tuple[str | Widen, ...]:
    """Return the ways in which inputs are changed: those asked for, or the default for their types."""
    if not isinstance(augment, (str, list, tuple, NoneType)):
        raise TypeError(
            f"augment must be a name or a list of names of ways to make inputs, not {augment!r}."
        )
    ways: tuple[str | Widen, ...] = (augment,) if isinstance(augment, str) else tuple(augment or ())
    for way in ways:
        check_choice("augment", way, tuple(WAYS))
    if augment is None:
        ways = ("noise", "mixture", "swap") if any(map(_is_real, tensors_in(x))) else ()
        if any(map(_is_tokens, tensors_in(x))):
            ways += ("swap",) * (not ways) + ("replace",)
    if mask_token is not None:
        ways += (masked(mask_token),)
    return ways if widen is None else (*ways, _checked(widen))


def _checked(widen: Widen) -> Widen:
    def change(x: Any) -> Any:
        found = widen(x)
        if number_of(found) != number_of(x):
            raise ValueError(
                f"widen returned {number_of(found)} inputs for {number_of(x)}: return one for each."
            )
        return found

    return change


def masked(token: int) -> Widen:
    """Return a function that replaces a random share of tokens by a mask."""

    def change(x: Any) -> Any:
        tokens = next(filter(_is_tokens, tensors_in(x)), None)
        if tokens is None:
            raise ValueError("mask_token needs inputs that are token indices, of an integer dtype.")
        generator = torch.Generator("cpu").manual_seed(int(tokens.sum()) % 2**31)

        def hide(t: Tensor) -> Tensor:
            return t.masked_fill(_chosen(t, generator), token) if _is_tokens(t) else t

        return map_tensors(hide, x)

    return change


def _changed(change: Change, x: Any, some: Any, others: Any, generator: torch.Generator) -> Any:
    partners, every = iter(tensors_in(others)), iter(tensors_in(x))

    def one(t: Tensor) -> Tensor:
        partner, data = next(partners), next(every)
        if change in _OF_TOKENS and _is_tokens(t):
            # other tokens of the data, from any place
            return change(
                t, _drawn(data, t, generator) if change is _replaced else partner, generator
            )
        if change is _replaced or not _is_real(t):
            return t
        return change(t, _spread(data) if change is _noisy else partner, generator)

    return map_tensors(one, some)


def _is_real(t: Tensor) -> bool:
    return t.is_floating_point()


def _is_tokens(t: Tensor) -> bool:
    """Whether these are indices of tokens; masks and segments, which are 0 or 1, are not changed."""
    is_integer = not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)
    return is_integer and t.numel() > 0 and int(t.max()) > 1


def _spread(x: Tensor) -> Tensor:
    """Return the standard deviation of each column of a table, or of all other entries together."""
    return x.std(0) if x.dim() == 2 and len(x) > 1 else x.std()


def _drawn(data: Tensor, like: Tensor, generator: torch.Generator) -> Tensor:
    at = torch.randint(data.numel(), like.shape, generator=generator, device="cpu")
    return data.flatten()[at.to(data.device)]


def _size(t: Tensor, generator: torch.Generator) -> Tensor:
    """Return a random number between 0 and 1 for each example."""
    sizes = torch.rand(len(t), *(1,) * (t.dim() - 1), generator=generator, device="cpu")
    return sizes.to(t.device, t.dtype if t.is_floating_point() else torch.float32)


def _chosen(t: Tensor, generator: torch.Generator) -> Tensor:
    """Return which entries change, a random share of each example."""
    return torch.rand(t.shape, generator=generator, device="cpu").to(t.device) < _size(t, generator)


def _noisy(t: Tensor, spread: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(t.shape, generator=generator, device="cpu").to(t)
    return t + _NOISE * noise * spread * _size(t, generator)


def _mixed(t: Tensor, other: Tensor, generator: torch.Generator) -> Tensor:
    return t + (other - t) * _size(t, generator)


def _swapped(t: Tensor, other: Tensor, generator: torch.Generator) -> Tensor:
    return torch.where(_chosen(t, generator), other, t)


def _replaced(t: Tensor, tokens: Tensor, generator: torch.Generator) -> Tensor:
    return torch.where(_chosen(t, generator), tokens, t)


def _shifted(t: Tensor, other: Tensor, generator: torch.Generator) -> Tensor:
    shift = (2 * torch.rand(len(t), 2, 1, generator=generator, device="cpu") - 1) * 2 * _SHIFT
    return _moved(t, torch.cat([torch.eye(2, device="cpu").expand(len(t), 2, 2), shift], 2))


def _rotated(t: Tensor, other: Tensor, generator: torch.Generator) -> Tensor:
    angle = 2 * pi * torch.rand(len(t), generator=generator, device="cpu")
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    return _moved(t, torch.stack([cos, -sin, zero, sin, cos, zero], 1).view(-1, 2, 3))


def _flipped(t: Tensor, other: Tensor, generator: torch.Generator) -> Tensor:
    return _images(t).flip(-1)


def _moved(t: Tensor, theta: Tensor) -> Tensor:
    """Apply an affine map to each image; what comes from outside of it is 0."""
    grid = F.affine_grid(theta.to(t), list(_images(t).shape), align_corners=False)
    return F.grid_sample(t, grid, align_corners=False)


def _images(t: Tensor) -> Tensor:
    if t.dim() != 4:
        raise ValueError(
            '"shift", "rotation" and "flip" are for images of shape (B, C, H, W), but the inputs '
            f"have shape {tuple(t.shape)}. Leave them out of augment, or leave augment out, for ways that fit "
            "the inputs."
        )
    return t


WAYS: dict[str, Change] = {
    "noise": _noisy,
    "mixture": _mixed,
    "swap": _swapped,
    "replace": _replaced,
    "shift": _shifted,
    "rotation": _rotated,
    "flip": _flipped,
}
"""How inputs are changed, by name."""

_OF_TOKENS = _swapped, _replaced
