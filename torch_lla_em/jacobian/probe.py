"""Compares ways of computing J w and Jᵀu with ``backward``, and chooses the fastest exact one."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.jacobian.by_factors import ByFactors
from torch_lla_em.jacobian.checks import (
    checked_outputs,
    floating_tensors,
    hooked,
    layer_of,
    name_layer,
)
from torch_lla_em.jacobian.factors import Factored
from torch_lla_em.jacobian.network import NoJacobianError
from torch_lla_em.jacobian.parameters import ParameterLayout
from torch_lla_em.jacobian.rows import ByAutodiff, Path, Rows, Weights, num_examples
from torch_lla_em.jacobian.state import NetworkState
from torch_lla_em.runtime import suppressed

# largest error by rounding, of deep networks in float32 or with TF32; wrong derivatives have more
_ROUNDING = 0.03

# blocks with a gradient below this share of the largest one count for less, because of rounding
_SMALL = 1e-3

# forward mode is chosen unless the error of two reverse passes is smaller by this factor
_FAR_BETTER = 10


class Report(NamedTuple):
    """The result of the probe."""

    path: Path | None
    """How torch.func computes the products; None if not known yet, as all weights have factors."""

    adjoint_error: float
    """Relative error of J w and Jᵀu compared with ``backward``."""

    forward: str = ""
    """Why forward mode is not used; empty if it is."""

    factored: Factored | None = None
    """How J is computed by factors, if it is."""

    examples: int = 1
    """Number of examples in the probe; with one it is not known which weights have factors."""

    @property
    def unbatched(self) -> bool:
        """Whether an operation cannot be batched over columns."""
        return self.path is not None and self.path.columns == 1

    def __str__(self) -> str:
        parts = [f"{self.factors}, adjoint error {self.adjoint_error:.1e}"]
        if self.path is not None:
            direction = "forward mode" if self.path.forward else "two reverse passes"
            parts = [f"J w by {direction}, adjoint error {self.adjoint_error:.1e}"]
            parts += [self.factors] if self.factors else []
        if self.forward:
            parts.append(f"forward mode is not used because it {self.forward}")
        if self.unbatched:
            parts.append("columns run one by one, since an operation cannot be batched over them")
        return "; ".join(parts)

    @property
    def factors(self) -> str:
        """The number of weights whose Jacobian has factors, in words; empty if none."""
        return "" if self.factored is None else str(self.factored)


def probe(weights: Weights, x: Any, needs_path: bool = True) -> Report | None:
    """Return the ways of computing J that agree with ``backward``; raise an error if none does.

    Returns None if J is zero at these inputs. Without ``needs_path``, torch.func is not tried if all
    weights have factors. The module, its buffers and the random state are not changed.
    """
    network = weights.network
    before = NetworkState(network)
    devices = {p.device.index or 0 for p in network.module.parameters() if p.is_cuda}
    report = None
    with torch.random.fork_rng(devices=sorted(devices)):
        reference = _Reference(weights, x)
        if reference.JTu[0].any():
            report = _chosen(reference, needs_path)
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
        self.examples = len(f) if f.dim() > 1 else 1
        on_cpu = network.device.type == "cpu"
        self.example_bytes = -(-max(sizes) // num_examples(x)) if on_cpu else None
        generator = torch.Generator("cpu").manual_seed(0)
        values = weights.values()
        w_MAP = layout.flatten(values)

        def drawn(*shape: int, like: Tensor) -> Tensor:
            draws = torch.randn(shape, generator=generator, dtype=like.dtype, device="cpu")
            return draws.to(like.device)

        self.u = drawn(2, *f.shape, like=f)
        """(2, B, ..., C)."""

        self.v = drawn(2, len(w_MAP), like=w_MAP)
        """Jᵀu, of blocks of one size, and a random one: (2, P)."""

        self.JTu = self._plain(self.u)
        squares = layout.block_sums(self.JTu[0].double().square())
        norms = squares.clamp_min(_SMALL**2 * squares.max()).clamp_min(1e-300)
        self.v[0] = self.JTu[0].double() / layout.expand(norms)
        self._known = (squares / norms).sum()
        """⟨u, J v⟩ of the first."""

        self.eps = max(torch.finfo(t.dtype).eps for t in (f, *values.values()))

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
        of_blocks = block_errors(self.weights.layout, pulled, self.JTu, self.eps).max()
        error = torch.stack([lacking, beyond.to(lacking), of_blocks.to(lacking)]).max().item()
        return error if math.isfinite(error) else math.inf

    def _plain(self, u: Tensor) -> Tensor:
        """Return Jᵀu, (K, P), by ``backward``, column by column."""
        total = self.v.new_zeros(len(u), self.v.shape[1])
        ByAutodiff(self.weights, self.x, Path(forward=False, columns=1)).pull(u, total)
        return total


def _chosen(reference: _Reference, needs_path: bool) -> Report:
    """Return the first ways, by factors and by torch.func, whose error is rounding."""
    factored, weights = None, reference.weights
    if weights.network.precision != "bfloat16":
        with suppressed():  # operations without factors
            factored = Factored.find(weights, reference.x)
    if factored is not None:
        factored = replace(factored, example_bytes=reference.example_bytes)
    known = None if factored is None else _checked(reference, factored)
    if known is not None and not needs_path:
        return Report(None, known[1], "", known[0], reference.examples)
    report = _by_torch_func(reference)
    return report if known is None else report._replace(factored=known[0])


def _by_torch_func(reference: _Reference) -> Report:
    """Try forward mode, then two reverse passes; all columns at once, then one by one."""
    tolerance, errors, reasons = math.sqrt(reference.eps), dict[Path, float](), dict[bool, str]()
    ways = (True, False) if reference.weights.allow_forward else (False,)
    for path in (Path(forward, columns) for forward in ways for columns in (None, 1)):
        failures: list[Exception] = []
        with suppressed(failures):  # operations that a direction does not support
            errors[path] = reference.error(ByAutodiff(reference.weights, reference.x, path))
        if failures:
            reasons[path.forward] = _reason(reference.weights, failures[0])
        elif errors[path] <= tolerance:
            break
        else:
            wrong = f"disagrees with backward (adjoint error {errors[path]:.1e})"
            reasons[path.forward] = wrong
    least = min(errors.values(), default=math.inf)
    if least > max(tolerance, _ROUNDING):
        raise NoJacobianError(_refusal(reasons))
    # near each other, all are at rounding: layers that compute in a lower precision
    path = next(p for p in errors if errors[p] <= max(tolerance, _FAR_BETTER * least))
    tied = "treats the rows of a tied padding_idx differently"
    why = "" if path.forward else reasons.get(True, tied)
    final = path._replace(example_bytes=reference.example_bytes)
    return Report(final, errors[path], why, examples=reference.examples)


def _checked(reference: _Reference, factored: Factored) -> tuple[Factored, float] | None:
    """Return factors with their cost, and the error of their products; None if wrong or slower."""
    weights = reference.weights
    with suppressed():  # operations without factors, or whose backward cannot be batched
        with warnings.catch_warnings():
            # torch warns of a backward pass that vmap takes output by output, which is slow
            warnings.filterwarnings("error", "There is a performance drop")
            terms = factored.run(reference.x)
        if terms is None or terms.is_slow:
            return None
        error = reference.error(ByFactors(weights, terms))
        least = terms.f[0].numel() if terms.gradients else 1
        right = error <= math.sqrt(reference.eps)
        return (replace(factored, least_columns=least), error) if right else None
    return None


def block_errors(layout: ParameterLayout, ours: Tensor, truth: Tensor, eps: float) -> Tensor:
    """Return the relative error of each block on its own size, (blocks,), of vectors (K, P).

    Rounding in a small block is judged by the size of all blocks.
    """
    floor = 100 * eps**0.5 * truth.double().norm()
    error = layout.block_sums((ours.double() - truth.double()).square()).sqrt()
    size = layout.block_sums(truth.double().square()).sqrt()
    return (error / (size + floor).clamp_min(1e-300)).reshape(-1, len(layout.names)).amax(0)


def _reason(weights: Weights, error: Exception) -> str:
    layer = name_layer(weights.network, layer_of(error, weights.network))
    message = str(error).strip().split("\n")[0][:160].rstrip(".")
    return f"fails in {layer} ({type(error).__name__}: {message})"


def _refusal(reasons: dict[bool, str]) -> str:
    words = {True: "by forward mode it", False: "by two reverse passes it"}
    tried = "; ".join(f"{words[forward]} {reason}" for forward, reason in reasons.items())
    return (
        f"The Jacobian of the model is not available: {tried}. Replace that layer by one made of "
        "differentiable operations (nn.EmbeddingBag: use nn.Embedding and a mean; fused "
        'attention: use attn_implementation="eager"; a custom autograd.Function: add a `jvp`, or '
        "a backward that can be differentiated). Or choose `parameters` after that layer, such "
        'as "last_layer".'
    )
