"""The linear model at one batch of examples: f, J w and Jᵀ u, in general by ``torch.func``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from torch_lla_em.data import tensors_in
from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.parameters import ParameterLayout

# bytes of the largest temporary tensor on a CPU; larger ones are allocated by the system each time,
# which takes as long as the arithmetic
_FETCHED_BYTES = 2**24


class Report(NamedTuple):
    """The result of the probe."""

    names: tuple[str, ...] = ()
    """The weights whose Jacobian is computed by factors: all that have an influence, or none."""

    shared: tuple[str, ...] = ()
    """Tables of which one lookup is used for all examples."""

    forward: bool | None = None
    """Whether J w is by forward mode, or by two reverse passes; None if not known yet, as all weights
    have factors."""

    adjoint_error: float = 0.0
    """Relative error of J w and Jᵀu compared with ``backward``."""

    least_columns: int = 1
    """Number of columns from which factors are worth computing even if they are not stored."""

    example_bytes: int | None = None
    """Bytes of the largest tensor of one example in a forward pass, on a CPU; None elsewhere."""

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

    def at_once(self, examples: int) -> int | None:
        """Return the number of columns whose tensors a CPU does not allocate each time; None: all."""
        if self.example_bytes is None:
            return None
        return max(1, _FETCHED_BYTES // max(1, self.example_bytes * examples))

    def __str__(self) -> str:
        ways = {True: "forward mode", False: "two reverse passes", None: "factors"}
        words = f"J w by {ways[self.forward]}, adjoint error {self.adjoint_error:.1e}"
        return f"{words}; {len(self.names)} parameter tensors have factors" if self.names else words


class Rows:
    """One batch of examples; ``push`` and ``pull`` may be called any number of times.

    Call them inside ``network.guarded()``. Examples are never vmapped over, columns are.
    """

    f: Tensor
    """f(x), shape (B, ..., C)."""

    features: Tensor | None = None
    """h, (B, ..., D), if J w = W h for all parameters W, those of a last linear layer; else None.

    The last feature is 1 if the layer has a bias."""

    nbytes: float = inf
    """Memory in bytes for storing this between passes; infinity: not worth storing."""

    def __init__(self, layout: ParameterLayout, columns: int | None):
        self._layout = layout
        self.columns = columns
        """Number of columns that are computed at once; None: all."""

    def at_most(self, columns: int | None) -> Rows:
        """Compute no more columns at once from now on; None: as many as before."""
        if columns is not None:
            self.columns = min(columns, self.columns or columns)
        return self

    def push(self, w: Tensor) -> Tensor:
        """Return J w, shape (K, B, ..., C), of columns (K, P)."""
        step = self.columns or len(w)
        parts = [self._push(self._layout.unflatten(some)) for some in w.split(step)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def pull(self, u: Tensor, total: Tensor) -> None:
        """Add Jᵀ u for u (K, B, ..., C) to a total (K, P), completely or, after an error, not at all."""
        step = self.columns or len(u)
        # all memory is allocated before the first number is added
        found = [
            {n: g.reshape(len(g), -1).to(total.device, total.dtype) for n, g in part.items()}
            for part in map(self._pull, u.split(step))
        ]
        for part, gradients in zip(total.split(step), found):
            self._layout.add_(part, gradients)

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

    J w is by ``torch.func.jvp``, and Jᵀu by one recorded graph: ``torch.func.vjp`` takes 1.0 to 1.3 times as
    long for 17 columns, and for one 1.1 (LeNet) to 2.3 times (an MLP with one input). Networks with operations that this does not support are differentiated by
    reverse mode twice, column by column. Differentiable in x inside ``enable_grad``.
    """

    def __init__(
        self,
        network: Network,
        layout: ParameterLayout,
        x: Any,
        columns: int | None = None,
        forward: bool = False,
    ):
        """``forward``: J w by forward mode, so many columns at once; else by two reverse passes."""
        super().__init__(layout, columns if forward else 1)
        self._forward, self._values = forward, network.weights(layout.names)
        self._of_weights = network.function(x)
        self._f: Tensor | None = None
        self._graph: tuple[Tensor, list[Tensor]] | None = None
        self._transposed: tuple[Tensor, dict[str, Tensor]] | None = None

    def _function(self, weights: dict[str, Tensor]) -> Tensor:
        with Intercepted(_contiguous):
            return self._of_weights(weights)

    @property
    def f(self) -> Tensor:
        """f(x), shape (B, ..., C)."""
        f = self._recorded()[0] if self._f is None else self._f
        return f if torch.is_grad_enabled() else f.detach()

    def _recorded(self) -> tuple[Tensor, list[Tensor]]:
        """Return f with its graph, and the weights at its leaves."""
        if self._graph is None:
            leaves = {name: w.detach().requires_grad_() for name, w in self._values.items()}
            with torch.enable_grad():
                f = self._function(leaves)
            if not f.requires_grad:
                raise NotImplementedError(
                    "The outputs of a batch do not depend on the parameters in the posterior, unlike "
                    "those of earlier batches: for some inputs the forward pass runs under no_grad, or "
                    "takes another branch. Choose `parameters` that all inputs use."
                )
            self._graph = f, [*leaves.values()]
        return self._graph

    def _push(self, directions: dict[str, Tensor]) -> Tensor:
        if not self._forward:
            return self._pushed_by_reverse(directions)
        # forward mode copies views that do not start at the beginning of their memory
        columns = {n: directions[n].to(w, copy=True) for n, w in self._values.items()}
        jvp = partial(torch.func.jvp, self._function, (self._values,))
        if len(next(iter(columns.values()))) == 1:
            self._f, Jw = jvp(({name: column[0] for name, column in columns.items()},))[:2]
            return Jw[None]
        self._f, Jw = torch.vmap(jvp, out_dims=(None, 0))((columns,))[:2]
        return Jw

    def _pull(self, u: Tensor) -> dict[str, Tensor]:
        f, leaves = self._recorded()
        known: list[str] = []

        def pull(u: Tensor) -> tuple[Tensor, ...]:
            gradients = _gradients([f], leaves, [u.to(f)])
            known[:] = [n for n, g in zip(self._values, gradients) if g is not None]
            return tuple(g for g in gradients if g is not None)

        found = torch.vmap(pull)(u) if len(u) > 1 else [g[None] for g in pull(u[0])]
        return dict(zip(known, found))

    def _pushed_by_reverse(self, directions: dict[str, Tensor]) -> Tensor:
        """Return J w as the derivative of u -> Jᵀ u at u = 0, since this map is linear."""
        f, leaves = self._recorded()
        if self._transposed is None:
            u = torch.zeros_like(f, requires_grad=True)
            with torch.enable_grad():
                found = zip(self._values, _gradients([f], leaves, [u]))
            self._transposed = u, {n: g for n, g in found if g is not None and g.requires_grad}
        u, known = self._transposed
        if not known:
            return torch.zeros_like(f)[None]
        columns = [directions[name][0].to(gradient) for name, gradient in known.items()]
        return _gradients([*known.values()], [u], columns)[0][None]


