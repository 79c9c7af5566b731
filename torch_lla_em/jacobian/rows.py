"""The linear model at one batch of examples: f, J w and Jᵀ u, independent of how J is computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.data import tensors_in
from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.parameters import ParameterLayout

# bytes of the largest temporary tensor on a CPU; larger ones are allocated by the system each time,
# which takes as long as the arithmetic
FETCHED_BYTES = 2**24


def num_examples(x: Any) -> int:
    """Return the number of examples of inputs, from the shapes of their tensors."""
    return next((len(tensor) for tensor in tensors_in(x) if tensor.dim()), 1)


class Weights:
    """The parameters in the posterior by name, and vectors in their space."""

    def __init__(self, network: Network, layout: ParameterLayout):
        self.network, self.layout = network, layout
        _refuse_scripted(network, layout)
        self.padding = _padding_rows(network, layout)

    def values(self, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Return the trained weights, all or the named ones, detached."""
        return self.network.weights(tuple(self.layout.names if names is None else names))

    def unpadded(self, directions: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return directions without the rows of padding, which backward leaves out by itself."""
        unpadded = dict(directions)
        for name, row in self.padding.items():
            if row is not None and name in unpadded:
                at = torch.full((1,), row, device=unpadded[name].device)  # no copy to a GPU
                unpadded[name] = unpadded[name].index_fill(-2, at, 0)
        return unpadded


class Rows:
    """One batch of examples; ``push`` and ``pull`` may be called any number of times.

    Call them inside ``network.guarded()``. Examples are never vmapped over, columns are.
    """

    nbytes = inf
    """Memory in bytes for storing this between passes; infinity: not worth storing."""

    def __init__(self, weights: Weights, at_once: tuple[int | None, int | None]):
        self._weights = weights
        self.pushed, self.pulled = at_once
        """Number of columns of J w and of Jᵀ u that are computed at once; None: all."""

    @property
    def columns(self) -> int | None:
        """How many columns of a product are best taken at once; None: all."""
        if self.pushed is None or self.pulled is None:
            return None
        return max(self.pushed, self.pulled)

    @property
    def f(self) -> Tensor:
        """f(x), shape (B, ..., C)."""
        raise NotImplementedError

    def push(self, w: Tensor) -> Tensor:
        """Return J w, shape (K, B, ..., C), of columns (K, P)."""
        raise NotImplementedError

    def pull(self, u: Tensor, total: Tensor) -> None:
        """Add Jᵀ u for u (K, B, ..., C) to a total (K, P), completely or, after an error, not at all."""
        step = self.pulled or len(u)
        # all memory is allocated before the first number is added
        found = [_flat(self._pull(chunk), total) for chunk in u.split(step)]
        for part, grads in zip(total.split(step), found):
            self._weights.layout.add_(part, grads)

    def row_squares(self, u: Tensor) -> dict[str, Tensor]:
        """Return Σ_n Σ_k (J_nᵀ u_nk)² by name, of the weights of which single rows are known."""
        return {}

    def _chunks(self, w: Tensor) -> Iterator[dict[str, Tensor]]:
        """Yield columns (K, P) as directions (k, *shape) by name, as many as are taken at once."""
        for chunk in w.split(self.pushed or len(w)):
            yield self._weights.layout.unflatten(chunk)

    def _pull(self, u: Tensor) -> dict[str, Tensor]:
        """Return Jᵀ u by name, (K, *shape); weights that f does not depend on are left out."""
        raise NotImplementedError


def _flat(grads: Mapping[str, Tensor], total: Tensor) -> dict[str, Tensor]:
    return {
        name: grad.reshape(len(grad), -1).to(total.device, total.dtype)
        for name, grad in grads.items()
    }


def _refuse_scripted(network: Network, layout: ParameterLayout) -> None:
    for path, layer in network.module.named_modules():
        if isinstance(layer, torch.jit.ScriptModule):
            own = [n for n in layout.names if n.startswith(f"{path}.")]
            if own:
                raise TypeError(
                    f"The module {path!r} is scripted or traced (torch.jit), so its weights "
                    "cannot be exchanged. Use the Python module it was made from, or leave "
                    f"{own[0]!r} out of `parameters`."
                )


def _padding_rows(network: Network, layout: ParameterLayout) -> dict[str, int | None]:
    """Return the row that gets no gradient in training, by name; None for tied weights.

    Reverse mode gives the row ``padding_idx`` of an embedding no gradient, but forward mode does.
    """
    rows: dict[str, int | None] = {}
    parameters = {id(p): name for name, p in network.module.named_parameters()}
    uses = Counter(id(p) for m in network.module.modules() for p in m.parameters(recurse=False))
    for path, layer in network.module.named_modules():
        if not isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
            continue
        name = parameters.get(id(layer.weight))
        if name not in layout.names:
            continue
        if layer.scale_grad_by_freq:
            raise ValueError(
                f"The {type(layer).__name__} {path!r} has scale_grad_by_freq=True, so its "
                "gradient is not the derivative of its output and there is no Jacobian. Set "
                f"scale_grad_by_freq=False, or leave {name!r} out of `parameters`."
            )
        if layer.padding_idx is not None:
            rows[name] = None if uses[id(layer.weight)] > 1 else layer.padding_idx
    return rows
