"""Whether a network's derivatives can be trusted, and by which direction to take them."""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_lla_em.jacobian.autodiff import ByAutodiff, Path
from torch_lla_em.jacobian.by_factors import ByFactors
from torch_lla_em.jacobian.checks import checked_outputs, distance, plain_gradients
from torch_lla_em.jacobian.factors import Factored, Terms
from torch_lla_em.jacobian.layers import floating_tensors, hooked, layer_of, name_layer
from torch_lla_em.jacobian.network import NoJacobianError
from torch_lla_em.jacobian.parameters import ParameterLayout
from torch_lla_em.jacobian.rows import Rows, Weights, num_examples
from torch_lla_em.jacobian.state import NetworkState
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

    factored: Factored | None = None
    """How J is taken by factors, if it is."""

    examples: int = 1
    """How many were looked at: of one it cannot be told what has factors."""

    def __str__(self) -> str:
        direction = "forward mode" if self.path.forward else "two reverse passes"
        parts = [f"J w by {direction}, adjoint error {self.adjoint_error:.1e}"]
        if self.forward:
            parts.append(f"forward mode was left because it {self.forward}")
        if self.unbatched:
            parts.append(
                f"the columns of {' and '.join(self.unbatched)} run one by one, since an operation "
                "cannot be batched over them"
            )
        return "; ".join([*parts, *([self.factors] if self.factors else [])])

    @property
    def factors(self) -> str:
        """How many of the weights have a Jacobian in factors; empty if none."""
        return "" if self.factored is None else str(self.factored)


def probe(weights: Weights, x: Any, start: Path) -> Report | None:
    """Return the directions that agree with plain reverse mode; raise where none does.

    None where J is zero at these inputs, by which nothing can be told. The module, its buffers and
    the random state stay as they are.
    """
    network = weights.network
    before = NetworkState(network, exact=False)
    devices = {p.device.index or 0 for p in network.module.parameters() if p.is_cuda}
    report = None
    with torch.random.fork_rng(devices=sorted(devices)):
        columns = _Columns(weights, x)
        if columns.JTu[0].any():
            report = columns.choose(start)
            report = report._replace(factored=_find_factors(weights, x, report.path))
    changed = before.changed(network)
    if changed:
        raise RuntimeError(
            f"The forward pass writes to {changed!r} through its memory (as `.data` does), "
            "which would change the trained network. Write to a copy, or register a buffer "
            "and assign to it."
        )
    return report


class _Columns:
    """Two columns on each side of J at one batch, and what plain backward says of them."""

    def __init__(self, weights: Weights, x: Any):
        """Check the outputs, and take Jᵀu as training does: by backward, from the module itself."""
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
        self.known = (squares / norms).sum()
        """⟨u, J v⟩ of the first."""

        eps = max(torch.finfo(t.dtype).eps for t in (f, *values.values()))
        self.tolerance = math.sqrt(eps)

    def choose(self, start: Path) -> Report:
        """Try forward mode, then two reverse passes; then all columns at once."""
        start = start._replace(jvp_columns=1, vjp_columns=1)
        errors: dict[bool, float] = {}
        reasons: dict[bool, str] = {}
        for forward in (True, False) if start.forward else (False,):
            path = start._replace(forward=forward)
            try:
                errors[forward] = self._adjoint_error(path)
            except Exception as error:  # whatever a direction does not know how to do
                if is_shortage(error):  # which says nothing of the network
                    raise
                reasons[forward] = self._reason(error)
                continue
            if errors[forward] <= self.tolerance:
                break
            reasons[forward] = f"disagrees with backward (adjoint error {errors[forward]:.1e})"
        # near each other, both are at rounding: layers that compute in a lower precision
        forward = min(errors, key=lambda side: errors[side] / (10 if side else 1), default=False)
        if errors.get(forward, math.inf) > max(self.tolerance, _ROUNDING):
            raise NoJacobianError(_refusal(reasons))
        path, unbatched = start._replace(forward=forward), []
        one_by_one = self._products(path)
        for side, name in (("jvp_columns", "J w"), ("vjp_columns", "Jᵀu")):
            together = path._replace(**{side: None})
            if self._agrees(together, one_by_one, max(self.tolerance, _ROUNDING)):
                path = together
            else:
                unbatched.append(name)
        shared = path._replace(shared=True)
        if forward and self._agrees(shared, one_by_one, self.tolerance, columns=1):
            path = shared
        path = path._replace(example_bytes=self.example_bytes)
        why = (
            "" if forward else reasons.get(True, "treats the rows of a tied padding_idx otherwise")
        )
        return Report(path, errors[forward], why, tuple(unbatched), examples=self.examples)

    def _plain(self, u: Tensor) -> Tensor:
        """Return Jᵀu, (K, P), as training takes it."""
        names, total = self.weights.layout.names, self.v.new_zeros(len(u), self.v.shape[1])
        for own, grads in zip(total, plain_gradients(self.weights.network, names, self.x, u)):
            if not grads:
                raise NoJacobianError(
                    "The outputs do not depend on the random weights: nothing of the forward pass "
                    f"from {names[0]!r} on is recorded for backward. Look for no_grad, detach "
                    "or another copy of the model in the forward pass, or change `parameters`."
                )
            self.weights.layout.add_(own, grads)
        return total

    def _adjoint_error(self, path: Path) -> float:
        """How far ⟨u, J v⟩ is from ⟨Jᵀu, v⟩ where no number of outputs can hide it.

        v = Jᵀu, of blocks of one size, shows what J lacks; u = J v what it has too much.
        """
        Jv = ByAutodiff(self.weights, self.x, path).push(self.v)
        lacking = ((self.u[0].double() * Jv[0].double()).sum() - self.known).abs() / self.known
        size = Jv[1].double().norm()
        pulled = self._plain((Jv[1:].double() / size).to(self.u))[0]
        beyond = (size - (pulled.double() * self.v[1].double()).sum()).abs() / size
        error = torch.stack([lacking, beyond.to(lacking)]).max().item()
        return error if math.isfinite(error) else math.inf

    def _products(self, path: Path, columns: int = 2) -> tuple[Tensor, Tensor]:
        """Return J v and Jᵀu."""
        rows = ByAutodiff(self.weights, self.x, path)
        return products(rows, self.v[:columns], self.u[:columns])

    def _agrees(
        self, path: Path, known: tuple[Tensor, Tensor], bound: float, columns: int = 2
    ) -> bool:
        """Whether another way gives these products."""
        try:
            found = self._products(path, columns)
        except Exception as error:  # an operation that cannot be batched, or differentiated twice
            if is_shortage(error) and columns > 1:
                raise
            return False
        return all(distance(a, b) <= bound for f, k in zip(found, known) for a, b in zip(f, k))

    def _reason(self, error: Exception) -> str:
        layer = name_layer(self.weights.network, layer_of(error, self.weights.network))
        message = str(error).strip().split("\n")[0][:160].rstrip(".")
        return f"fails in {layer} ({type(error).__name__}: {message})"


