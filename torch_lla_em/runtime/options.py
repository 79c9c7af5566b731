"""Options of public methods, and checks of their values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from math import inf
from numbers import Integral, Real
from os import PathLike
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torch_lla_em.runtime.memory import suppressed

# outside of these bounds, the prior precision or its inverse is 0 or infinite in float32
PRECISION_BOUNDS = 1e-20, 1e20


PRIORS: dict[str, bool | None] = {"scalar": None, "g": True, "isotropic": False}
"""The scalings of the prior by name, with the value of ``g_prior`` in ``get_sto_samples``."""


@dataclass(frozen=True)
class Adapter:
    """How a batch becomes outputs and targets, if not by ``model(inputs)`` and (inputs, targets).

    Example:
        >>> adapter = Adapter(targets=lambda batch: batch["kind"])
        >>> la = LinearisedLaplace(model, "classification", adapter=adapter)
    """

    outputs: Callable[[nn.Module, Any], Tensor] | None = None
    """(model, inputs) -> outputs, one tensor. Default None: ``model(inputs)``."""

    targets: Callable[[Any], Tensor] | None = None
    """batch -> targets. Default None: the last entry of a tuple, or the "labels" of a dict."""

    def __post_init__(self) -> None:
        words = {"outputs": "(model, inputs) -> outputs", "targets": "batch -> targets"}
        for name, value in vars(self).items():
            holds = value is None or callable(value)
            require(holds, name, value, f"None, or a function {words[name]}", TypeError)


@dataclass(frozen=True)
class Compute:
    """Accuracy, memory, time and processes of a fit. The defaults choose what fits into memory.

    Example:
        >>> la = LinearisedLaplace(model, "classification", compute=Compute(vectors="cpu"))
    """

    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    """Precision of matrix products inside the network: "float32" (default: the dtype of the model),
    "tf32" on CUDA, or "bfloat16" by autocast. Solvers always use float32 or higher."""

    vectors: Literal["auto", "device", "cpu"] = "auto"
    """Where samples and directions are stored: on the model's "device", or on the "cpu", from which
    a few at a time are copied to the device. Default "auto": on the device if they fit."""

    span_memory: float | None = None
    """Largest size in bytes of the span of directions that a fit stores, used as given. Default
    None: half of the free memory of the device of the samples. A fit whose span does not fit
    continues with block CG."""

    keep_data: bool = True
    """Whether to join small batches, and to keep the batches on the device if they fit into a
    quarter of its free memory. Default True. If False, every pass reads the loader."""

    checkpoint: str | PathLike[str] | None = None
    """Folder to which the state is saved every few steps. If the process is killed, the same fit
    resumes from it. Default None."""

    budget: float | None = None
    """Seconds after which a fit ends with the posterior that it has reached, and a warning. With
    ``checkpoint``, the same fit continues from there. Default None."""

    shard: Literal["data"] | None = "data"
    """How an initialised process group is used. "data" (default): ranks share the batches. None:
    every rank fits on its own."""

    solver: Any = None
    """``BlockCG()`` or ``SGD()``. Default None: a span of directions for one prior precision if
    memory allows, else an iterative solver."""

    tolerance: float | None = None
    """Numerical error of the samples in posterior standard deviations. Default None: a quarter of
    their Monte Carlo error, 0.03 for 32 samples."""

    def __post_init__(self) -> None:
        draws = is_dataclass(self.solver) and callable(getattr(self.solver, "solve", None))
        draws = self.solver is None or (draws and not isinstance(self.solver, type))
        words = "None, or BlockCG() or SGD() (an object, not its class or name)"
        require(draws, "solver", self.solver, words, TypeError)
        is_path = self.checkpoint is None or isinstance(self.checkpoint, (str, PathLike))
        words = "None, or the name of a folder"
        require(is_path, "checkpoint", self.checkpoint, words, TypeError)
        is_bool = isinstance(self.keep_data, bool)
        require(is_bool, "keep_data", self.keep_data, "True or False", TypeError)
        for name in ("tolerance", "budget", "span_memory"):
            value = getattr(self, name)
            if value is not None:
                words, is_number = "None, or a number above 0", isinstance(value, Real)
                require(is_number and not isinstance(value, bool), name, value, words, TypeError)
                require(float(value) > 0, name, value, words)
        check_choice("shard", self.shard, ("data", None))
        check_choice("precision", self.precision, ("float32", "tf32", "bfloat16"))
        check_choice("vectors", self.vectors, ("auto", "device", "cpu"))


def check_choice(name: str, value: object, choices: tuple[str | None, ...]) -> None:
    """Raise an error if a value is not among the choices."""
    is_name = value is None or isinstance(value, str)
    if not is_name or value not in choices:
        expected = ", ".join(repr(choice) for choice in choices)
        error = ValueError if is_name else TypeError
        raise error(f"{name}={value!r} is not known: choose one of {expected}.")


def refuse_former(
    owner: str,
    given: Iterable[str],
    former: Mapping[str, str],
    kind: Literal["argument", "attribute", "name"] = "argument",
) -> None:
    """Raise an error for arguments, attributes or imported names that do not exist. For those of
    earlier versions, the error names the replacement."""
    errors = {"argument": TypeError, "attribute": AttributeError, "name": ImportError}
    for name in given:
        if name in former:
            raise errors[kind](f"{owner} has no {kind} {name!r} any more: {former[name]}.")
        if kind == "argument":
            raise TypeError(f"{owner}() got an unexpected keyword argument {name!r}")
        raise AttributeError(f"{owner} has no attribute {name!r}.")


def require(
    holds: bool, name: str, value: object, words: str, error: type[Exception] = ValueError
) -> None:
    """Raise an error if the value of an argument is not allowed; pass ``TypeError`` if its type is
    wrong."""
    if not holds:
        text = repr(value) if len(repr(value)) <= 60 else f"a {type(value).__name__}"
        raise error(f"{name} must be {words}, not {text}.")


def check_whole(least: float, **given: Any) -> None:
    """Raise an error for the first value that is not a whole number of ``least`` or more."""
    words = "a whole number" + (f" of {least:g} or more" if least > -inf else "")
    for name, value in given.items():
        is_whole = isinstance(value, Integral) and not isinstance(value, bool)
        require(is_whole, name, value, words, TypeError)
        require(int(value) >= least, name, value, words)


def check_within(low: float, high: float, **values: Any) -> None:
    """Raise an error for the first value that is neither None nor a real number in this range."""
    words = f"None, or positive real numbers from {low:g} to {high:g}"
    for name, value in values.items():
        if value is None:
            continue
        is_real, inside = False, False
        with suppressed():
            given = torch.as_tensor(value, device="cpu")
            if not given.is_complex() and given.dtype != torch.bool:
                numbers, is_real = torch.as_tensor(value, dtype=torch.float64, device="cpu"), True
                inside = bool(((numbers >= low) & (numbers <= high)).all())
        require(is_real, name, value, words, TypeError)
        require(inside, name, value, words)