class Intercepted(TorchFunctionMode):
    """Gives every torch function of a forward pass to another function, with its arguments."""

    def __init__(self, call: Callable[[Callable[..., Any], tuple, dict[str, Any]], Any]):
        super().__init__()
        self._call = call

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        return self._call(func, args, kwargs or {})


def _contiguous(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Copy inputs of linear layers that are not contiguous.

    ``torch.func`` multiplies a contiguous (B, L, E) by the weight in one product. For other layouts,
    such as the transposed outputs of attention, it takes one product for each of the B or L entries,
    and a gradient of the weight's size for each. For a ViT this takes four to six times as long.
    """
    # the functions that multi-head attention calls do not come here
    count = {F.linear: 1, F.multi_head_attention_forward: 3}.get(func, 0)
    copies: dict[int, Tensor] = {}  # equal arguments stay one tensor
    for tensor in args[:count]:
        if tensor.dim() > 2 and not tensor.is_contiguous():
            copies.setdefault(id(tensor), tensor.contiguous())
    z = func(*(copies.get(id(own), own) for own in args), **kwargs)
    return _without_padding(z, *args, **kwargs) if func is F.embedding else z


def _without_padding(
    z: Tensor, input: Tensor, weight: Tensor, padding_idx: int | None = None, *_: Any, **__: Any
) -> Tensor:
    """Cut the row of padding off, which gets no gradient in training, but one by forward mode."""
    if padding_idx is None:
        return z
    return torch.where((input == padding_idx % len(weight))[..., None], z.detach(), z)


def _gradients(of: list[Tensor], by: Sequence[Tensor], u: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the gradients of ⟨of, u⟩, which may be differentiated if gradients are enabled."""
    return torch.autograd.grad(
        of, by, u, retain_graph=True, create_graph=torch.is_grad_enabled(), allow_unused=True
    )


def num_examples(x: Any) -> int:
    """Return the number of examples of inputs, from the shapes of their tensors."""
    return next((len(tensor) for tensor in tensors_in(x) if tensor.dim()), 1)
