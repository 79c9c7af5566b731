"""The linear model at one batch of examples: f, J w and Jᵀ u, in general by ``torch.func``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torch_lla_em.data import tensors_in
from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.parameters import ParameterLayout

# bytes of the largest temporary tensor on a CPU; larger ones are allocated by the system each time,
# which takes as long as the arithmetic
FETCHED_BYTES = 2**24

# if the CPU cache holds fewer columns than this, Jᵀu is faster column by column, since stacked backward
# passes share nothing: J w and Jᵀu of 17 columns, 200 images and three convolutions take 355 and 443 ms
_PULLED_ALONE = 8


class Weights(Protocol):
    """The parameters in the posterior, and vectors in their space."""

    network: Network
    layout: ParameterLayout

    def values(self) -> dict[str, Tensor]: ...

    def unpadded(self, directions: dict[str, Tensor]) -> dict[str, Tensor]: ...

    @property
    def allow_forward(self) -> bool: ...


class Report(NamedTuple):
    """The result of the probe."""

    forward: bool | None = None
    """Whether J w is by forward mode, or by two reverse passes; None if not known yet, as all weights
    have factors."""

    adjoint_error: float = 0.0
    """Relative error of J w and Jᵀu compared with ``backward``."""

    reason: str = ""
    """Why forward mode is not used; empty if it is."""

    names: tuple[str, ...] = ()
    """The weights whose Jacobian is computed by factors: all that have an influence, or none."""

    shared: tuple[str, ...] = ()
    """Tables of which one lookup is used for all examples."""

    least_columns: int = 1
    """Number of columns from which factors are worth computing even if they are not stored."""

    example_bytes: int | None = None
    """Bytes of the largest output of a layer for one example, on a CPU; None elsewhere."""

    examples: int = 1
    """Number of examples in the probe; with one it is not known which weights have factors."""

    outputs: int = 1
    """Number of outputs of an example."""

    classes: int = 1
    """C, the size of their last axis."""

    activations: float = 0.0
    """Bytes that a forward pass keeps of an example for its derivatives; 0 if that is not known."""

    nbytes: float = inf
    """Bytes of an example's Jacobian factors; infinity if they are computed in every pass."""

    def __str__(self) -> str:
        words = {
            True: "J w by forward mode",
            False: "J w by two reverse passes",
            None: "J w by factors",
        }
        parts = [f"{words[self.forward]}, adjoint error {self.adjoint_error:.1e}"]
        if self.names:
            parts.append(f"{len(self.names)} parameter tensors have factors")
        if self.reason:
            parts.append(f"forward mode is not used because it {self.reason}")
        return "; ".join(parts)


def num_examples(x: Any) -> int:
    """Return the number of examples of inputs, from the shapes of their tensors."""
    return next((len(tensor) for tensor in tensors_in(x) if tensor.dim()), 1)


def fewest(*limits: int | None) -> int | None:
    """Return the smallest limit; None stands for none."""
    return min((limit for limit in limits if limit is not None), default=None)


