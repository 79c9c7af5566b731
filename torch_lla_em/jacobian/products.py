"""J w and Jᵀ u of a function of named weights, by either direction of differentiation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torch_lla_em.jacobian.network import NoJacobianError

WeightFunction = Callable[[dict[str, Tensor]], Tensor]
Pullback = Callable[[Tensor], dict[str, Tensor]]


class Path(NamedTuple):
    """How the products are computed; chosen once, by the probe."""

    forward: bool = True
    """J w by forward mode; otherwise by two reverse passes."""

    jvp_columns: int | None = None
    """How many columns of J w are taken at once; None: all."""

    vjp_columns: int | None = None
    """How many columns of Jᵀ u are taken at once; None: all."""

    shared: bool = False
    """Whether one column takes J w and Jᵀ u from one forward pass."""


class Report(NamedTuple):
    """What the probe has found."""

    path: Path
    """The directions taken."""

    adjoint_error: float
    """Relative difference of ⟨u, J v⟩ and ⟨Jᵀu, v⟩, for v = Jᵀu and for u = J v."""

    forward: str
    """Why J w is not taken by forward mode; empty if it is."""

    unbatched: tuple[str, ...] = ()
    """The products of which an operation cannot be batched over columns."""

    factors: str = ""
    """How many of the weights have a Jacobian in factors, and what that gives."""

    def __str__(self) -> str:
        direction = "forward mode" if self.path.forward else "two reverse passes"
        return "".join(
            [
                f"J w by {direction}, adjoint error {self.adjoint_error:.1e}",
                f"; forward mode was left because it {self.forward}" if self.forward else "",
                f"; the columns of {' and '.join(self.unbatched)} run one by one, since an "
                "operation cannot be batched over them"
                if self.unbatched
                else "",
                f"; {self.factors}" if self.factors else "",
            ]
        )


def jvp(
    function: WeightFunction, weights: dict[str, Tensor], tangents: dict[str, Tensor], path: Path
) -> tuple[Tensor, Tensor]:
    """Return f, shape (B, ..., C), and J w, shape (K, B, ..., C), from tangents (K, *shape)."""
    if not path.forward:
        return _jvp_by_reverse(function, weights, tangents, path.jvp_columns)

    def push(tangent: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        f, Jw = torch.func.jvp(function, (weights,), (tangent,))[:2]
        return f, Jw

    num_columns, chunks = _num_columns(tangents), []
    step = path.jvp_columns or num_columns
    for start in range(0, num_columns, step):
        chunk = _columns(tangents, weights, slice(start, start + step), copy=True)
        if _num_columns(chunk) > 1:
            f, Jw = torch.vmap(push, out_dims=(None, 0))(chunk)
        else:
            f, Jw = push({name: tangent[0] for name, tangent in chunk.items()})
            Jw = Jw[None]
        chunks.append(Jw)
    return f, torch.cat(chunks) if len(chunks) > 1 else chunks[0]


def _jvp_by_reverse(
    function: WeightFunction,
    weights: dict[str, Tensor],
    tangents: dict[str, Tensor],
    columns: int | None,
) -> tuple[Tensor, Tensor]:
    """J w as the derivative of u -> Jᵀ u, which is linear, so u may stay 0."""
    leaves, num_columns = _leaves(weights), _num_columns(tangents)
    known, chunks = [], []
    with torch.enable_grad():
        f = function(leaves)
        if f.requires_grad:
            u = torch.zeros_like(f, requires_grad=True)
            grads = torch.autograd.grad(
                f, list(leaves.values()), u, create_graph=True, allow_unused=True
            )
            known = [(n, g) for n, g in zip(leaves, grads) if g is not None and g.requires_grad]
    step = columns or num_columns
    for start in range(0, num_columns if known else 0, step):
        chunk = _columns(tangents, leaves, slice(start, start + step))
        chunks.append(_pull([g for _, g in known], [u], [chunk[name] for name, _ in known])[0])
    Jw = torch.cat(chunks) if chunks else f.new_zeros(num_columns, *f.shape)
    return f if torch.is_grad_enabled() else f.detach(), Jw


def vjp(
    function: WeightFunction, weights: dict[str, Tensor], some: bool = False
) -> tuple[Tensor, Pullback]:
    """Return f, shape (B, ..., C), and the map u -> Jᵀ u, (K, B, ..., C) to (K, *shape).

    Weights that f does not depend on are left out of the answer; all only if they are ``some``.
    """
    leaves = _leaves(weights)
    with torch.enable_grad():
        f = function(leaves)
    if not (f.requires_grad or some):
        raise NoJacobianError(
            "The outputs of a batch do not depend on the random weights, as those of batches "
            "before it did: the forward pass runs under no_grad or inference_mode, or takes "
            "another branch, for some inputs. Run it alike for all of them, or choose "
            "`parameters` that all of them use."
        )
    return f.detach(), _pullback(f, leaves)


def jvp_and_vjp(
    function: WeightFunction, weights: dict[str, Tensor], tangents: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Pullback]:
    """Return f, J w of one column, (1, B, ..., C), and the map u -> Jᵀ u, from one forward pass.

    A forward pass is a fifth of the work of one column, and this one saves the second.
    """
    leaves = _leaves(weights)
    column = _columns(tangents, weights, slice(0, 1), copy=True)
    # by the dual numbers themselves: torch.func wraps every tensor once more
    with torch.enable_grad(), forward_ad.dual_level():
        duals = {n: forward_ad.make_dual(leaf, column[n][0]) for n, leaf in leaves.items()}
        f, Jw = forward_ad.unpack_dual(function(duals))
    Jw = torch.zeros_like(f) if Jw is None else Jw
    return f.detach(), Jw.detach()[None], _pullback(f, leaves)


def _pullback(f: Tensor, leaves: dict[str, Tensor]) -> Pullback:
    """Return the map u -> Jᵀ u along a graph from leaves to f."""

    def pullback(u: Tensor) -> dict[str, Tensor]:
        if not f.requires_grad:
            return {}
        grads = _pull([f], list(leaves.values()), [u.to(f)])
        return {name: g for name, g in zip(leaves, grads) if g is not None}

    return pullback


def _leaves(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: w.detach().requires_grad_() for name, w in weights.items()}


def _columns(
    tangents: dict[str, Tensor], weights: dict[str, Tensor], which: slice, copy: bool = False
) -> dict[str, Tensor]:
    """Return these columns where the weights are, and of their kind.

    Forward mode copies all that is not at the start of its memory, into what it fills with
    zeros first; of a ``copy`` it does not.
    """
    return {name: t[which].to(weights[name], copy=copy) for name, t in tangents.items()}


def _num_columns(tangents: dict[str, Tensor]) -> int:
    return len(next(iter(tangents.values())))


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
