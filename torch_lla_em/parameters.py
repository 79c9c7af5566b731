"""The random weights: which parameters they are, and their one flat vector."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

import torch
from torch import Tensor, nn

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
        return cls(tuple(names), tuple(parameters[name].shape for name in names))

    @property
    def sizes(self) -> list[int]:
        """Number of weights of each block."""
        return [prod(shape) for shape in self.shapes]

    @property
    def size(self) -> int:
        """P, the number of random weights."""
        return sum(self.sizes)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the tensors as one vector, shape (P,)."""
        return torch.cat([tensors[name].reshape(-1) for name in self.names])

    def unflatten(self, w: Tensor) -> dict[str, Tensor]:
        """Return views (..., *shape) of vectors (..., P), by name."""
        pieces = w.split(self.sizes, dim=-1)
        return {
            name: piece.unflatten(-1, shape) if shape else piece.squeeze(-1)
            for name, piece, shape in zip(self.names, pieces, self.shapes)
        }

    def add_(self, total: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Add tensors (..., *shape) into vectors (..., P), in place."""
        for name, piece in zip(self.names, total.split(self.sizes, dim=-1)):
            piece += tensors[name].reshape(piece.shape)

    def expand(self, blocks: Tensor) -> Tensor:
        """Return one value a block, shape (blocks,), as one value a weight, (P,)."""
        sizes = torch.tensor(self.sizes, device=blocks.device)
        return blocks.repeat_interleave(sizes, output_size=self.size)

    def block_sums(self, w: Tensor) -> Tensor:
        """Return the sum over each block, (..., P) to (..., blocks)."""
        return torch.stack([p.sum(-1) for p in w.split(self.sizes, dim=-1)], dim=-1)


def select_parameters(module: nn.Module, selection: Selection = None) -> tuple[str, ...]:
    """Return the names of the random weights.

    ``None`` takes all that require gradients, minus those of normalisation layers;
    ``"last_layer"`` those of the last module that has any; a list of name patterns
    (``"encoder.*"``) or a predicate ``(name, parameter) -> bool`` takes what it matches.
    """
    parameters = dict(module.named_parameters())
    if selection is None:
        fixed = _normalisation_parameters(module)
        names = [n for n, p in parameters.items() if p.requires_grad and n not in fixed]
    elif selection == "last_layer":
        owners = [n.rpartition(".")[0] for n in parameters]
        names = [n for n, owner in zip(parameters, owners) if owner == owners[-1]]
    elif isinstance(selection, str):
        raise ValueError(
            f'parameters={selection!r} is not known: pass "last_layer", a list of name '
            "patterns, or a predicate (name, parameter) -> bool."
        )
    elif callable(selection):
        names = [n for n, p in parameters.items() if selection(n, p)]
    else:
        names = _match_patterns(parameters, selection)
    names = [n for n in names if parameters[n].is_floating_point() and parameters[n].numel()]
    if not names:
        raise ValueError(
            "The model has no random parameters: none require gradients outside of "
            "normalisation layers, or the selection matches none. Pass `parameters=` "
            "with names from model.named_parameters()."
        )
    return tuple(names)


def _match_patterns(parameters: Mapping[str, nn.Parameter], patterns: Sequence[str]) -> list[str]:
    matched = {p: [n for n in parameters if fnmatchcase(n, p)] for p in patterns}
    for pattern, hits in matched.items():
        if not hits:
            raise ValueError(
                f"The pattern {pattern!r} in `parameters` matches no parameter of the "
                f"model; its first names are {list(parameters)[:5]}."
            )
    chosen = {name for hits in matched.values() for name in hits}
    return [name for name in parameters if name in chosen]


def _normalisation_parameters(module: nn.Module) -> set[str]:
    """Names of weights and biases of normalisation layers, ours or anybody's."""
    return {
        f"{path}.{name}" if path else name
        for path, layer in module.named_modules()
        if "norm" in type(layer).__name__.lower() and not any(layer.children())
        for name, _ in layer.named_parameters(recurse=False)
    }
