"""Options of public methods, and the values that they may have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from numbers import Integral, Real
from os import PathLike
from typing import Any, Literal

import torch
from torch import Tensor, nn

# outside of these bounds, the prior precision or its inverse is 0 or infinite in float32
PRECISION_BOUNDS = 1e-20, 1e20


PRIORS: dict[str, tuple[bool, bool | None]] = {
    "scalar": (False, None),
    "g": (False, True),
    "isotropic": (False, False),
    "layerwise": (True, None),
    "layerwise g": (True, True),
    "layerwise isotropic": (True, False),
}
"""The priors by name: whether there is one λ per tensor, and the scaling, as ``get_sto_samples`` takes it."""


@dataclass(frozen=True)
class Adapter:
    """How a batch becomes outputs and targets, where ``model(inputs)`` and (inputs, targets) do not tell.

    Example:
        >>> la = LinearisedLaplace(model, "classification", adapter=Adapter(targets=lambda batch: batch["kind"]))
    """

    outputs: Callable[[nn.Module, Any], Tensor] | None = None
    """(model, inputs) -> outputs, one tensor. Default None: ``model(inputs)``."""

    targets: Callable[[Any], Tensor] | None = None
    """batch -> targets. Default None: the last entry of a tuple, or the "labels" of a dict."""

    def __post_init__(self) -> None:
        check_options(outputs=self.outputs, targets=self.targets)


@dataclass(frozen=True)
class Compute:
    """Accuracy, memory, time and processes of a fit. The defaults choose what fits into memory.

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

    span_memory: float | None = None
    """Largest size in bytes of the span of directions that a fit stores. Default None: half of the free
    memory of the device of the samples. A fit whose span does not fit continues with block CG."""

    keep_data: bool = True
    """Whether to join small batches, and to keep the batches on the device if they fit into a quarter
    of its memory. Default True. False takes the batches from the loader in every pass."""

    checkpoint: str | PathLike[str] | None = None
    """Folder to which the state is saved every few steps. If the process is killed, the same fit resumes from it.
    Default None."""

    budget: float | None = None
    """Seconds after which a fit ends with the posterior that it has reached, and a warning. With ``checkpoint``, the
    same fit goes on from there. Default None."""

    shard: Literal["data"] | None = "data"
    """How an initialised process group is used. "data" (default): ranks share the batches. None: every rank fits on
    its own."""

    solver: Any = None
    """``BlockCG()`` or ``SGD()``. Default None: a span of directions for one prior precision if memory allows, else
    an iterative solver."""

    tolerance: float | None = None
    """Numerical error of the samples in posterior standard deviations. Default None: a quarter of their Monte Carlo
    error, 0.03 for 32 samples."""

    def __post_init__(self) -> None:
        check_options(solver=self.solver, tolerance=self.tolerance)
        check_choice("shard", self.shard, ("data", None))
        check_options(checkpoint=self.checkpoint, budget=self.budget)
        check_choice("precision", self.precision, ("float32", "tf32", "bfloat16"))
        check_choice("vectors", self.vectors, ("auto", "device", "cpu"))
        check_options(columns=self.columns, rows=self.rows, span_memory=self.span_memory)


def check_choice(name: str, value: object, choices: tuple[str | None, ...]) -> None:
    """Raise an error if a value is not among the choices."""
    if value not in choices:
        expected = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name}={value!r} is not known: choose one of {expected}.")


def refuse_former(owner: str, given: dict[str, Any], former: dict[str, str]) -> None:
    """Raise an error for arguments that are not known, with what replaces those of earlier versions."""
    for name in given:
        if name not in former:
            raise TypeError(f"{owner}() got an unexpected keyword argument {name!r}")
        raise TypeError(f"{owner} has no argument {name!r} any more: {former[name]}.")


def check_options(**given: Any) -> None:
    """Raise a TypeError or ValueError for the first argument whose value is not allowed."""
    for name, value in given.items():
        words, has_type, *holds = _RULES[name]
        if value is None and words.startswith("None, or"):
            continue
        is_of_type = has_type(value)
        if not is_of_type or not all(rule(value) for rule in holds):
            text = repr(value) if len(repr(value)) <= 60 else f"a {type(value).__name__}"
            kind = ValueError if is_of_type else TypeError
            raise kind(f"{name} must be {words}, not {text}.")


def _is_whole(value: Any) -> bool:
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


def _within(low: float, high: float) -> Callable[[Any], bool]:
    def holds(value: Any) -> bool:
        numbers = torch.as_tensor(value, dtype=torch.float64, device="cpu")
        return bool(((numbers >= low) & (numbers <= high)).all())

    return holds


def _is_selection(value: Any) -> bool:
    listed = isinstance(value, (list, tuple, set, frozenset))
    names = value if listed else [value]
    return callable(value) or all(isinstance(name, str) for name in names)


def _draws_samples(value: Any) -> bool:
    own = is_dataclass(value) and not isinstance(value, type)
    return own and callable(getattr(value, "solve", None))


def _is_positive(value: Any) -> bool:
    return bool(value > 0)


_SELECTION = (
    '"last_layer", a pattern of parameter names, a list of them (names from '
    "model.named_parameters()), or a function (name, parameter) -> bool"
)
_PRECISION = (
    "None, or a positive number from {:g} to {:g} (a tensor with one per parameter tensor where "
    'prior="layerwise")'
)
_COUNT = "a whole number of 1 or more", _is_whole, _is_positive
_MAYBE_COUNT = "None, or a whole number of 1 or more", _is_whole, _is_positive
_MAYBE_POSITIVE = "None, or a number above 0", _is_number, _is_positive

_RULES: dict[str, tuple] = {
    **dict.fromkeys(("num_samples", "together", "steps", "batch_size"), _COUNT),
    **dict.fromkeys(("columns", "rows", "num_inputs"), _MAYBE_COUNT),
    **dict.fromkeys(("tolerance", "lr"), _MAYBE_POSITIVE),
    "span_memory": ("None, or a number of bytes above 0", _is_number, _is_positive),
    "budget": ("None, or a number of seconds above 0", _is_number, _is_positive),
    "em_steps": ("a whole number of 0 or more", _is_whole, lambda value: value >= 0),
    "seed": ("a whole number", _is_whole),
    "class_dim": ("a whole number: the axis of the outputs that classes are on", _is_whole),
    "progress_bar": ("True or False", lambda value: isinstance(value, bool)),
    "parameters": (f"None, or {_SELECTION}", _is_selection),
    "sigma_noise": (
        "None, or a positive real number, or a tensor with one per output",
        _is_real,
        _within(5e-324, 1.7e308),
    ),
    "prior_precision": (
        _PRECISION.format(*PRECISION_BOUNDS),
        _is_real,
        _within(*PRECISION_BOUNDS),
    ),
    "solver": (
        "None, or BlockCG() or SGD() (an object, not its class or name)",
        _draws_samples,
    ),
    "outputs": ("None, or a function (model, inputs) -> outputs", callable),
    "targets": ("None, or a function batch -> targets", callable),
    "adapter": (
        'an Adapter object, as Adapter(targets=lambda batch: batch["kind"])',
        lambda value: isinstance(value, Adapter),
    ),
    "compute": (
        'a Compute object, as Compute(precision="tf32")',
        lambda value: isinstance(value, Compute),
    ),
    "checkpoint": (
        "None, or the name of a folder",
        lambda value: isinstance(value, (str, PathLike)),
    ),
}
