"""Selects the parameters in the posterior, and maps them to one flat vector."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.runtime import ONE_AT_A_TIME, require

Selection = str | Sequence[str] | Callable[[str, nn.Parameter], bool] | None

_NORMALISATION = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True)
class ParameterLayout:
    """Named tensors in one flat vector; each tensor is a block of it."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, module: nn.Module, names: Sequence[str]) -> ParameterLayout:
        """Return the layout of these parameters of a module."""
        parameters = dict(module.named_parameters())
        return cls(tuple(names), tuple(parameters[name].shape for name in names))

    @cached_property
    def sizes(self) -> list[int]:
        """Number of weights of each block."""
        return [shape.numel() for shape in self.shapes]

    @property
    def size(self) -> int:
        """P, the number of parameters in the posterior."""
        return sum(self.sizes)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the tensors as one vector, shape (P,)."""
        device = tensors[self.names[0]].device
        return torch.cat([tensors[name].reshape(-1).to(device) for name in self.names])

    def unflatten(self, w: Tensor) -> dict[str, Tensor]:
        """Return views (..., *shape) of vectors (..., P), by name."""
        pieces = zip(self.names, w.split(self.sizes, dim=-1), self.shapes, strict=True)
        return {
            name: piece.unflatten(-1, shape) if shape else piece.squeeze(-1)
            for name, piece, shape in pieces
        }

    def expand(self, blocks: Tensor) -> Tensor:
        """Return one value per block, shape (blocks,), as one value per parameter, (P,)."""
        sizes = torch.tensor(self.sizes, device=blocks.device)
        return blocks.repeat_interleave(sizes, output_size=self.size)

    def block_sums(self, w: Tensor) -> Tensor:
        """Return the sum over each block, (..., P) to (..., blocks)."""
        return torch.stack([p.sum(-1) for p in w.split(self.sizes, dim=-1)], dim=-1)


def select_parameters(
    module: nn.Module, selection: Selection = None, last: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Return the names of the parameters in the posterior; tied parameters occur once.

    ``None`` selects all that require gradients, except those of normalisation layers;
    ``"requires_grad"`` includes these, and ``"all"`` every parameter. ``"last_layer"`` selects the
    layers at the paths ``last``, or the last registered one if they are not known. A name pattern
    (``"encoder.*"``), a list of patterns or a predicate ``(name, parameter) -> bool`` selects what
    it matches.
    """
    with ONE_AT_A_TIME:
        parameters = dict(module.named_parameters())
        names = _selected(module, parameters, selection, last)
    chosen = {n: p for n, p in parameters.items() if n in names and p.numel()}
    for name, parameter in chosen.items():
        if parameter.is_complex():
            raise TypeError(
                f"The parameter {name!r} is complex, but a posterior needs real parameters. Store "
                "its real and imaginary parts (torch.view_as_real) and combine them in forward, "
                "or leave it out of `parameters`."
            )
    real = tuple(name for name, parameter in chosen.items() if parameter.is_floating_point())
    if not real:
        raise ValueError(
            "No parameter was selected for the posterior: none requires gradients outside of "
            "normalisation layers, or the selection matches none. Pass `parameters=` with names "
            "from model.named_parameters()."
        )
    return real


def leaves_out(module: nn.Module, names: Collection[str]) -> bool:
    """Return whether parameters outside of normalisation layers are not among these names."""
    every = {name for name, parameter in module.named_parameters() if parameter.is_floating_point()}
    return bool(every - {*names, *_normalisation_parameters(module)})


def _selected(
    module: nn.Module,
    parameters: dict[str, nn.Parameter],
    selection: Selection,
    last: tuple[str, ...],
) -> set[str]:
    """Return the selected names."""
    if selection is None or selection == "requires_grad":
        fixed = _normalisation_parameters(module) if selection is None else ()
        return {n for n, p in parameters.items() if p.requires_grad and n not in fixed}
    if selection == "all":
        return set(parameters)
    if callable(selection):
        return {n for n, p in parameters.items() if selection(n, p)}
    # every name, also of tied parameters, with the first name of the same one
    every = dict(module.named_parameters(remove_duplicate=False))
    first = {id(parameter): name for name, parameter in reversed(every.items())}
    if selection == "last_layer":
        if not last:  # the last layer with a matrix: scales, shifts and PReLU do not count
            layers = {p: m for p, m in module.named_modules() if ".parametrizations" not in f".{p}"}
            with_weights = [path for path, layer in layers.items() if owns_weights(layer)]
            with_any = [path for path, layer in layers.items() if [*layer.parameters(False)]]
            last = ((with_weights or with_any or [""])[-1],)
        return {first[id(p)] for path in last for p in module.get_submodule(path).parameters()}
    matched: set[str] = set()
    is_list = isinstance(selection, Iterable) and not isinstance(selection, str)
    patterns: list[Any] = list(selection) if is_list else [selection]
    words = (
        'None, "last_layer", "requires_grad", "all", a pattern of names from '
        "model.named_parameters(), a list of them, or a function (name, parameter) -> bool"
    )
    are_names = all(isinstance(each, str) for each in patterns)
    require(are_names, "parameters", selection, words, TypeError)
    for pattern in patterns:
        hits = {first[id(p)] for name, p in every.items() if fnmatchcase(name, pattern)}
        if not hits:
            near = get_close_matches(pattern, every, 3, 0.4) or list(every)[:5]
            raise ValueError(
                f"The pattern {pattern!r} in `parameters` matches no parameter of the model; the "
                f"nearest names are {near}. Pass {words}."
            )
        matched |= hits
    return matched


def owns_weights(layer: nn.Module) -> bool:
    """Whether a layer has a matrix or kernel of its own, like a head."""
    holders = (layer, *getattr(layer, "parametrizations", {}).values())
    return any(p.ndim > 1 for holder in holders for p in holder.parameters(recurse=False))


def _normalisation_parameters(module: nn.Module) -> set[str]:
    """Return the parameters of normalisations: torch's own by class, others by name.

    Layers that hold more than scales and shifts, such as a "NormLinear", do not count.
    """
    names: set[str] = set()
    for path, layer in module.named_modules():
        direct = dict(layer.named_parameters(path, recurse=False))
        named = "norm" in type(layer).__name__.lower()
        scales = all(max(p.shape, default=1) == p.numel() for p in direct.values())
        if isinstance(layer, _NORMALISATION) or (named and scales):
            names |= direct.keys()
    return names
