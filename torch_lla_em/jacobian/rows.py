"""The linear model at one batch of examples: f, J w and Jᵀ u."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import Inputs, tensors_in
from torch_lla_em.jacobian.parameters import ParameterLayout

# bytes of the largest temporary tensor on a CPU; larger ones are allocated by the system each time,
# which takes as long as the arithmetic
_FETCHED_BYTES = 1.6e7


class Ways(NamedTuple):
    """The result of the probe: how J is computed, and the costs of an example."""

    names: tuple[str, ...] = ()  # weights with factors: all that have an influence, or none
    shared: tuple[str, ...] = ()  # tables of which one lookup is used for all examples
    is_last_layer: bool = False  # whether the factors have the features of a last layer
    forward: bool = False  # whether J w is by forward mode, or by two reverse passes
    fault: str = ""  # if there are only factors, the error message of the other ways
    adjoint_error: float = 0.0  # relative error of J w and Jᵀu compared with the definition
    least_columns: int = 1  # from which factors are worth computing even if they are not kept

    outputs: int = 1
    classes: int = 1  # C, the size of the outputs' last axis
    example_bytes: int | None = None  # of the largest tensor of a forward pass on a CPU
    activations: float = 0.0  # bytes in a forward pass; 0 if they are not known
    nbytes: float = inf  # of Jacobian factors; infinity if they are computed in every pass

    def columns(self, x: Inputs, most: int | None) -> int | None:
        """Return how many columns to process at once, so that temporaries stay in the allocator's
        cache on a CPU; None means all."""
        if self.example_bytes is None:
            return most
        best = max(1, int(_FETCHED_BYTES / max(1, self.example_bytes * num_examples(x))))
        return min(best, most or best)


class Pulled(NamedTuple):
    """Jᵀ u, (K, P), as gradients by name, which need no more memory than the total to which they
    are added."""

    layout: ParameterLayout

    step: int
    """Number of columns that are computed at once."""

    gradients: list[dict[str, Tensor]]
    """For every ``step`` columns, (step, *shape) by name; 0 where a name is missing."""

    def parts(self, total: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of a view of a total (K, P) and the tensor to add to it, on its device and
        in its dtype."""
        pairs = []
        for some, gradients in zip(total.split(self.step), self.gradients, strict=True):
            views = some.split(self.layout.sizes, dim=1)
            for name, view in zip(self.layout.names, views, strict=True):
                if name in gradients:
                    g = gradients[name].reshape(view.shape)
                    pairs.append((view, g.to(total.device, total.dtype)))
        return pairs

    def added_to(self, total: Tensor) -> Tensor:
        """Add this to a total (K, P) in place, and return the total."""
        for view, gradient in self.parts(total):
            view += gradient
        return total


class Rows:
    """One batch of examples; ``push`` and ``pull`` may be called any number of times.

    Call them inside ``network.guarded()``. Columns are vmapped over, and examples never are.
    """

    layout: ParameterLayout

    f: Tensor
    """f(x), shape (B, ..., C)."""

    columns: int | None
    """Number of columns that are computed at once; None: all."""

    features: Tensor | None = None
    """h, (B, ..., D), if all parameters are those of a last linear layer with J w = W h. The last
    entry of h is 1 if the layer has a bias."""

    nbytes: float = inf
    """Memory in bytes for storing this between passes; infinity: not worth storing."""

    def push(self, w: Tensor) -> Tensor:
        """Return J w, shape (K, B, ..., C), of columns (K, P)."""
        step = self.columns or len(w)
        parts = [self._push(self.layout.unflatten(some)) for some in w.split(step)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def pull(self, u: Tensor) -> Pulled:
        """Return Jᵀ u, (K, P), for u (K, B, ..., C)."""
        step = self.columns or len(u)
        return Pulled(self.layout, step, [*map(self._pull, u.split(step))])

    def row_squares(self, u: Tensor) -> dict[str, Tensor]:
        """Return Σ_n Σ_k (J_nᵀ u_nk)² by name, for the weights whose gradients are known for single
        examples."""
        return {}

    def _push(self, directions: dict[str, Tensor]) -> Tensor:
        """Return J w of directions (K, *shape) by name."""
        raise NotImplementedError

    def _pull(self, u: Tensor) -> dict[str, Tensor]:
        """Return Jᵀ u by name, (K, *shape); weights that f does not depend on are left out."""
        raise NotImplementedError


def num_examples(x: Inputs) -> int:
    """Return the number of examples of inputs, from the shapes of their tensors."""
    tensors = [x] if isinstance(x, Tensor) else tensors_in(x)
    return next((len(tensor) for tensor in tensors if tensor.dim()), 1)