def at_once(example_bytes: int | None, examples: int) -> tuple[int | None, int | None]:
    """Return the best numbers of columns of J w and of Jᵀ u at once; None: all.

    ``example_bytes`` is the size of the largest output of a layer for one example, None on a GPU.
    """
    if example_bytes is None:
        return None, None
    cached = max(2, FETCHED_BYTES // max(1, example_bytes * examples))
    return cached, 1 if cached <= _PULLED_ALONE else cached


class Rows:
    """One batch of examples; ``push`` and ``pull`` may be called any number of times.

    Call them inside ``network.guarded()``. Examples are never vmapped over, columns are.
    """

    f: Tensor
    """f(x), shape (B, ..., C)."""

    nbytes: float = inf
    """Memory in bytes for storing this between passes; infinity: not worth storing."""

    def __init__(self, weights: Weights, pushed: int | None, pulled: int | None):
        self._weights = weights
        self.pushed, self.pulled = pushed, pulled
        """Number of columns of J w and of Jᵀ u that are computed at once; None: all."""

    @property
    def columns(self) -> int | None:
        """How many columns of a product are best taken at once; None: all."""
        if self.pushed is None or self.pulled is None:
            return None
        return max(self.pushed, self.pulled)

    @property
    def features(self) -> Tensor | None:
        """h, (B, ..., D), if J w = W h for all parameters W, those of a last linear layer; else None.

        The last feature is 1 if the layer has a bias.
        """
        return None

    def push(self, w: Tensor) -> Tensor:
        """Return J w, shape (K, B, ..., C), of columns (K, P)."""
        layout = self._weights.layout
        parts = [self._push(layout.unflatten(some)) for some in w.split(self.pushed or len(w))]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def pull(self, u: Tensor, total: Tensor) -> None:
        """Add Jᵀ u for u (K, B, ..., C) to a total (K, P), completely or, after an error, not at all."""
        step = self.pulled or len(u)
        # all memory is allocated before the first number is added
        found = [
            {
                name: grad.reshape(len(grad), -1).to(total.device, total.dtype)
                for name, grad in self._pull(some).items()
            }
            for some in u.split(step)
        ]
        for part, grads in zip(total.split(step), found):
            self._weights.layout.add_(part, grads)

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
    """The linear model at a batch by its definition, ``torch.func.jvp`` and ``torch.func.vjp``.

    Networks with operations that these do not support are differentiated by reverse mode twice,
    column by column. Differentiable in x inside ``enable_grad``.
    """

    def __init__(
        self,
        weights: Weights,
        x: Any,
        forward: bool = False,
        columns: tuple[int | None, int | None] = (1, 1),
    ):
        """``forward``: J w by forward mode; ``columns``: how many of J w and of Jᵀu at once."""
        super().__init__(weights, *(columns if forward else (1, 1)))
        self._forward, self._values = forward, weights.values()
        self._function = weights.network.function(x)
        self._f: Tensor | None = None
        self._pullback: Callable[[Tensor], tuple[dict[str, Tensor]]] | None = None
        self._recorded: tuple[Tensor, dict[str, Tensor]] | None = None
        self._transposed: tuple[Tensor, dict[str, Tensor]] | None = None

    @property
    def f(self) -> Tensor:
        """f(x), shape (B, ..., C)."""
        if self._f is None:
            f = self._reverse()[0] if self._forward else self.record()[0]
            self._f = f if torch.is_grad_enabled() else f.detach()
        return self._f

    def record(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return f with its graph, and the weights at its leaves."""
        if self._recorded is None:
            leaves = {name: w.detach().requires_grad_() for name, w in self._values.items()}
            with torch.enable_grad():
                self._recorded = self._function(leaves), leaves
        return self._recorded

    def push(self, w: Tensor) -> Tensor:
        """Return J w, shape (K, B, ..., C), of columns (K, P)."""
        if not self._forward:
            return super().push(w)
        jvp, parts = partial(torch.func.jvp, self._function, (self._values,)), []
        for some in w.split(self.pushed or len(w)):
            directions = self._weights.unpadded(self._weights.layout.unflatten(some))
            # forward mode copies views that do not start at the beginning of their memory
            columns = {name: directions[name].to(w, copy=True) for name, w in self._values.items()}
            if len(some) > 1:
                self._f, Jw = torch.vmap(jvp, out_dims=(None, 0))((columns,))[:2]
            else:
                self._f, Jw = jvp(({name: column[0] for name, column in columns.items()},))[:2]
                Jw = Jw[None]
            parts.append(Jw)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _pull(self, u: Tensor) -> dict[str, Tensor]:
        if self._forward:
            pullback = self._reverse()[1]
            if len(u) > 1:
                return torch.vmap(pullback)(u.to(self.f))[0]
            return {name: g[None] for name, g in pullback(u[0].to(self.f))[0].items()}
        f, leaves = self.record()
        grads = _gradients([_require(f)], list(leaves.values()), [u[0].to(f)])
        return {name: g[None] for name, g in zip(leaves, grads) if g is not None}

    def _reverse(self) -> tuple[Tensor, Callable[[Tensor], tuple[dict[str, Tensor]]]]:
        """Return f, and the map from u to Jᵀu."""
        if self._pullback is None or self._f is None:
            # forward mode would go on, without the weights that a no_grad hides from training
            function = lambda weights: _require(self._function(weights))  # noqa: E731
            self._f, self._pullback = torch.func.vjp(function, self._values)[:2]
        return self._f, self._pullback

    def _push(self, directions: dict[str, Tensor]) -> Tensor:
        """Return J w as the derivative of u -> Jᵀ u at u = 0, since this map is linear."""
        f, leaves = self.record()
        if self._transposed is None:
            u = torch.zeros_like(f, requires_grad=True)
            with torch.enable_grad():
                grads = _gradients([f], list(leaves.values()), [u]) if f.requires_grad else ()
            known = {n: g for n, g in zip(leaves, grads) if g is not None and g.requires_grad}
            self._transposed = u, known
        u, known = self._transposed
        if not known:
            return torch.zeros_like(f)[None]
        columns = [directions[name][0].to(leaves[name]) for name in known]
        return _gradients([*known.values()], [u], columns)[0][None]


def _gradients(of: list[Tensor], by: list[Tensor], u: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the gradients of ⟨of, u⟩, which may be differentiated if gradients are enabled."""
    return torch.autograd.grad(
        of, by, u, retain_graph=True, create_graph=torch.is_grad_enabled(), allow_unused=True
    )


def _require(f: Tensor) -> Tensor:
    if not f.requires_grad:
        raise NotImplementedError(
            "The outputs of a batch do not depend on the parameters in the posterior, unlike "
            "those of earlier batches: for some inputs the forward pass runs under no_grad, or "
            "takes another branch. Choose `parameters` that all inputs use."
        )
    return f
