"""Compares ways of computing J w and Jᵀu with ``backward``, and chooses the fastest exact one."""

from __future__ import annotations

import math
import warnings
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.jacobian.checks import (
    checked_outputs,
    floating_tensors,
    hooked,
    layer_of,
    name_layer,
)
from torch_lla_em.jacobian.recorded import by_factors, find
from torch_lla_em.jacobian.rows import ByAutodiff, Report, Rows, Weights, num_examples
from torch_lla_em.jacobian.state import NetworkState
from torch_lla_em.runtime import suppressed

# largest error by rounding, of deep networks in float32 or with TF32; wrong derivatives have more
_ROUNDING = 0.03

# blocks with a gradient below this share of the largest one count for less, because of rounding
_SMALL = 1e-3

# forward mode is chosen unless the error of two reverse passes is smaller by this factor
_FAR_BETTER = 10

# torch.func takes four forward passes for a column of J w and of Jᵀu, and also has to compute all that
# is not a product with a weight; factors take twice the multiplications by weights and gradients
_MOST_GRADIENTS = 5


def probe(weights: Weights, x: Any, needs_path: bool = True) -> Report | None:
    """Return the ways of computing J that agree with ``backward``; raise an error if none does.

    Returns None if J is zero at these inputs. Without ``needs_path``, torch.func is not tried if all
    weights have factors. The module, its buffers and the random state are not changed.
    """
    network, report = weights.network, None
    before = NetworkState(network)
    devices = {p.device.index or 0 for p in network.module.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices=sorted(devices)):
        reference = _Reference(weights, x)
        if reference.JTu[0].any():
            report = _by_factors(reference)
            if report is None or needs_path:
                found = _by_torch_func(reference)
                report = found if report is None else report._replace(**_path_of(found))
    changed = before.changed(network)
    if changed:
        raise RuntimeError(
            f"The forward pass writes to {changed!r} in place (for example through `.data`), "
            "which would change the trained network. Write to a copy, or register a buffer and "
            "assign to it."
        )
    return report


