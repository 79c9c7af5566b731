"""The values that arguments of public methods may have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from math import inf
from numbers import Integral, Real
from os import PathLike
from typing import Any, NamedTuple

import torch

from torch_lla_em.runtime.compute import Compute

# outside of these bounds, the prior precision or its inverse is 0 or infinite in float32
_PRECISIONS = 1e-20, 1e20


class _Rule(NamedTuple):
    words: str
    """What the argument must be, for the error message."""

    has_type: Callable[[Any], bool]
    holds: Callable[[Any], bool] = lambda value: True


def check_options(**given: Any) -> None:
    """Raise a TypeError or ValueError for the first argument whose value is not allowed."""
    for name, value in given.items():
        words, has_type, holds = _RULES[name]
        if not has_type(value):
            raise TypeError(f"{name} must be {words}, not {_shown(value)}.")
        if not holds(value):
            raise ValueError(f"{name} must be {words}, not {_shown(value)}.")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    """Whether this is a real number, or real numbers that ``torch.as_tensor`` accepts."""
    try:
        tensor = torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        return False
    return not tensor.is_complex() and tensor.dtype != torch.bool


def _within(value: Any, low: float, high: float) -> bool:
    numbers = torch.as_tensor(value, dtype=torch.float64, device="cpu")
    return bool(((numbers >= low) & (numbers <= high)).all())


def _is_finite_positive(value: Any) -> bool:
    return _within(value, 5e-324, 1.7e308)


def _or_none(has_type: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or has_type(value)


def _is_selection(value: Any) -> bool:
    listed = isinstance(value, (list, tuple, set, frozenset))
    return isinstance(value, str) or callable(value) or (listed and all(_are_words(value)))


def _are_words(values: Any) -> list[bool]:
    return [isinstance(value, str) for value in values]


def _draws_samples(value: Any) -> bool:
    own = is_dataclass(value) and not isinstance(value, type)
    return own and callable(getattr(value, "solve", None))


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


_FUNCTION = _or_none(callable)

_RULES = {
    "num_samples": _Rule("a whole number of 1 or more", _is_integer, lambda value: value >= 1),
    "tolerance": _Rule(
        "a number above 0, or None", _or_none(_is_number), lambda value: value is None or value > 0
    ),
    "g_prior": _Rule(
        'None, True, False, "root", "half" or "tensor"',
        lambda value: value is None or isinstance(value, (bool, str)),
        lambda value: not isinstance(value, str) or value in ("root", "half", "tensor"),
    ),
    "parameters": _Rule(
        'None, "last_layer", a pattern of parameter names, a list of them (names from '
        "model.named_parameters()), or a function (name, parameter) -> bool",
        _or_none(_is_selection),
    ),
    "sigma_noise": _Rule(
        "None, a positive real number, or a tensor with one per output",
        _or_none(_is_real),
        lambda value: value is None or _is_finite_positive(value),
    ),
    "solver": _Rule(
        "None, BlockKrylov(), BlockCG(), FunctionSpace() or SGD() (an object, not its class or name)",
        _or_none(_draws_samples),
    ),
    "class_dim": _Rule("a whole number: the axis of the outputs that classes are on", _is_integer),
    "forward_fn": _Rule("None, or a function (model, inputs) -> outputs", _FUNCTION),
    "target_fn": _Rule("None, or a function batch -> targets", _FUNCTION),
    "seed": _Rule("a whole number", _is_integer),
    "temperature": _Rule("a positive number", _is_number, lambda value: 0 < value < inf),
    "compute": _Rule(
        'a Compute object, as Compute(precision="tf32")', lambda value: isinstance(value, Compute)
    ),
    "em_steps": _Rule("a whole number of 0 or more", _is_integer, lambda value: value >= 0),
    "prior_precision": _Rule(
        "None, or a positive number from {:g} to {:g} (a tensor with one per parameter tensor where "
        'prior="layerwise")'.format(*_PRECISIONS),
        _or_none(_is_real),
        lambda value: value is None or _within(value, *_PRECISIONS),
    ),
    "override": _Rule("True or False", _is_bool),
    "progress_bar": _Rule("True or False", _is_bool),
    "checkpoint": _Rule(
        "None, or the name of a folder", _or_none(lambda value: isinstance(value, (str, PathLike)))
    ),
    "together": _Rule("a whole number of 1 or more", _is_integer, lambda value: value >= 1),
    "precisions": _Rule(
        "a list of one or more positive numbers",
        lambda value: _is_real(value) and torch.as_tensor(value, device="cpu").dim() == 1,
        lambda value: len(value) > 0 and _is_finite_positive(value),
    ),
}
