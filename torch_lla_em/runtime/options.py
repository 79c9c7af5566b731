"""Options of public methods, and the values that they may have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from math import inf
from numbers import Integral, Real
from os import PathLike
from typing import Any, Literal, NamedTuple

import torch

# outside of these bounds, the prior precision or its inverse is 0 or infinite in float32
PRECISION_BOUNDS = 1e-20, 1e20


@dataclass(frozen=True)
class Compute:
    """Precision and memory of a fit. The defaults choose what fits into memory.

    Example:
        >>> la = LinearisedLaplace(model, "classification", compute=Compute(vectors="cpu"))
    """

    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    """Precision of matrix products inside the network: "float32" (default: the dtype of the model),
    "tf32" on CUDA, or "bfloat16" by autocast. The error of the products is measured on the first
    batch and logged. Solvers always use float32 or higher."""

    vectors: Literal["auto", "device", "cpu"] = "auto"
    """Where samples and directions are stored: on the model's "device", or on the "cpu", from which
    a few at a time are copied to the device. Default "auto": on the device if they fit."""

    columns: int | None = None
    """Largest number of columns that are multiplied at once. Default None: as many as fit."""

    rows: int | None = None
    """Largest number of examples that are processed at once. Default None: as many as fit."""

    keep_data: bool = True
    """Whether to join small batches, and to keep the batches on the device if they fit into a quarter
    of its memory. Default True. False takes the batches from the loader in every pass."""

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, ("float32", "tf32", "bfloat16"))
        check_choice("vectors", self.vectors, ("auto", "device", "cpu"))
        check_options(columns=self.columns, rows=self.rows)


class _Rule(NamedTuple):
    words: str
    """What the argument must be, for the error message."""

    has_type: Callable[[Any], bool]
    holds: Callable[[Any], bool] = lambda value: True


def check_choice(name: str, value: object, choices: tuple[str | None, ...]) -> None:
    """Raise an error if a value is not among the choices."""
    if value not in choices:
        expected = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name}={value!r} is not known: choose one of {expected}.")


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


def _is_selection(value: Any) -> bool:
    listed = isinstance(value, (list, tuple, set, frozenset))
    return (
        isinstance(value, str)
        or callable(value)
        or (listed and all(isinstance(pattern, str) for pattern in value))
    )


def _draws_samples(value: Any) -> bool:
    own = is_dataclass(value) and not isinstance(value, type)
    return own and callable(getattr(value, "solve", None))


def _optional(
    words: str, has_type: Callable[[Any], bool], holds: Callable[[Any], bool] = lambda value: True
) -> _Rule:
    """Return a rule for an argument that may also be None."""
    return _Rule(
        f"None, or {words}",
        lambda value: value is None or has_type(value),
        lambda value: value is None or holds(value),
    )


_WHOLE = "a whole number of 1 or more", _is_integer, lambda value: value >= 1
_FLAG = _Rule("True or False", lambda value: isinstance(value, bool))

_RULES = {
    "num_samples": _Rule(*_WHOLE),
    "tolerance": _optional("a number above 0", _is_number, lambda value: value > 0),
    "g_prior": _optional(
        'True, False, "root", "half" or "tensor"',
        lambda value: isinstance(value, (bool, str)),
        lambda value: value in (True, False, "root", "half", "tensor"),
    ),
    "parameters": _optional(
        '"last_layer", a pattern of parameter names, a list of them (names from '
        "model.named_parameters()), or a function (name, parameter) -> bool",
        _is_selection,
    ),
    "sigma_noise": _optional(
        "a positive real number, or a tensor with one per output", _is_real, _is_finite_positive
    ),
    "solver": _optional(
        "BlockKrylov(), BlockCG(), FunctionSpace() or SGD() (an object, not its class or name)",
        _draws_samples,
    ),
    "class_dim": _Rule("a whole number: the axis of the outputs that classes are on", _is_integer),
    "forward_fn": _optional("a function (model, inputs) -> outputs", callable),
    "target_fn": _optional("a function batch -> targets", callable),
    "seed": _Rule("a whole number", _is_integer),
    "temperature": _Rule("a positive number", _is_number, lambda value: 0 < value < inf),
    "compute": _Rule(
        'a Compute object, as Compute(precision="tf32")', lambda value: isinstance(value, Compute)
    ),
    "columns": _optional(*_WHOLE),
    "rows": _optional(*_WHOLE),
    "em_steps": _Rule("a whole number of 0 or more", _is_integer, lambda value: value >= 0),
    "prior_precision": _optional(
        "a positive number from {:g} to {:g} (a tensor with one per parameter tensor where "
        'prior="layerwise")'.format(*PRECISION_BOUNDS),
        _is_real,
        lambda value: _within(value, *PRECISION_BOUNDS),
    ),
    "progress_bar": _FLAG,
    "budget": _optional("a number of seconds above 0", _is_number, lambda value: value > 0),
    "checkpoint": _optional(
        "the name of a folder", lambda value: isinstance(value, (str, PathLike))
    ),
    "together": _Rule(*_WHOLE),
    "steps": _Rule(*_WHOLE),
    "batch_size": _Rule(*_WHOLE),
    "num_inputs": _optional(*_WHOLE),
    "lr": _optional("a number above 0", _is_number, lambda value: value > 0),
}