class _Reference:
    """Two columns on each side of J at one batch, and their products by ``backward``."""

    def __init__(self, weights: Weights, x: Any):
        """Check the outputs, and compute Jᵀu by ``backward``."""
        self.weights, self.x = weights, x
        network, layout, sizes = weights.network, weights.layout, [1]

        def see(path: str, layer: Any, args: tuple, kwargs: dict, output: Any) -> None:
            sizes.extend(t.nbytes for t in floating_tensors(output))

        with hooked(network.module, see):
            f = checked_outputs(network, layout.names, x)
        on_cpu = network.device.type == "cpu"
        first = ByAutodiff(weights, x)
        self.report = Report(
            example_bytes=-(-max(sizes) // num_examples(x)) if on_cpu else None,
            examples=len(f) if f.dim() > 1 else 1,
            outputs=f[0].numel(),
            classes=f.shape[-1] if f.dim() > 1 else 1,
            activations=_activations(first, network.module) / num_examples(x),
        )
        generator = torch.Generator("cpu").manual_seed(0)
        values = weights.values()
        self.eps = max(torch.finfo(t.dtype).eps for t in (f, *values.values()))
        w_MAP = layout.flatten(values)

        def drawn(*shape: int, like: Tensor) -> Tensor:
            draws = torch.randn(shape, generator=generator, dtype=like.dtype, device="cpu")
            return draws.to(like.device)

        self.u = drawn(2, *f.shape, like=f)
        """(2, B, ..., C)."""

        self.v = drawn(2, len(w_MAP), like=w_MAP)
        """Jᵀu, of blocks of one size, and a random one: (2, P)."""

        self.JTu = torch.zeros_like(self.v)
        first.pull(self.u, self.JTu)
        squares = layout.block_sums(self.JTu[0].double().square())
        norms = squares.clamp_min(_SMALL**2 * squares.max()).clamp_min(1e-300)
        self.v[0] = self.JTu[0].double() / layout.expand(norms)
        self._known = (squares / norms).sum()
        """⟨u, J v⟩ of the first."""

    def error(self, rows: Rows) -> float:
        """Return the relative error of J w and of Jᵀu, independent of the number of outputs.

        v = Jᵀu, of blocks of one size, shows what J lacks; u = J v what it has too much.
        """
        Jv, pulled = rows.push(self.v), torch.zeros_like(self.v)
        rows.pull(self.u, pulled)
        lacking = ((self.u[0].double() * Jv[0].double()).sum() - self._known).abs() / self._known
        size = Jv[1].double().norm()
        back = self._plain((Jv[1:].double() / size).to(self.u))[0]
        beyond = (size - (back.double() * self.v[1].double()).sum()).abs() / size
        of_blocks = self._of_blocks(pulled)
        error = torch.stack([lacking, beyond.to(lacking), of_blocks.to(lacking)]).max().item()
        return error if math.isfinite(error) else math.inf

    def _of_blocks(self, pulled: Tensor) -> Tensor:
        """Return the largest error of a block of Jᵀu on its own size, or if it is small, that of all."""
        layout, truth = self.weights.layout, self.JTu.double()
        floor = 100 * self.eps**0.5 * truth.norm()
        error = layout.block_sums((pulled.double() - truth).square()).sqrt()
        size = layout.block_sums(truth.square()).sqrt()
        return (error / (size + floor).clamp_min(1e-300)).max()

    def _plain(self, u: Tensor) -> Tensor:
        """Return Jᵀu, (K, P), by ``backward``, column by column."""
        total = self.v.new_zeros(len(u), self.v.shape[1])
        ByAutodiff(self.weights, self.x).pull(u, total)
        return total


def _activations(rows: ByAutodiff, module: nn.Module) -> int:
    """Record the forward pass, and return the bytes that it keeps for its derivatives."""
    sizes: dict[int, int] = {}

    def see(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided and type(tensor) is Tensor:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    # torch.func inside a network allows no hooks: then it is not known
    with suppress(RuntimeError), torch.autograd.graph.saved_tensors_hooks(see, lambda t: t):
        rows.record()
    for parameter in module.parameters():  # are in memory in any case
        if parameter.layout == torch.strided:
            sizes.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(sizes.values())


def _by_factors(reference: _Reference) -> Report | None:
    """Return the weights with factors; None if not all have them, or if they are wrong or slow."""
    if reference.weights.network.precision == "bfloat16":
        return None
    with suppressed(), warnings.catch_warnings():  # operations that have none
        found = find(reference.weights, reference.x)
        if found is None:
            return None
        # torch warns of a backward pass that vmap takes output by output, which is slow
        warnings.filterwarnings("error", "There is a performance drop")
        report = reference.report._replace(names=found[0], shared=found[1])
        rows = by_factors(reference.weights, report, reference.x)
        if rows is None or rows.gradients > _MOST_GRADIENTS * rows.multiplications:
            return None
        least, error = rows.f[0].numel() if rows.gradients else 1, reference.error(rows)
        right = error <= math.sqrt(reference.eps)
        nbytes = rows.nbytes / len(rows.f)
        report = report._replace(least_columns=least, adjoint_error=error, nbytes=nbytes)
        return report if right else None
    return None


def _by_torch_func(reference: _Reference) -> Report:
    """Return forward mode, or two reverse passes, whose error is rounding."""
    tolerance, errors, reasons = math.sqrt(reference.eps), dict[bool, float](), dict[bool, str]()
    if not reference.weights.allow_forward:
        reasons[True] = "treats the rows of a tied padding_idx differently"
    for forward in (True, False) if reference.weights.allow_forward else (False,):
        failures: list[Exception] = []
        with suppressed(failures):  # operations that a direction does not support
            rows = ByAutodiff(reference.weights, reference.x, forward, (None, None))
            errors[forward] = reference.error(rows)
        if failures:
            reasons[forward] = _reason(reference.weights, failures[0])
        elif errors[forward] <= tolerance:
            break
        else:
            reasons[forward] = f"disagrees with backward (adjoint error {errors[forward]:.1e})"
    least = min(errors.values(), default=math.inf)
    if least > max(tolerance, _ROUNDING):
        words = {True: "by forward mode it", False: "by two reverse passes it"}
        tried = "; ".join(f"{words[forward]} {reason}" for forward, reason in reasons.items())
        raise NotImplementedError(
            f"The Jacobian of the model is not available: {tried}. Replace that layer by one made of "
            "differentiable operations (nn.EmbeddingBag: use nn.Embedding and a mean; fused "
            'attention: use attn_implementation="eager"; a custom autograd.Function: add a `jvp`, or '
            "a backward that can be differentiated). Or choose `parameters` after that layer, such "
            'as "last_layer".'
        )
    # near each other, all are at rounding: layers that compute in a lower precision
    forward = next(f for f in errors if errors[f] <= max(tolerance, _FAR_BETTER * least))
    reason = "" if forward else reasons[True]
    return reference.report._replace(forward=forward, adjoint_error=errors[forward], reason=reason)


def _path_of(report: Report) -> dict[str, Any]:
    return {name: getattr(report, name) for name in ("forward", "adjoint_error", "reason")}


def _reason(weights: Weights, error: Exception) -> str:
    layer = name_layer(weights.network, layer_of(error, weights.network))
    message = str(error).strip().split("\n")[0][:160].rstrip(".")
    return f"fails in {layer} ({type(error).__name__}: {message})"
