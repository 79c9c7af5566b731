"""Whether a network's derivatives can be trusted, and by which direction to take them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from torch_lla_em.blame import (
    first_layer,
    layer_at_fault,
    layer_of,
    name_layer,
)
from torch_lla_em.last_layer import floating_tensors, hooked
from torch_lla_em.network import Network
from torch_lla_em.parameters import ParameterLayout
from torch_lla_em.products import Path

# rounding in a deep network in float32 or with TF32, well below what a wrong rule leaves
_ROUNDING = 0.03

_CACHED_BYTES = 2**24


class Products(Protocol):
    """What is checked: a linear model."""

    network: Network
    layout: ParameterLayout
    path: Path

    def prepare(self, x: Any) -> Any: ...
    def forget_last_layer(self) -> None: ...
    def outputs(self, x: Any) -> Tensor: ...
    def jvp(self, x: Any, w: Tensor) -> tuple[Tensor, Tensor]: ...
    def vjp(self, x: Any) -> tuple[Tensor, Callable[[Tensor, Tensor], None]]: ...


class Report(NamedTuple):
    """What the probe has found."""

    path: Path
    """The directions taken."""

    adjoint_error: float
    """|⟨u, J v⟩ - ⟨Jᵀu, v⟩| over ‖u‖ ‖J v‖, for one random u and v."""

    forward: str
    """Why J w is not taken by forward mode; empty if it is."""

    last_layer: bool
    """Whether the trunk runs once a batch and only the last layer is differentiated."""

    def __str__(self) -> str:
        direction = "forward mode" if self.path.forward else "two reverse passes"
        loops = [name for name, step in zip(("J w", "Jᵀu"), self.path[1:]) if step == 1]
        return "".join(
            [
                f"J w by {direction}, adjoint error {self.adjoint_error:.1e}",
                f"; forward mode was left because it {self.forward}" if self.forward else "",
                f"; the columns of {' and '.join(loops)} run one by one, since an operation "
                "cannot be batched over them" if loops else "",
                "; the trunk runs once a batch" if self.last_layer else "",
            ]
        )


class _Columns(NamedTuple):
    """Two random columns on each side of J, and the derivatives that are known."""

    x: Any
    v: Tensor
    u: Tensor
    JTu: Tensor
    tolerance: float
    at_once: int | None


def choose_path(model: Products, x: Any) -> Report:
    """Return the directions that agree with plain reverse mode; raise where none does."""
    network, start = model.network, model.path
    before = _fingerprint(network.module)
    devices = {p.device.index or 0 for p in network.module.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices=sorted(devices)):
        reference = _reference(model, x)
        prepared = model.prepare(x)
        try:
            report = _choose(model, prepared, reference)
        except NoJacobianError:
            if prepared is x:
                raise
            model.forget_last_layer()
            model.path, prepared = start, x
            report = _choose(model, x, reference)
    changed = [name for name, mark in _fingerprint(network.module).items() if before[name] != mark]
    if changed:
        raise RuntimeError(
            f"The forward pass writes to {changed[0]!r} through its memory (as `.data` does), "
            "which would change the trained network. Write to a copy, or register a buffer "
            "and assign to it."
        )
    return report._replace(last_layer=prepared is not x)


class NoJacobianError(NotImplementedError):
    """Neither direction of differentiation gives the Jacobian of a model."""


def _reference(model: Products, x: Any) -> _Columns:
    """Check the outputs, and take Jᵀu as training does: by backward, from the module itself."""
    network, names = model.network, model.layout.names
    f = _checked_outputs(model, x)
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(2, *f.shape, generator=generator, dtype=torch.float64).to(f)
    weights = network.weights(names)
    eps = max(torch.finfo(t.dtype).eps for t in (f, *weights.values()))
    v = torch.randn(2, model.layout.size, generator=generator, dtype=torch.float64)
    JTu, total = torch.zeros_like(v), model.layout.flatten(weights)
    v, JTu = v.to(total), JTu.to(total)
    columns = _Columns(x, v, u, JTu, math.sqrt(eps), _columns_at_once(network, x))
    model.layout.add_(JTu[0], _plain_gradient(network, names, x, u[0]))
    if not JTu[0].any():
        raise NoJacobianError(
            "The outputs do not depend on the random weights: nothing of the forward pass "
            f"from {names[0]!r} on is recorded for backward. Look for no_grad, detach or "
            "another copy of the model in the forward pass, or change `parameters`."
        )
    model.path = model.path._replace(jvp_columns=1, vjp_columns=1)
    ours = torch.zeros_like(JTu[:1])
    model.vjp(x)[1](u[:1], ours)
    if _distance(ours[0], JTu[0]) > columns.tolerance:
        blocks = zip(names, model.layout.block_sums((ours[0] - JTu[0]).square()))
        worst = max(blocks, key=lambda block: block[1])[0]
        raise RuntimeError(
            f"The parameter {worst!r} is used in a place where it cannot be exchanged: the "
            "model, or forward_fn, also keeps it outside of the module's parameters (in a "
            "list, a closure or a second model). Register it there, or leave it out of "
            "`parameters`."
        )
    return columns


def _checked_outputs(model: Products, x: Any) -> Tensor:
    network = model.network
    with mock.patch.object(CheckpointFunction, "apply", _reentrant):
        try:
            outputs = network.substituted(lambda: network.call(x))({})
        except _ReentrantCheckpoint as error:
            raise NotImplementedError(
                f"{name_layer(network, layer_of(error, network))} uses reentrant activation "
                "checkpointing, whose derivatives leave out weights without a word. Pass "
                "use_reentrant=False to torch.utils.checkpoint, or switch it off."
            ) from None
    if not -outputs.ndim <= network.class_dim < outputs.ndim:
        raise ValueError(
            f"The outputs have shape {tuple(outputs.shape)}, so class_dim={network.class_dim} "
            f"is no axis of theirs; pass one from {-outputs.ndim} to {outputs.ndim - 1}."
        )
    if not outputs.is_floating_point():
        raise TypeError(
            f"The outputs are {outputs.dtype}, not floating point: let the model, or "
            "forward_fn, return the logits, not the decision."
        )
    if not outputs.isfinite().all():
        path = first_layer(network, x, lambda a, _: not a.isfinite().all())
        raise ValueError(
            f"The outputs are not finite on the first batch; {name_layer(network, path)} is "
            "the first to return such a value. Look at the inputs and the weights there."
        )
    f, again = model.outputs(x), model.outputs(x)
    if _distance(f, again) > math.sqrt(torch.finfo(f.dtype).eps):
        path = first_layer(network, x, lambda a, b: _distance(a, b) > 0)
        raise ValueError(
            f"Two forward passes over the same inputs disagree, first in "
            f"{name_layer(network, path)}: it draws random numbers, or remembers, in eval "
            "mode too. F.dropout(x) needs training=self.training."
        )
    return f


class _ReentrantCheckpoint(Exception):
    """Raised in place of a reentrant checkpoint."""


def _reentrant(*_: Any) -> None:
    raise _ReentrantCheckpoint


def _plain_gradient(network: Network, names: tuple[str, ...], x: Any, u: Tensor) -> dict:
    parameters = dict(network.module.named_parameters())
    flags = {name: p.requires_grad for name, p in parameters.items()}
    try:
        with torch.enable_grad():
            for name, parameter in parameters.items():
                parameter.requires_grad_(name in names)
            # the parameters stay in place; only what a forward pass may write is copied
            f = network.substituted(lambda: network.call(x))(parameters)
            if not f.requires_grad:
                return {}
            f = f.movedim(network.class_dim, -1)
            chosen = [parameters[name] for name in names]
            grads = torch.autograd.grad(f, chosen, u, allow_unused=True)
    finally:
        for name, parameter in parameters.items():
            parameter.requires_grad_(flags[name])
    return {name: g.to_dense() for name, g in zip(names, grads) if g is not None}


def _choose(model: Products, x: Any, columns: _Columns) -> Report:
    """Try forward mode, then two reverse passes; then all columns at once."""
    start = model.path._replace(jvp_columns=1, vjp_columns=1)
    directions = (True, False) if start.forward else (False,)
    errors: dict[bool, float] = {}
    reasons: dict[bool, str] = {}
    for forward in directions:
        model.path = start._replace(forward=forward)
        try:
            errors[forward] = _adjoint_error(model, x, columns)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a direction does not know how to do
            reasons[forward] = _reason(model, columns.x, error)
            continue
        if errors[forward] <= columns.tolerance:
            break
        reasons[forward] = f"disagrees with backward (adjoint error {errors[forward]:.1e})"
    forward = min(errors, key=errors.__getitem__, default=False)
    if errors.get(forward, math.inf) > max(columns.tolerance, _ROUNDING):
        raise NoJacobianError(_refusal(model, reasons))
    model.path = start._replace(forward=forward)
    for side in ("vjp_columns", "jvp_columns"):
        if _vmap_works(model, x, columns, side):
            model.path = model.path._replace(**{side: columns.at_once})
    why = "" if forward else reasons.get(True, "treats the rows of a tied padding_idx otherwise")
    return Report(model.path, errors[forward], why, False)


def _adjoint_error(model: Products, x: Any, columns: _Columns) -> float:
    _, Jv = model.jvp(x, columns.v[:1])
    left = (columns.u[0].double() * Jv[0].double()).sum()
    right = (columns.JTu[0].double() * columns.v[0].double()).sum()
    size = columns.u[0].double().norm() * Jv[0].double().norm()
    size = torch.maximum(size, columns.JTu[0].double().norm())
    error = ((left - right).abs() / size).item()
    return error if math.isfinite(error) else math.inf


def _columns_at_once(network: Network, x: Any) -> int | None:
    """How many columns a CPU takes best: beyond some size every temporary is page-faulted.

    The allocator hands memory of 32 MiB and more back to the system at once; on a small
    CNN at 512 images, 32 columns at once took 2.5 times as long as 2.
    """
    if network.device.type != "cpu":
        return None
    sizes = [1]

    def see(path: str, layer: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        sizes.extend(t.nbytes for t in floating_tensors(output))

    with hooked(network.module, see):
        network.substituted(lambda: network.call(x))({})
    return max(2, _CACHED_BYTES // max(sizes))


def _vmap_works(model: Products, x: Any, columns: _Columns, side: str) -> bool:
    """Whether two columns at once equal the same two one by one."""

    def product() -> Tensor:
        if side == "jvp_columns":
            return model.jvp(x, columns.v)[1]
        total = torch.zeros_like(columns.JTu)
        model.vjp(x)[1](columns.u, total)
        return total

    start, one_by_one = model.path, product()
    try:
        model.path = start._replace(**{side: None})
        return _distance(product(), one_by_one) <= max(columns.tolerance, _ROUNDING)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # an operation that vmap does not know
        return False
    finally:
        model.path = start


def _reason(model: Products, x: Any, error: Exception) -> str:
    network = model.network
    path = layer_of(error, network)
    if not model.path.forward:
        path = layer_at_fault(network, model.layout.names, x) or path
    message = str(error).strip().split("\n")[0][:160].rstrip(".")
    return f"fails in {name_layer(network, path)} ({type(error).__name__}: {message})"


def _disagreement(model: Products, x: Any, error: float) -> str:
    words = f"disagrees with backward (adjoint error {error:.1e})"
    if model.path.forward:
        return words
    path = layer_at_fault(model.network, model.layout.names, x)
    return f"{words}, first in {name_layer(model.network, path)}"


def _refusal(model: Products, reasons: dict[bool, str]) -> str:
    words = {True: "by forward mode it", False: "by two reverse passes it"}
    tried = "; ".join(f"{words[forward]} {reason}" for forward, reason in reasons.items())
    return (
        f"The Jacobian of the model is not available: {tried}. Replace that layer by one made "
        "of differentiable operations (nn.EmbeddingBag: nn.Embedding and a mean; fused "
        'attention: attn_implementation="eager"; an own autograd.Function: give it a `jvp`, '
        "or a backward that can be differentiated); or choose `parameters` that lie after "
        'it, such as "last_layer".'
    )


def _distance(a: Tensor, b: Tensor) -> float:
    """‖a - b‖ / ‖b‖."""
    a, b = a.detach().double(), b.detach().double()
    return ((a - b).norm() / b.norm().clamp(min=1e-300)).item()


def _fingerprint(module: nn.Module) -> dict[str, tuple[int, int]]:
    """A mark of each tensor that any write to it changes: its version and its bits' sum."""
    marks = {}
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        version = -1 if tensor.is_inference() else tensor._version
        bits = tensor.detach()
        if bits.element_size() in integers and bits.layout is torch.strided:
            bits = bits.contiguous().view(integers[bits.element_size()])
            marks[name] = (version, bits.sum(dtype=torch.int64).item())
        else:
            marks[name] = (version, 0)
    return marks
