"""Compares every way of computing J w and Jᵀu with the definition on the first batch, and chooses
the fastest one that agrees."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial

import torch
from torch import Tensor, nn

from torch_lla_em.data import Inputs, map_tensors, tensors_in
from torch_lla_em.jacobian.checks import checked_outputs
from torch_lla_em.jacobian.graph import ByGraph
from torch_lla_em.jacobian.linearised import Linearised
from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.parameters import ParameterLayout
from torch_lla_em.jacobian.recorded import by_factors, find
from torch_lla_em.jacobian.rows import Pulled, Rows, Ways, num_examples
from torch_lla_em.runtime import suppressed

# largest rounding error of deep networks in float32 or with TF32; wrong derivatives have larger
# errors
_ROUNDING = 0.03

# blocks with a gradient below this share of the largest one count for less, because of rounding
_SMALL = 1e-3

# torch.func takes four forward passes for a column of J w and of Jᵀu, and also has to compute all
# that is not a product with a weight; factors take twice the multiplications by weights and
# gradients
_MOST_GRADIENTS = 5

_FAULT = (
    "The Jacobian of the model is not available ({}). Replace that layer by one made of "
    "differentiable operations (nn.EmbeddingBag: nn.Embedding and a mean; an autograd.Function: "
    'add a `jvp`), or choose `parameters` after it, such as "last_layer".'
)


def probe(network: Network, layout: ParameterLayout, x: Inputs) -> Ways | None:
    """Return the ways of computing J that agree with its definition; raise an error if none does.

    Returns None if J is zero at these inputs. The module, its buffers and the random state are not
    changed.
    """
    devices = {p.device.index or 0 for p in network.module.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices=sorted(devices)):
        plain = ByGraph(network, layout, x)
        chosen, generator = _measured(network, plain, x), torch.Generator("cpu").manual_seed(0)
        f, values = plain.f, network.weights(layout.names)
        w = layout.flatten(values)
        draw = partial(torch.randn, generator=generator, device="cpu")
        u = draw((2, *f.shape), dtype=f.dtype).to(f.device)
        v = draw((2, len(w)), dtype=torch.promote_types(w.dtype, torch.float32)).to(w.device)
        definition, pulled = Linearised(network, layout, x), list[Pulled]()
        with suppressed():  # if torch.func does not support an operation, ``backward`` is used
            pulled.append(definition.pull(u))
        truth: Rows = definition if pulled else plain
        JTu = (pulled or [plain.pull(u)])[0].added_to(torch.zeros_like(v))
        if not JTu[0].any():
            return None
        eps = max(torch.finfo(t.dtype).eps for t in (f, *values.values()))
        error = partial(_error, truth, (u, v, JTu), eps)
        ways = [ByGraph(network, layout, x, None, way) for way in (True, False)]
        chosen = _with_torch_func(ways, chosen, error, eps**0.5)
        if network.precision != "bfloat16":
            with suppressed(), warnings.catch_warnings():  # operations that have no factors
                # torch warns of a backward pass that vmap takes output by output, which is slow
                warnings.filterwarnings("error", "There is a performance drop")
                # one example is not enough to decide whether examples have factors of their own
                more = x
                if len(f) == 1:
                    more = map_tensors(lambda t: torch.cat([t, t]) if t.shape[:1] == (1,) else t, x)
                factored = find(network, layout, more, chosen)
                rows = factored and by_factors(network, layout, x, factored[0])
                if factored and rows:
                    last = [term[-1] for term in rows.parts]  # by backward passes
                    count = sum(b.numel() for b in last if isinstance(b, Tensor))
                    is_fast = count <= _MOST_GRADIENTS * factored[1]
                    if is_fast and (wrong := error(rows)) <= eps**0.5:
                        least, nbytes = chosen.outputs if count else 1, rows.nbytes / len(f)
                        chosen = factored[0]._replace(
                            adjoint_error=wrong,
                            least_columns=least,
                            nbytes=nbytes,
                            is_last_layer=rows.features is not None,
                        )
    if chosen.fault and not chosen.names:
        raise NotImplementedError(chosen.fault)
    return chosen


def _measured(network: Network, plain: ByGraph, x: Inputs) -> Ways:
    """Check the outputs. Return their sizes, and the memory of an example in a forward pass: the
    tensors that its graph keeps, or all outputs of layers if these are larger, as for a last
    layer."""
    f, sizes = checked_outputs(network, plain.layout.names, x), dict[int, int]()
    returned: list[int] = []

    def note(layer: nn.Module, args: object, out: object) -> None:
        returned.append(sum(t.nbytes for t in tensors_in(out)))

    def see(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided and type(tensor) is Tensor:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    # torch.func inside a network allows no hooks: then it is not known
    hooks = torch.autograd.graph.saved_tensors_hooks(see, lambda t: t)
    with suppress(RuntimeError), ExitStack() as stack, hooks:
        for layer in network.module.modules():
            if not any(True for _ in layer.children()):
                stack.callback(layer.register_forward_hook(note).remove)
        plain.f  # noqa: B018
    for parameter in network.module.parameters():  # these are in memory in any case
        if parameter.layout == torch.strided:
            sizes.pop(parameter.untyped_storage().data_ptr(), None)
    count, is_near = num_examples(x), network.device.type == "cpu"
    return Ways(
        example_bytes=-(-max([f.nbytes, *sizes.values()]) // count) if is_near else None,
        outputs=f[0].numel(),
        classes=f.shape[-1] if f.dim() > 1 else 1,
        activations=max(sum(sizes.values()), sum(returned)) / count,
    )


def _error(plain: Rows, drawn: tuple[Tensor, Tensor, Tensor], eps: float, rows: Rows) -> float:
    """Return the relative error of J w and of Jᵀu for random u, v and Jᵀu by the definition.

    The error does not depend on the number of outputs: w = Jᵀu, with all blocks scaled to one size,
    reveals missing parts of J, and u = J v reveals superfluous ones.
    """
    (u, v, JTu), layout = drawn, plain.layout
    truth = JTu.double()
    squares = layout.block_sums(truth[0].square())
    norms = squares.clamp_min(_SMALL**2 * squares.max()).clamp_min(1e-300)
    scaled, expected = truth[0] / layout.expand(norms), (squares / norms).sum()
    Jv = rows.push(torch.stack([scaled.to(v), v[1]])).double()
    pulled = rows.pull(u).added_to(torch.zeros_like(v))
    lacking = ((u[0].double() * Jv[0]).sum() - expected).abs() / expected
    size = Jv[1].norm()
    back = plain.pull((Jv[1:] / size).to(u)).added_to(torch.zeros_like(v[:1]))
    beyond = (size - (back[0].double() * v[1].double()).sum()).abs() / size
    # the error of each block of Jᵀu is relative to the block, or to all blocks if it is small
    wrong = layout.block_sums((pulled.double() - truth).square()).sqrt()
    sizes = layout.block_sums(truth.square()).sqrt() + 100 * eps**0.5 * truth.norm()
    of_blocks = (wrong / sizes.clamp_min(1e-300)).max()
    error = torch.stack([each.to(of_blocks) for each in (lacking, beyond, of_blocks)]).max().item()
    return error if math.isfinite(error) else math.inf


def _with_torch_func(
    ways: list[ByGraph], chosen: Ways, error: Callable[[Rows], float], tolerance: float
) -> Ways:
    """Choose forward mode or two reverse passes, whichever is exact up to rounding; if neither is,
    return why."""
    best, reasons = chosen._replace(adjoint_error=math.inf), list[str]()
    for rows, name in zip(ways, ("forward mode", "two reverse passes"), strict=True):
        wrong, failures = math.inf, list[Exception]()
        with suppressed(failures):  # operations that a direction does not support
            wrong = error(rows)
        if wrong < best.adjoint_error:
            best = chosen._replace(forward=rows is ways[0], adjoint_error=wrong)
        if wrong <= tolerance:
            return best
        reason = str(failures[0]).strip().split("\n")[0] if failures else f"error {wrong:.1e}"
        reasons.append(f"{name}: {reason}")
    if best.adjoint_error <= max(tolerance, _ROUNDING):
        return best
    return chosen._replace(fault=_FAULT.format("; ".join(reasons)))
