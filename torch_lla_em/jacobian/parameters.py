"""Selects the parameters in the posterior, and maps them to one flat vector."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import prod

import torch
from torch import Tensor, nn

from torch_lla_em.jacobian.state import ONE_AT_A_TIME

Selection = str | Sequence[str] | Callable[[str, nn.Parameter], bool] | None


@dataclass(frozen=True)
class ParameterLayout:
    """Named tensors in one flat vector; each tensor is a block of it."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, module: nn.Module, names: Sequence[str]) -> ParameterLayout:
        """Return the layout of these parameters of a module."""
        parameters = dict(module.named_parameters())
        unknown = [name for name in names if name not in parameters]
        if unknown:
            raise ValueError(
                f"The model has no parameter {unknown[0]!r}; take names from "
                "dict(model.named_parameters()), where tied weights have one name."
            )
        return cls(tuple(names), tuple(parameters[name].shape for name in names))

    @property
    def sizes(self) -> list[int]:
        """Number of weights of each block."""
        return [prod(shape) for shape in self.shapes]

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
        pieces = w.split(self.sizes, dim=-1)
        return {
            name: piece.unflatten(-1, shape) if shape else piece.squeeze(-1)
            for name, piece, shape in zip(self.names, pieces, self.shapes)
        }

    def add_(self, total: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Add tensors (..., *shape) into vectors (..., P), in place; absent ones are 0."""
        for name, piece in zip(self.names, total.split(self.sizes, dim=-1)):
            if name in tensors:
                piece += tensors[name].reshape(piece.shape).to(piece.device)

    def expand(self, blocks: Tensor) -> Tensor:
        """Return one value per block, shape (blocks,), as one value per parameter, (P,)."""
        sizes = torch.tensor(self.sizes, device=blocks.device)
        return blocks.repeat_interleave(sizes, output_size=self.size)

    def block_sums(self, w: Tensor) -> Tensor:
        """Return the sum over each block, (..., P) to (..., blocks)."""
        return torch.stack([p.sum(-1) for p in w.split(self.sizes, dim=-1)], dim=-1)


def select_parameters(
    module: nn.Module, selection: Selection = None, last_layer: str | None = None
) -> tuple[str, ...]:
    """Return the names of the parameters in the posterior, tied ones once.

    ``None`` selects all that require gradients, except those of normalisation layers;
    ``"requires_grad"`` and ``"all"`` include these. ``"last_layer"`` selects the layer at the path
    ``last_layer``, or the last registered one if that is not known. A name pattern
    (``"encoder.*"``), a list of patterns or a predicate ``(name, parameter) -> bool`` selects what it
    matches.
    """
    with ONE_AT_A_TIME:
        return _selected(module, selection, last_layer)


def _selected(module: nn.Module, selection: Selection, last_layer: str | None) -> tuple[str, ...]:
    parameters = dict(module.named_parameters())
    if selection is None:
        fixed = _normalisation_parameters(module)
        names = {n for n, p in parameters.items() if p.requires_grad and n not in fixed}
    elif selection == "requires_grad":
        names = {n for n, p in parameters.items() if p.requires_grad}
    elif selection == "all":
        names = set(parameters)
    elif selection == "last_layer":
        names = _layer_parameters(module, last_layer or _registered_last(module))
    elif isinstance(selection, str):
        names = _match_patterns(module, [selection])
    elif callable(selection):
        names = {n for n, p in parameters.items() if selection(n, p)}
    else:
        names = _match_patterns(module, selection)
    for name, parameter in parameters.items():
        if name in names and parameter.is_complex():
            raise TypeError(
                f"The parameter {name!r} is complex, but a posterior needs real parameters. Store "
                "its real and imaginary parts (torch.view_as_real) and combine them in forward, "
                "or leave it out of `parameters`."
            )
    chosen = tuple(
        name
        for name, parameter in parameters.items()
        if name in names and parameter.is_floating_point() and parameter.numel()
    )
    if not chosen:
        raise ValueError(
            "No parameter was selected for the posterior: none requires gradients outside of "
            "normalisation layers, or the selection matches none. Pass `parameters=` with names "
            "from model.named_parameters()."
        )
    return chosen


def _first_names(module: nn.Module) -> dict[str, str]:
    """Return, for every name of a parameter, the first name of the same (tied) parameter."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }


def _match_patterns(module: nn.Module, patterns: Sequence[str]) -> set[str]:
    first = _first_names(module)
    matched = {p: {first[n] for n in first if fnmatchcase(n, p)} for p in patterns}
    for pattern, hits in matched.items():
        if not hits:
            near = get_close_matches(pattern, first, 3, 0.4) or list(first)[:5]
            raise ValueError(
                f"The pattern {pattern!r} in `parameters` matches no parameter of the model; the "
                f'nearest names are {near}. Other values are "last_layer", "requires_grad", '
                '"all", and a predicate (name, parameter) -> bool.'
            )
    return set().union(*matched.values())


def owns_weights(layer: nn.Module) -> bool:
    """Whether a layer has a matrix or kernel of its own, like a head."""
    parametrised = getattr(layer, "parametrizations", {})
    return any(
        parameter.ndim > 1
        for holder in (layer, *parametrised.values())
        for parameter in holder.parameters(recurse=False)
    )


def _registered_last(module: nn.Module) -> str:
    """Return the path of the last layer with a matrix; scales, shifts and PReLU do not count."""
    layers = [(p, m) for p, m in module.named_modules() if ".parametrizations" not in f".{p}"]
    with_weights = [path for path, layer in layers if owns_weights(layer)]
    with_any = [path for path, layer in layers if any(True for _ in layer.parameters(False))]
    return (with_weights or with_any or [""])[-1]


def _layer_parameters(module: nn.Module, path: str) -> set[str]:
    first, prefix = _first_names(module), f"{path}." if path else ""
    return {first[prefix + name] for name, _ in module.get_submodule(path).named_parameters()}


_NORMALISATION = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def _is_normalisation(layer: nn.Module) -> bool:
    """Whether a layer is a normalisation: torch's own by class, others by name.

    Layers that hold more than scales and shifts, such as a "NormLinear", do not count.
    """
    return isinstance(layer, _NORMALISATION) or (
        "norm" in type(layer).__name__.lower()
        and all(max(p.shape, default=1) == p.numel() for p in layer.parameters(recurse=False))
    )


def _normalisation_parameters(module: nn.Module) -> set[str]:
    return {
        f"{path}.{name}" if path else name
        for path, layer in module.named_modules()
        if _is_normalisation(layer)
        for name, _ in layer.named_parameters(recurse=False)
    }
