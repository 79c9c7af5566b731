"""What a forward pass must be before derivatives of it can be trusted, and which layer is at fault."""

from __future__ import annotations

import math
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.data import map_tensors
from torch_lla_em.jacobian.calls import nodes_of
from torch_lla_em.jacobian.layers import floating_tensors, hooked
from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.parameters import ParameterLayout
from torch_lla_em.runtime import is_shortage


def checked_outputs(network: Network, names: tuple[str, ...], x: Any) -> Tensor:
    """Return f(x), shape (B, ..., C), if it is what derivatives can be taken of."""
    _refuse_hidden(network, names, x)
    outputs = network.outputs(x)
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
    again = network.outputs(x)
    if distance(outputs, again) > math.sqrt(torch.finfo(outputs.dtype).eps):
        path = first_layer(network, x, lambda a, b: distance(a, b) > 0)
        raise ValueError(
            f"Two forward passes over the same inputs disagree, first in "
            f"{name_layer(network, path)}: it draws random numbers, or remembers, in eval "
            "mode too. F.dropout(x) needs training=self.training."
        )
    return outputs.movedim(network.class_dim, -1)


def _refuse_hidden(network: Network, names: tuple[str, ...], x: Any) -> None:
    """Raise where the graph of f(x) hides weights in reentrant checkpoints, or in other places."""
    parameters = dict(network.module.named_parameters())
    own = {id(parameters[name]): name for name in names}
    weights = {
        name: p.detach().requires_grad_() for name, p in parameters.items() if p.is_floating_point()
    }
    x = map_tensors(_differentiable, x)  # checkpoints hide what their inputs do not ask for
    with _asking(parameters, names):
        nodes = list(nodes_of(network.outputs(x, weights)))
        if any(map(_is_checkpoint, nodes)):
            raise NotImplementedError(
                f"{name_layer(network, _layer_of_checkpoint(network, x, weights))} uses reentrant "
                "activation checkpointing, whose derivatives leave out weights without a word. "
                "Pass use_reentrant=False to torch.utils.checkpoint, or switch it off."
            )
    elsewhere = [own[id(n.variable)] for n in nodes if id(getattr(n, "variable", None)) in own]
    if elsewhere:
        raise RuntimeError(
            f"The parameter {elsewhere[0]!r} is used in a place where it cannot be exchanged: the "
            "model, or forward_fn, also keeps it outside of the module's parameters (in a "
            "list, a closure or a second model). Register it there, or leave it out of "
            "`parameters`."
        )


def _differentiable(tensor: Tensor) -> Tensor:
    """Return a tensor that gradients are asked for."""
    return tensor.clone().requires_grad_() if tensor.is_floating_point() else tensor


def _is_checkpoint(node: Any) -> bool:
    return type(node).__name__ == "CheckpointFunctionBackward"


def _layer_of_checkpoint(network: Network, x: Any, weights: dict[str, Tensor]) -> str | None:
    found: list[str | None] = []

    def see(path: str, layer: Any, *call: Any) -> None:
        if any(_is_checkpoint(node) for t in floating_tensors(call[2]) for node in nodes_of(t)):
            found.append(path)

    with hooked(network.module, see):
        network.outputs(x, weights)
    return next(iter(found), None)


@contextmanager
def _asking(parameters: dict[str, nn.Parameter], names: tuple[str, ...]) -> Iterator[None]:
    """Ask for gradients of the module's own parameters of these names alone."""
    flags = {name: p.requires_grad for name, p in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in names)
        with torch.enable_grad():
            yield
    finally:
        for name, parameter in parameters.items():
            parameter.requires_grad_(flags[name])


def plain_gradients(
    network: Network, names: tuple[str, ...], x: Any, u: Tensor
) -> list[dict[str, Tensor]]:
    """Return Jᵀu by name for each of several u, (K, B, ..., C), as training takes it.

    That is by backward from the module itself, to its own parameters.
    """
    parameters = dict(network.module.named_parameters())
    with _asking(parameters, names):
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


def distance(a: Tensor, b: Tensor) -> float:
    """‖a - b‖ / ‖b‖."""
    a, b = a.detach().double(), b.detach().double()
    return ((a - b).norm() / b.norm().clamp(min=1e-300)).item()


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


def name_layer(network: Network, path: str | None) -> str:
    """Return how a message names the submodule at a path: its path and its class."""
    if not path:
        return f"the model's own forward ({type(network.module).__name__})"
    return f"{path!r} ({type(network.module.get_submodule(path)).__name__})"


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
