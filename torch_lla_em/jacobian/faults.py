"""What a forward pass must be before derivatives of it can be trusted, and which layer is at fault."""

from __future__ import annotations

import math
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.jacobian.layers import floating_tensors, hooked
from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.parameters import ParameterLayout
from torch_lla_em.jacobian.traced import (
    asking,
    begin_without_caches,
    distance,
    name_layer,
    refuse_unexchanged,
    traced,
    warn_of_unused,
)
from torch_lla_em.runtime import is_shortage


def checked_outputs(network: Network, names: tuple[str, ...], x: Any) -> Tensor:
    """Return f(x), shape (B, ..., C), if it is what derivatives can be taken of."""
    first = traced(network, names, x)
    if first.reached != set(names):
        begin_without_caches(network, names, x, first)
    outputs = first.outputs
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
            f"The outputs are not finite on the first batch, first in "
            f"{name_layer(network, path)}. Look at the inputs and the weights there."
        )
    again = traced(network, names, x)
    refuse_unexchanged(first, again)
    if distance(outputs, again.outputs) > math.sqrt(torch.finfo(outputs.dtype).eps):
        path = first_layer(network, x, lambda a, b: distance(a, b) > 0)
        raise ValueError(
            f"Two forward passes over the same inputs disagree, first in "
            f"{name_layer(network, path)}: it draws random numbers, or remembers, in eval "
            "mode too. F.dropout(x) needs training=self.training."
        )
    warn_of_unused(names, again.reached)
    return outputs.movedim(network.class_dim, -1)


def plain_gradients(
    network: Network, names: tuple[str, ...], x: Any, u: Tensor
) -> list[dict[str, Tensor]]:
    """Return Jᵀu by name for each of several u, (K, B, ..., C), as training takes it.

    That is by backward from the module itself, to its own parameters.
    """
    parameters = dict(network.module.named_parameters())
    with asking(parameters, names):
        # the parameters stay in place; only what a forward pass may write is copied
        f = network.outputs(x, dict(parameters)).movedim(network.class_dim, -1)
        if not f.requires_grad:
            return [{} for _ in u]
        chosen = [parameters[name] for name in names]
        several = [
            torch.autograd.grad(f, chosen, column, retain_graph=True, allow_unused=True)
            for column in u
        ]
    return [{n: g.to_dense() for n, g in zip(names, grads) if g is not None} for grads in several]


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


def fingerprint(module: nn.Module) -> dict[str, tuple[int, int]]:
    """A mark of each tensor that any write to it changes: its version and its bits' sum."""
    marks = {}
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        version = -1 if tensor.is_inference() else tensor._version
        bits = tensor.detach()
        if bits.element_size() in integers and bits.layout is torch.strided:
            bits = bits.contiguous().view(integers[bits.element_size()])
            marks[name] = (version, int(bits.sum(dtype=torch.int64)))
        else:
            marks[name] = (version, 0)
    return marks


def layer_of(error: BaseException, network: Network) -> str | None:
    """Return the path of the innermost submodule whose call raised an error."""
    paths = {id(layer): path for path, layer in network.module.named_modules()}
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        found = paths.get(id(frame.f_locals.get("self")), found)
    return found


def first_layer(network: Network, x: Any, differs: Callable[[Tensor, Tensor], bool]) -> str | None:
    """Return the first submodule to finish whose outputs in two passes satisfy a test.

    One whose inputs satisfy it already is not at fault.
    """
    for (path, given, got), (_, *again) in zip(_record(network, x), _record(network, x)):
        at_fault = [
            any(a.shape == b.shape and differs(a, b) for a, b in zip(*pair))
            for pair in zip((given, got), again)
        ]
        if at_fault == [False, True]:
            return path
    return None


def _record(network: Network, x: Any) -> list[tuple[str, list[Tensor], list[Tensor]]]:
    """Return what each submodule's call in f(x) was given and returned, as they finished."""
    calls: list[tuple[str, list[Tensor], list[Tensor]]] = []

    def see(path: str, layer: Any, *call: Any) -> None:
        given, got = floating_tensors(call[:2]), floating_tensors(call[2])
        calls.append((path, [t.clone() for t in given], [t.clone() for t in got]))

    with hooked(network.module, see):
        network.outputs(x)
    return calls


def layer_at_fault(network: Network, names: tuple[str, ...], x: Any) -> str | None:
    """Return the first submodule to finish that two reverse passes do not go through."""
    calls: list[tuple[str, list[Tensor], list[Tensor]]] = []
    leaves = {n: w.detach().requires_grad_() for n, w in network.weights(names).items()}

    def see(path: str, layer: Any, args: tuple, kwargs: dict, output: Any) -> None:
        inputs = [t for t in floating_tensors((args, kwargs)) if t.requires_grad]
        outputs = [t for t in floating_tensors(output) if t.requires_grad]
        calls.append((path, [*inputs, *leaves.values()], outputs))

    with torch.enable_grad(), hooked(network.module, see):
        network.outputs(x, leaves)
        for path, inputs, outputs in calls:
            if outputs and not _twice_differentiable(outputs, inputs):
                return path
    return None


def _twice_differentiable(outputs: list[Tensor], inputs: list[Tensor]) -> bool:
    """Whether u -> Jᵀu can be differentiated in u, and its derivative is J."""
    generator = torch.Generator("cpu").manual_seed(0)
    try:
        u = [
            torch.randn(f.shape, generator=generator, device="cpu").to(f).requires_grad_()
            for f in outputs
        ]
        grads = torch.autograd.grad(outputs, inputs, u, create_graph=True, allow_unused=True)
        known = [g for g in grads if g is not None]
        v = [torch.randn(g.shape, generator=generator, device="cpu").to(g) for g in known]
        Jv = torch.autograd.grad(known, u, v, retain_graph=True, allow_unused=True)
    except Exception as error:  # whatever the layer's backward does not know how to do
        if is_shortage(error):
            raise
        return False
    left = sum(float((a * b).detach().sum()) for a, b in zip(u, Jv) if b is not None)
    right = sum(float((a * b).detach().sum()) for a, b in zip(known, v))
    return abs(left - right) <= 1e-2 * abs(right)


def refuse_scripted(network: Network, layout: ParameterLayout) -> None:
    for path, layer in network.module.named_modules():
        if isinstance(layer, torch.jit.ScriptModule):
            own = [n for n in layout.names if n.startswith(f"{path}.")]
            if own:
                raise TypeError(
                    f"The module {path!r} is scripted or traced (torch.jit), so its weights "
                    "cannot be exchanged. Use the Python module it was made from, or leave "
                    f"{own[0]!r} out of `parameters`."
                )


def padding_rows(network: Network, layout: ParameterLayout) -> dict[str, list[int] | None]:
    """Rows that no gradient reaches in training, by name; None for tied weights.

    Reverse mode gives the row ``padding_idx`` of an embedding no gradient, forward mode
    knows nothing of it.
    """
    rows: dict[str, list[int] | None] = {}
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
            rows[name] = None if uses[id(layer.weight)] > 1 else [layer.padding_idx]
    return rows