def products(rows: Rows, v: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return J v and Jᵀu."""
    Jv, JTu = rows.push(v), torch.zeros_like(v)
    rows.pull(u, JTu)
    return Jv, JTu


def _refusal(reasons: dict[bool, str]) -> str:
    words = {True: "by forward mode it", False: "by two reverse passes it"}
    tried = "; ".join(f"{words[forward]} {reason}" for forward, reason in reasons.items())
    return (
        f"The Jacobian of the model is not available: {tried}. Replace that layer by one made "
        "of differentiable operations (nn.EmbeddingBag: nn.Embedding and a mean; fused "
        'attention: attn_implementation="eager"; an own autograd.Function: give it a `jvp`, '
        "or a backward that can be differentiated); or choose `parameters` that lie after "
        'it, such as "last_layer".'
    )


def _find_factors(weights: Weights, x: Any, path: Path) -> Factored | None:
    """Return how to take J by factors where that agrees with torch.func, and is not slower."""
    layout = weights.layout
    if weights.network.precision == "bfloat16":
        return None
    generator = torch.Generator("cpu").manual_seed(1)

    def drawn(*shape: int, like: Tensor) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(like)

    try:
        factored = Factored.find(weights, layout.names, x)
        if factored is None:
            return None
        factored.example_bytes = path.example_bytes
        terms = _terms(factored, x)
        if terms is None or terms.is_slow:
            return None
        others = factored.others
        rest = ByAutodiff(weights, x, path, others) if others else None
        v = drawn(2, layout.size, like=layout.flatten(weights.values()))
        u = drawn(2, *terms.f.shape, like=terms.f)
        found = products(ByFactors(weights, terms, rest), v, u)
    except Exception as error:  # whatever a network does that has no factors
        if is_shortage(error):
            raise
        return None
    Jv, JTu = products(ByAutodiff(weights, x, path), v, u)
    eps = max(torch.finfo(t.dtype).eps for t in (terms.f, *weights.values(factored.names).values()))
    if distance(found[0], Jv) > eps**0.5 or worst_block(layout, found[1], JTu, eps):
        return None
    is_free = terms.dense is None and all(term.b is None for term in terms.outer)
    passes = 0 if is_free else terms.f[0].numel()
    factored.least_columns = max(1, passes * (2 if others else 1))
    return factored


def _terms(factored: Factored, x: Any) -> Terms | None:
    """Return the factors at x, and settle whether backward passes can be taken at once."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns of what it takes one by one
            return factored.run(x)
    except Exception as error:  # an operation whose backward cannot be batched
        if is_shortage(error):
            raise
    factored.can_batch = False
    return factored.run(x)


def worst_block(layout: ParameterLayout, ours: Tensor, truth: Tensor, eps: float) -> str | None:
    """Return the block that differs most on its own size, (..., P), or None where all agree.

    What rounding leaves of a block is told by the size of them all.
    """
    floor = 100 * eps * truth.double().norm()
    error = layout.block_sums((ours.double() - truth.double()).square()).sqrt()
    size = layout.block_sums(truth.double().square()).sqrt()
    excess = (error / (eps**0.5 * size + floor).clamp_min(1e-300)).reshape(-1, len(layout.names))
    worst = excess.amax(0)
    return layout.names[int(worst.argmax())] if worst.max() > 1 else None
