"""J w and Jᵀ u of any network at one batch, by automatic differentiation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.jacobian.network import NoJacobianError
from torch_lla_em.jacobian.rows import FETCHED_BYTES, Rows, Weights, num_examples

# if the CPU cache holds fewer columns than this, Jᵀu is faster column by column: columns of J w
# share a forward pass, but backward passes share nothing, and stacking them costs time
_PULLED_ALONE = 8


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
    """The linear model at a batch by ``torch.func``; differentiable in x inside ``enable_grad``."""

    def __init__(
        self,
        weights: Weights,
        x: Any,
        path: Path,
        names: Sequence[str] | None = None,
    ):
        """``names``: some of the weights, if not all."""
        super().__init__(weights, path.at_once(num_examples(x)))
        self._path, self._names = path, names
        self._function, self._values = weights.network.function(x), weights.values(names)
        self._f: Tensor | None = None
        self._recorded: tuple[Tensor, dict[str, Tensor]] | None = None
        self._transposed: tuple[Tensor, dict[str, Tensor]] | None = None

    @property
    def f(self) -> Tensor:
        """f(x), shape (B, ..., C)."""
        if self._f is None:
            f, _ = self.forward()
            self._f = f if torch.is_grad_enabled() else f.detach()
        return self._f

    def push(self, w: Tensor) -> Tensor:
        """Return J w, shape (K, B, ..., C), of columns (K, P)."""
        jvp, parts = partial(torch.func.jvp, self._function, (self._values,)), []
        for directions in self._chunks(w):
            if not self._path.forward:
                Jw = self._push_by_reverse(directions)
            elif len(next(iter(directions.values()))) > 1:
                self._f, Jw = torch.vmap(jvp, out_dims=(None, 0))((directions,))[:2]
            else:
                self._f, Jw = jvp(({name: columns[0] for name, columns in directions.items()},))[:2]
                Jw = Jw[None]
            parts.append(Jw)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _chunks(self, w: Tensor) -> Iterator[dict[str, Tensor]]:
        for directions in super()._chunks(w):
            directions = {n: directions[n] for n in self._values}
            if self._path.forward:
                directions = self._weights.unpadded(directions)
                # forward mode copies views that do not start at the beginning of their memory
                directions = {n: directions[n].to(w, copy=True) for n, w in self._values.items()}
            yield directions

    def _push_by_reverse(self, directions: dict[str, Tensor]) -> Tensor:
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
        return _pull([*known.values()], [u], [directions[name].to(leaves[name]) for name in known])[
            0
        ]

    def _pull(self, u: Tensor) -> dict[str, Tensor]:
        f, leaves = self.forward()
        if not f.requires_grad:
            if self._names is not None:
                return {}
            raise NoJacobianError(
                "The outputs of a batch do not depend on the parameters in the posterior, "
                "although those of earlier batches did. For some inputs the forward pass runs "
                "under no_grad or inference_mode, or takes another branch. Make it the same for "
                "all inputs, or choose `parameters` that all inputs use."
            )
        grads = _pull([f], list(leaves.values()), [u.to(f)])
        return {name: g for name, g in zip(leaves, grads) if g is not None}

    def forward(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return f with its graph, and the weights at its leaves."""
        if self._recorded is None:
            leaves = _leaves(self._values)
            with torch.enable_grad():
                self._recorded = self._function(leaves), leaves
        return self._recorded


def _leaves(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: w.detach().requires_grad_() for name, w in weights.items()}


def _pull(
    outputs: Sequence[Tensor], leaves: Sequence[Tensor], u: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the gradients of outputs in leaves, (K, *shape), for K columns u.

    ``torch.autograd.grad`` and not ``torch.func.vjp``: it is faster (a third, on a small
    CNN), and takes checkpointing and autograd functions without `setup_context`.
    """
    batched = len(u[0]) > 1
    grads = torch.autograd.grad(
        outputs,
        leaves,
        u if batched else [column[0] for column in u],
        retain_graph=True,
        create_graph=torch.is_grad_enabled(),
        allow_unused=True,
        is_grads_batched=batched,
    )
    return [g if g is None or batched else g[None] for g in grads]
