"""The linear model at one batch of examples: f, J w and Jᵀ u, in general by ``torch.func``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.data import tensors_in
from torch_lla_em.jacobian.intercepted import Intercepted, contiguous
from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.parameters import ParameterLayout

# bytes of the largest temporary tensor on a CPU; larger ones are allocated by the system each time,
# which takes as long as the arithmetic
_FETCHED_BYTES = 1.6e7


class Report(NamedTuple):
    """The result of the probe: how J is computed, and what an example takes."""

    names: tuple[str, ...] = ()  # weights with factors: all that have an influence, or none
    shared: tuple[str, ...] = ()  # tables of which one lookup is used for all examples
    forward: bool = False  # whether J w is by forward mode, or by two reverse passes
    carries: bool = False  # whether J w may be ``carried`` along with a forward pass
    fault: str = ""  # if there are only factors, the error message of the other ways
    adjoint_error: float = 0.0  # relative error of J w and Jᵀu compared with ``backward``
    least_columns: int = 1  # from which factors are worth computing even if they are not kept

    outputs: int = 1
    classes: int = 1  # C, the size of the outputs' last axis
    example_bytes: int | None = None  # of the largest tensor of a forward pass on a CPU
    activations: float = 0.0  # bytes that are kept for derivatives; 0 if that is not known
    nbytes: float = inf  # of Jacobian factors; infinity if they are computed in every pass

    def columns(self, x: Any, most: int | None) -> int | None:
        """Return the number of columns, of ``most``, whose tensors a CPU does not allocate each time; None: all."""
        if self.example_bytes is None:
            return most
        best = max(1, int(_FETCHED_BYTES / max(1, self.example_bytes * num_examples(x))))
        return min(best, most or best)


class Pulled(NamedTuple):
    """Jᵀ u, (K, P), as gradients by name, which take no more memory than the total they are added to."""

    layout: ParameterLayout

    step: int
    """Number of columns that are computed at once."""

    gradients: list[dict[str, Tensor]]
    """For every ``step`` columns, (step, *shape) by name; 0 where a name is missing."""

    def parts(self, total: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return views of a total (K, P), each with what is to be added, on its device and in its dtype."""
        found = []
        for some, gradients in zip(total.split(self.step), self.gradients, strict=True):
            views = some.split(self.layout.sizes, dim=1)
            for name, view in zip(self.layout.names, views, strict=True):
                if name in gradients:
                    g = gradients[name].reshape(view.shape)
                    found.append((view, g.to(total.device, total.dtype)))
        return found

    def added_to(self, total: Tensor) -> Tensor:
        """Add this to a total (K, P) in place, and return the total."""
        for view, gradient in self.parts(total):
            view += gradient
        return total


class Rows:
    """One batch of examples; ``push`` and ``pull`` may be called any number of times.

    Call them inside ``network.guarded()``. Examples are never vmapped over, columns are.
    """

    layout: ParameterLayout

    f: Tensor
    """f(x), shape (B, ..., C)."""

    columns: int | None
    """Number of columns that are computed at once; None: all."""

    features: Tensor | None = None
    """h, (B, ..., D), if J w = W h for all parameters W of a last linear layer; the last is 1 if it has a bias."""

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
        """Return Σ_n Σ_k (J_nᵀ u_nk)² by name, of the weights of which single rows are known."""
        return {}

    def _push(self, directions: dict[str, Tensor]) -> Tensor:
        """Return J w of directions (K, *shape) by name."""
        raise NotImplementedError

    def _pull(self, u: Tensor) -> dict[str, Tensor]:
        """Return Jᵀ u by name, (K, *shape); weights that f does not depend on are left out."""
        raise NotImplementedError


