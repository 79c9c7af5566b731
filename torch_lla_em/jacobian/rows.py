"""The linear model at one batch of examples: f, J w and Jᵀ u, in general by ``torch.func``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_lla_em.data import tensors_in
from torch_lla_em.jacobian.network import Network, NoJacobianError
from torch_lla_em.jacobian.parameters import ParameterLayout

# bytes of the largest temporary tensor on a CPU; larger ones are allocated by the system each time,
# which takes as long as the arithmetic
FETCHED_BYTES = 2**24

# if the CPU cache holds fewer columns than this, Jᵀu is faster column by column, since stacked backward
# passes share nothing: J w and Jᵀu of 17 columns, 200 images and three convolutions take 355 and 443 ms
_PULLED_ALONE = 8


def num_examples(x: Any) -> int:
    """Return the number of examples of inputs, from the shapes of their tensors."""
    return next((len(tensor) for tensor in tensors_in(x) if tensor.dim()), 1)


class Weights:
    """The parameters in the posterior by name, and vectors in their space."""

    def __init__(self, network: Network, layout: ParameterLayout):
        self.network, self.layout = network, layout
        _refuse_scripted(network, layout)
        self.padding = _padding_rows(network, layout)

    @property
    def allow_forward(self) -> bool:
        """Whether forward mode is right: not for tied weights with a padding row in one use only."""
        return None not in self.padding.values()

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

    @property
    def features(self) -> Tensor | None:
        """h, (B, ..., D), if J w = W h for all parameters W, those of a last linear layer; else None.

        The last feature is 1 if the layer has a bias.
        """
        return None

    def push(self, w: Tensor) -> Tensor:
        """Return J w, shape (K, B, ..., C), of columns (K, P)."""
        parts = []
        for chunk in w.split(self.pushed or len(w)):
            parts.append(self._push(self._weights.layout.unflatten(chunk)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def pull(self, u: Tensor, total: Tensor) -> None:
        """Add Jᵀ u for u (K, B, ..., C) to a total (K, P), completely or, after an error, not at all."""
        step = self.pulled or len(u)
        # all memory is allocated before the first number is added
        found = []
        for chunk in u.split(step):
            found.append(_flat(self._pull(chunk), total))
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


def _flat(grads: Mapping[str, Tensor], total: Tensor) -> dict[str, Tensor]:
    return {
        name: grad.reshape(len(grad), -1).to(total.device, total.dtype)
        for name, grad in grads.items()
    }


class Path(NamedTuple):
    """How the products are computed; chosen once, by the probe."""

    forward: bool = True
    """J w by forward mode; otherwise by two reverse passes."""

    columns: int | None = None
    """Largest number of columns that are computed at once; None: no limit."""

    example_bytes: int | None = None
    """Bytes of the largest output of a layer for one example, on a CPU; None elsewhere."""

    def within(self, columns: int | None) -> Path:
        """Return the same path with at most ``columns`` columns at once."""
        return self._replace(columns=_least(self.columns, columns))

    def at_once(self, examples: int) -> tuple[int | None, int | None]:
        """Return the best numbers of columns of J w and of Jᵀ u at once; None: all."""
        cached = pulled = None
        if self.example_bytes is not None:
            cached = max(2, FETCHED_BYTES // max(1, self.example_bytes * examples))
            pulled = 1 if cached <= _PULLED_ALONE else cached
        return _least(self.columns, cached), _least(self.columns, pulled)


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


class ByAutodiff(Rows):
    """The linear model at a batch by its definition, ``torch.func.jvp`` and ``torch.func.vjp``.

    Networks with operations that these do not support are differentiated by reverse mode twice.
    Differentiable in x inside ``enable_grad``.
    """

    def __init__(self, weights: Weights, x: Any, path: Path):
        super().__init__(weights, path.at_once(num_examples(x)))
        self._path, self._values = path, weights.values()
        self._function = weights.network.function(x)
        self._f: Tensor | None = None
        self._pullback: Callable[[Tensor], tuple[dict[str, Tensor]]] | None = None
        self._recorded: tuple[Tensor, dict[str, Tensor]] | None = None
        self._transposed: tuple[Tensor, dict[str, Tensor]] | None = None

    @property
    def f(self) -> Tensor:
        """f(x), shape (B, ..., C)."""
        if self._f is None:
            f = self._reverse()[0] if self._path.forward else self.forward()[0]
            self._f = f if torch.is_grad_enabled() else f.detach()
        return self._f

    def push(self, w: Tensor) -> Tensor:
        """Return J w, shape (K, B, ..., C), of columns (K, P)."""
        if not self._path.forward:
            return super().push(w)
        jvp, parts = partial(torch.func.jvp, self._function, (self._values,)), []
        for chunk in w.split(self.pushed or len(w)):
            directions = self._weights.unpadded(self._weights.layout.unflatten(chunk))
            # forward mode copies views that do not start at the beginning of their memory
            directions = {n: directions[n].to(w, copy=True) for n, w in self._values.items()}
            if len(chunk) > 1:
                self._f, Jw = torch.vmap(jvp, out_dims=(None, 0))((directions,))[:2]
            else:
                self._f, Jw = jvp(({name: columns[0] for name, columns in directions.items()},))[:2]
                Jw = Jw[None]
            parts.append(Jw)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _reverse(self) -> tuple[Tensor, Callable[[Tensor], tuple[dict[str, Tensor]]]]:
        """Return f, and the map from u to Jᵀu."""
        if self._pullback is None or self._f is None:

            def function(weights: dict[str, Tensor]) -> Tensor:
                f = self._function(weights)
                # forward mode would go on, without the weights that a no_grad hides from training
                return self._require(f)

            self._f, self._pullback = torch.func.vjp(function, self._values)[:2]
        return self._f, self._pullback

    def _require(self, f: Tensor) -> Tensor:
        if not f.requires_grad:
            raise NoJacobianError(
                "The outputs of a batch do not depend on the parameters in the posterior, unlike "
                "those of earlier batches: for some inputs the forward pass runs under no_grad, or "
                "takes another branch. Choose `parameters` that all inputs use."
            )
        return f

    def _push(self, directions: dict[str, Tensor]) -> Tensor:
        """Return J w as the derivative of u -> Jᵀ u at u = 0, since this map is linear."""
        f, leaves = self.forward()
        if self._transposed is None and f.requires_grad:
            with torch.enable_grad():
                u = torch.zeros_like(f, requires_grad=True)
                grads = torch.autograd.grad(
                    f, list(leaves.values()), u, create_graph=True, allow_unused=True
                )
            known = {n: g for n, g in zip(leaves, grads) if g is not None and g.requires_grad}
            self._transposed = u, known
        u, known = self._transposed or (f, {})
        if not known:
            return f.new_zeros(len(next(iter(directions.values()))), *f.shape)
        columns = [directions[name].to(leaves[name]) for name in known]
        (Jw,) = torch.autograd.grad([*known.values()], [u], **_for_columns(columns))
        return Jw if len(columns[0]) > 1 else Jw[None]

    def _pull(self, u: Tensor) -> dict[str, Tensor]:
        if self._path.forward:
            pullback = self._reverse()[1]
            if len(u) > 1:
                return torch.vmap(pullback)(u.to(self.f))[0]
            return {name: g[None] for name, g in pullback(u[0].to(self.f))[0].items()}
        f, leaves = self.forward()
        self._require(f)
        grads = torch.autograd.grad([f], list(leaves.values()), **_for_columns([u.to(f)]))
        found = {name: g for name, g in zip(leaves, grads) if g is not None}
        return found if len(u) > 1 else {name: g[None] for name, g in found.items()}

    def forward(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return f with its graph, and the weights at its leaves."""
        if self._recorded is None:
            leaves = {name: w.detach().requires_grad_() for name, w in self._values.items()}
            with torch.enable_grad():
                self._recorded = self._function(leaves), leaves
        return self._recorded


def _for_columns(u: Sequence[Tensor]) -> dict[str, Any]:
    """Return the arguments of ``torch.autograd.grad`` for K columns u; a single one has no axis.

    Gradients of 17 columns are batched, which takes 1.0 ms for a perceptron at 8 examples and 1.6
    one by one.
    """
    batched = len(u[0]) > 1
    return {
        "grad_outputs": u if batched else [column[0] for column in u],
        "retain_graph": True,
        "create_graph": torch.is_grad_enabled(),
        "allow_unused": True,
        "is_grads_batched": batched,
    }
