"""Whether a network's derivatives can be trusted, and by which direction to take them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torch_lla_em.jacobian.autodiff import Path
from torch_lla_em.jacobian.factored import Factored
from torch_lla_em.jacobian.faults import (
    checked_outputs,
    distance,
    fingerprint,
    layer_at_fault,
    layer_of,
    name_layer,
    plain_gradients,
)
from torch_lla_em.jacobian.layers import floating_tensors, hooked
from torch_lla_em.jacobian.network import Network, NoJacobianError
from torch_lla_em.jacobian.parameters import ParameterLayout
from torch_lla_em.jacobian.rows import Rows, num_examples
from torch_lla_em.jacobian.trial import find_factors
from torch_lla_em.runtime import is_shortage

# rounding in a deep network in float32 or with TF32, well below what a wrong rule leaves
_ROUNDING = 0.03

# blocks whose gradient is smaller than this share of the largest count for less: rounding
_SMALL = 1e-3


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
    """How many of the weights have a Jacobian in factors."""

    examples: int = 1
    """How many were looked at: of one it cannot be told what has factors."""

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


class Products(Protocol):
    """What is checked: a linear model."""

    network: Network
    layout: ParameterLayout
    path: Path
    factored: Factored | None

    def by_autodiff(self, x: Any) -> Rows: ...


class _Columns(NamedTuple):
    """Two columns on each side of J, and what is known of their derivatives."""

    v: Tensor
    """Jᵀu, of blocks of one size, and a random one: (2, P)."""

    known: Tensor
    """⟨u, J v⟩ of the first."""

    u: Tensor
    """(2, B, ..., C)."""

    JTu: Tensor
    """(2, P)."""

    tolerance: float
    example_bytes: int | None
    """Bytes of the largest output of a layer for one example, on a CPU."""


def choose_path(model: Products, x: Any) -> Report | None:
    """Return the directions that agree with plain reverse mode; raise where none does.

    None where J is zero at these inputs, by which nothing can be told.
    """
    network, start = model.network, model.path
    before = fingerprint(network.module)
    devices = {p.device.index or 0 for p in network.module.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            columns = _columns(model, x)
            report = None
            if columns is not None:
                report = _choose(model, x, columns)
                model.factored = find_factors(model, x)
        except Exception:  # perhaps of memory: with fewer rows all of it is tried again
            model.path = start
            raise
    changed = [name for name, mark in fingerprint(network.module).items() if before[name] != mark]
    if changed:
        raise RuntimeError(
            f"The forward pass writes to {changed[0]!r} through its memory (as `.data` does), "
            "which would change the trained network. Write to a copy, or register a buffer "
            "and assign to it."
        )
    if report is None:
        model.path = start
        return None
    return report._replace(path=model.path, factors=_words_of_factors(model))


def _words_of_factors(model: Products) -> str:
    if model.factored is None:
        return ""
    of = dict(zip(model.layout.names, model.layout.sizes))
    number = sum(of[name] for name in model.factored.names)
    return f"{number:,} of {model.layout.size:,} weights have factors"


def _columns(model: Products, x: Any) -> _Columns | None:
    """Check the outputs, and take Jᵀu as training does: by backward, from the module itself.

    None where it is zero, as of inputs that are, or of units that none of them wakes.
    """
    network, layout, sizes = model.network, model.layout, [1]

    def see(path: str, layer: Any, args: tuple, kwargs: dict, output: Any) -> None:
        sizes.extend(t.nbytes for t in floating_tensors(output))

    with hooked(network.module, see):
        f = checked_outputs(network, layout.names, x)
    generator = torch.Generator("cpu").manual_seed(0)
    weights = network.weights(layout.names)
    w_MAP = layout.flatten(weights)
    u = torch.randn(2, *f.shape, generator=generator, dtype=f.dtype, device="cpu").to(f)
    v = torch.randn(2, len(w_MAP), generator=generator, dtype=w_MAP.dtype, device="cpu").to(w_MAP)
    JTu = torch.zeros_like(v)
    for total, grads in zip(JTu, plain_gradients(network, layout.names, x, u)):
        if not grads:
            raise NoJacobianError(
                "The outputs do not depend on the random weights: nothing of the forward pass "
                f"from {layout.names[0]!r} on is recorded for backward. Look for no_grad, detach "
                "or another copy of the model in the forward pass, or change `parameters`."
            )
        layout.add_(total, grads)
    if not JTu[0].any():
        return None
    squares = layout.block_sums(JTu[0].double().square())
    norms = squares.clamp_min(_SMALL**2 * squares.max())
    v[0] = JTu[0].double() / layout.expand(norms)
    eps = max(torch.finfo(t.dtype).eps for t in (f, *weights.values()))
    on_cpu = network.device.type == "cpu"
    example_bytes = -(-max(sizes) // num_examples(x)) if on_cpu else None
    return _Columns(v, (squares / norms).sum(), u, JTu, math.sqrt(eps), example_bytes)


def _choose(model: Products, x: Any, columns: _Columns) -> Report:
    """Try forward mode, then two reverse passes; then all columns at once."""
    start = model.path._replace(jvp_columns=1, vjp_columns=1)
    directions = (True, False) if start.forward else (False,)
    errors: dict[bool, float] = {}
    Jv: dict[bool, Tensor] = {}
    reasons: dict[bool, str] = {}
    for forward in directions:
        model.path = start._replace(forward=forward)
        try:
            errors[forward], Jv[forward] = _adjoint_error(model, x, columns)
        except Exception as error:  # whatever a direction does not know how to do
            _refuse_shortage(error)
            reasons[forward] = _reason(model, x, error)
            continue
        if errors[forward] <= columns.tolerance:
            break
        reasons[forward] = _disagreement(model, x, errors[forward])
    # near each other, both are at rounding: layers that compute in a lower precision
    forward = min(errors, key=lambda side: errors[side] / (10 if side else 1), default=False)
    if errors.get(forward, math.inf) > max(columns.tolerance, _ROUNDING):
        raise NoJacobianError(_refusal(model, reasons))
    model.path = start._replace(forward=forward)
    unbatched = []
    for side, name in (("jvp_columns", "J w"), ("vjp_columns", "Jᵀu")):
        if _vmap_works(model, x, columns, side, Jv[forward]):
            model.path = model.path._replace(**{side: None})
        else:
            unbatched.append(name)
    model.path = model.path._replace(example_bytes=columns.example_bytes)
    model.path = model.path._replace(shared=forward and _shares(model, x, columns, Jv[forward]))
    why = "" if forward else reasons.get(True, "treats the rows of a tied padding_idx otherwise")
    examples = columns.u.shape[1] if columns.u.dim() > 2 else 1
    return Report(model.path, errors[forward], why, tuple(unbatched), examples=examples)


def _refuse_shortage(error: Exception) -> None:
    """Raise what says nothing of the network: with fewer rows the same may fit."""
    if is_shortage(error):
        raise error


def _adjoint_error(model: Products, x: Any, columns: _Columns) -> tuple[float, Tensor]:
    """How far ⟨u, J v⟩ is from ⟨Jᵀu, v⟩ where no number of outputs can hide it; and J v.

    v = Jᵀu, of blocks of one size, shows what J lacks; u = J v what it has too much.
    """
    layout, known = model.layout, columns.known
    Jv = model.by_autodiff(x).push(columns.v)
    lacking = ((columns.u[0].double() * Jv[0].double()).sum() - known).abs() / known
    size = Jv[1].double().norm()
    pulled = torch.zeros_like(columns.v[1])
    u = (Jv[1:].double() / size).to(columns.u)
    layout.add_(pulled, plain_gradients(model.network, layout.names, x, u)[0])
    beyond = (size - (pulled.double() * columns.v[1].double()).sum()).abs() / size
    error = torch.stack([lacking, beyond.to(lacking)]).max().item()
    return error if math.isfinite(error) else math.inf, Jv


def _vmap_works(model: Products, x: Any, columns: _Columns, side: str, Jv: Tensor) -> bool:
    """Whether two columns at once equal the same two one by one."""
    start = model.path
    try:
        model.path = start._replace(**{side: None})
        if side == "jvp_columns":
            known, found = Jv, model.by_autodiff(x).push(columns.v)
        else:
            known, found = columns.JTu, torch.zeros_like(columns.JTu)
            model.by_autodiff(x).pull(columns.u, found)
        return all(
            distance(*pair) <= max(columns.tolerance, _ROUNDING) for pair in zip(found, known)
        )
    except Exception as error:  # an operation that vmap does not know
        _refuse_shortage(error)
        return False
    finally:
        model.path = start


def _shares(model: Products, x: Any, columns: _Columns, Jv: Tensor) -> bool:
    """Whether one forward pass gives J w and Jᵀu as two do."""
    start = model.path
    model.path = start._replace(shared=True)
    pulled = torch.zeros_like(columns.JTu[:1])
    try:
        rows = model.by_autodiff(x)
        found = rows.push(columns.v[:1])
        rows.pull(columns.u[:1], pulled)
    except Exception:  # an operation without a second derivative, or no room for both
        return False
    finally:
        model.path = start
    error = max(distance(found[0], Jv[0]), distance(pulled[0], columns.JTu[0]))
    return error <= columns.tolerance


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