class ByAutodiff(Rows):
    """The linear model at a batch by its definition, the derivatives of ``torch.func.functional_call``.

    J w is by ``torch.func.jvp``; where it fails, by reverse mode twice, column by column. Jᵀu is by one recorded graph: ``torch.func.vjp`` takes 1.0 to 1.3 times as long for 17 columns, and for one
    1.1 (LeNet) to 2.3 times (an MLP with one input). Differentiable in x inside ``enable_grad``.
    """

    def __init__(
        self,
        network: Network,
        layout: ParameterLayout,
        x: Any,
        columns: int | None = None,
        forward: bool = False,
    ):
        self.layout, self.columns = layout, columns if forward else 1
        self._forward, self._of_weights = forward, partial(network.outputs, x)
        self._leaves = network.leaves(layout.names)
        self._f: Tensor | None = None
        self._graph: Tensor | None = None  # f, with the leaves at the ends of its graph
        self._transposed: tuple[Tensor, dict[str, Tensor]] | None = None

    def _function(self, weights: dict[str, Tensor]) -> Tensor:
        with Intercepted(contiguous):
            return self._of_weights(weights)

    @property
    def f(self) -> Tensor:
        """f(x), shape (B, ..., C)."""
        f = self._recorded() if self._f is None else self._f
        return f if torch.is_grad_enabled() else f.detach()

    def _recorded(self) -> Tensor:
        """Return f with its graph."""
        if self._graph is None:
            with torch.enable_grad():
                self._graph = self._function(self._leaves)
            if not self._graph.requires_grad:
                raise NotImplementedError(
                    "The outputs of a batch do not depend on the parameters in the posterior, unlike "
                    "those of earlier batches: for some inputs the forward pass runs under no_grad, or "
                    "takes another branch. Choose `parameters` that all inputs use."
                )
        return self._graph

    def _push(self, directions: dict[str, Tensor]) -> Tensor:
        if not self._forward:
            return self._pushed_by_reverse(directions)
        # forward mode copies views that do not start at the beginning of their memory
        columns = {n: directions[n].to(w, copy=True) for n, w in self._leaves.items()}
        jvp = partial(
            torch.func.jvp, self._function, ({n: w.detach() for n, w in self._leaves.items()},)
        )
        if len(next(iter(columns.values()))) == 1:
            self._f, Jw = jvp(({name: column[0] for name, column in columns.items()},))[:2]
            return Jw[None]
        self._f, Jw = torch.vmap(jvp, out_dims=(None, 0))((columns,))[:2]
        return Jw

    def _pull(self, u: Tensor) -> dict[str, Tensor]:
        f = self._recorded()

        def pull(u: Tensor) -> dict[str, Tensor]:
            found = _gradients([f], [*self._leaves.values()], [u.to(f)])
            return {n: g for n, g in zip(self._leaves, found) if g is not None}

        return torch.vmap(pull)(u) if len(u) > 1 else {n: g[None] for n, g in pull(u[0]).items()}

    def _pushed_by_reverse(self, directions: dict[str, Tensor]) -> Tensor:
        """Return J w as the derivative of u -> Jᵀ u at u = 0, since this map is linear."""
        f = self._recorded()
        if self._transposed is None:
            u = torch.zeros_like(f, requires_grad=True)
            with torch.enable_grad():
                found = zip(self._leaves, _gradients([f], [*self._leaves.values()], [u]))
            self._transposed = u, {n: g for n, g in found if g is not None and g.requires_grad}
        u, known = self._transposed
        if not known:
            return torch.zeros_like(f)[None]
        columns = [directions[name][0].to(gradient) for name, gradient in known.items()]
        return _gradients([*known.values()], [u], columns)[0][None]


def _gradients(of: list[Tensor], by: Sequence[Tensor], u: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the gradients of ⟨of, u⟩, which may be differentiated if gradients are enabled."""
    return torch.autograd.grad(
        of, by, u, retain_graph=True, create_graph=torch.is_grad_enabled(), allow_unused=True
    )


def num_examples(x: Any) -> int:
    """Return the number of examples of inputs, from the shapes of their tensors."""
    each = [x] if isinstance(x, Tensor) else tensors_in(x)
    return next((len(tensor) for tensor in each if tensor.dim()), 1)
