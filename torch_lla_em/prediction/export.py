"""Predictions as programs of torch operations, which run without this library.

Programs are recorded at B and at B + 1 examples, because derivatives in C++ have no symbolic sizes.
Numbers that differ between both recordings are linear in B.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from torch_lla_em.data import Inputs, map_tensors, tensors_in, to_device
from torch_lla_em.jacobian import Network
from torch_lla_em.prediction.posterior import Fitted, required
from torch_lla_em.prediction.predict import predicted
from torch_lla_em.prediction.prediction import Prediction
from torch_lla_em.prediction.pushforward import stack_members
from torch_lla_em.runtime import write_atomically

aten = torch.ops.aten

Answer = Callable[[Any], dict[str, Tensor]]
"""Maps inputs to the tensors that a program returns, by name."""


def export(
    la: Fitted,
    x: Inputs,
    path: str | PathLike[str] | None = None,
    level: float | None = None,
    p_value: bool = False,
) -> ExportedProgram:
    """Return ``la(x)`` as a program of torch operations, as ``LinearisedLaplace.export``."""
    known = required(la, surely=True)
    networks = [member.setting.linear_model.network for member in known.members]
    x = to_device(x, networks[0].device)
    steady = [member.setting.linear_model.steady(x) for member in known.members]

    def returned(p: Prediction) -> dict[str, Tensor]:
        found = {"probs" if p.likelihood.gives_probabilities else "expectation": p.expectation}
        if p.likelihood.real_valued:
            found["predictive_variance"] = p.predictive_variance
            found |= {} if level is None else p.interval(level)._asdict()
        elif level is not None:
            found["prediction_set"] = p.prediction_set(level)
        return found | ({"p_value": p.p_value} if p_value else {})

    def recorded(x: Inputs) -> dict[str, Tensor]:
        each = []
        for posterior, model in zip(known.members, steady, strict=True):
            columns = posterior.columns()
            rows = model.at(x, len(columns))
            Jw = rows.push(columns)  # f comes with it in forward mode
            each.append(posterior.of_products(rows.f, Jw, class_dim=model.network.class_dim))
        return returned(predicted(known, stack_members(each)))

    return program_of(
        lambda x: returned(predicted(known, known.at(x))), recorded, networks, x, path
    )


def program_of(
    direct: Answer,
    recorded: Answer,
    networks: Sequence[Network],
    x: Inputs,
    path: str | PathLike[str] | None,
) -> ExportedProgram:
    """Return the program that maps any number of inputs to what ``direct`` returns, and save it to
    ``path``.

    ``recorded`` computes the same by operations that can be recorded; it calls these ``networks``.
    """
    suffix = ".pt2" if path is None else Path(path).suffix
    if suffix not in (".pt2", ".onnx"):
        raise ValueError(
            f"{str(path)!r} has no known ending. Use .pt2 for torch.export or .onnx for ONNX."
        )
    Path(path or ".").parent.resolve(strict=True)  # raises before any work is done
    x = map_tensors(Tensor.detach, x)
    direct(x)  # raises for inputs that cannot be predicted, checks derivatives, draws rotations
    size = len(tensors_in(x)[0])
    try:
        with torch.no_grad(), ExitStack() as stack:
            for network in networks:
                stack.enter_context(network.guarded())
            shapes = map_tensors(lambda t: {0: Dim("batch")}, x)
            several = _resized(x, max(2, size))  # torch regards an axis of size 1 as fixed
            graph = _for_any_size(recorded, several)
            program = torch.export.export(graph, (several,), dynamic_shapes=(shapes,))
    except Exception as error:  # torch raises many kinds of errors
        why = str(error).partition("\n")[0]
        raise RuntimeError(f"These predictions cannot be exported: {why}. {_REMEDY}") from error
    given = {"its example inputs": x, "one example": _resized(x, 1)}
    given["other inputs"] = map_tensors(_changed, _resized(x, 2 * size + 1))
    _check(program.module(), direct, given)
    if path is not None and suffix == ".onnx":
        write_atomically(_onnx(program, direct, x), path)
    elif path is not None:
        torch.export.save(program, buffer := BytesIO())
        write_atomically(buffer.getvalue(), path)
    return program


def _onnx(program: ExportedProgram, direct: Answer, x: Inputs) -> bytes:
    """Return a program in ONNX, whose values in onnxruntime are compared with the predictions."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"Export to ONNX needs more packages: pip install torch_lla_em[onnx] ({error})."
        ) from error
    due, count = list(direct(x)), len(tensors_in(x))
    names = ["x"] if count == 1 else [f"x_{i}" for i in range(count)]
    if isinstance(x, Mapping) and len(x) == count:
        names = list(map(str, x))
    program, before = program.run_decompositions(_PLAIN_IN_ONNX), logging.root.manager.disable
    options: Any = {"input_names": names, "output_names": due, "verbose": False}
    logging.disable(logging.WARNING)  # the result is compared with the predictions afterwards
    try:
        exported: Any = torch.onnx.export(program, dynamo=True, **options)
        content = exported.model_proto.SerializeToString()
    finally:
        logging.disable(before)
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def run(x: Inputs) -> dict[str, Tensor]:
        taken = zip(session.get_inputs(), tensors_in(x), strict=True)
        outs = session.run(due, {each.name: tensor.cpu().numpy() for each, tensor in taken})
        return {name: torch.from_numpy(out) for name, out in zip(due, outs, strict=True)}

    # ONNX has numbers in single precision
    _check(run, direct, {"its example inputs": x}, least=1e-5)
    return bytes(content)


def _check(run: Answer, direct: Answer, inputs: dict[str, Any], least: float = 0.0) -> None:
    """Raise an error if a program's values differ from the predictions at inputs that the network
    accepts."""
    for kind, some in inputs.items():
        try:
            due = direct(some)
        except Exception:  # not an input of this network
            continue
        room = max(100 * torch.finfo(next(iter(due.values())).dtype).eps ** 0.75, least)
        for name, found in run(some).items():
            expected, error, most = due[name].double(), torch.inf, 0.0
            if found.shape == expected.shape:  # ends of intervals may be infinite
                apart = (found.to(expected) - expected).abs().nan_to_num()
                error, most = apart.max().item(), room * expected.abs().max().item()
                if name in ("prediction_set", "p_value"):  # rounding may change a class, or a rank
                    error, most = apart.mean().item(), 0.01 + 1 / max(1, apart.numel())
            if not error <= most:
                raise RuntimeError(
                    f"The exported program is off by {error:.2g} in {name!r} at {kind}: it "
                    "contains constants that the network computed from the example inputs, or the "
                    f"network draws random numbers. {_REMEDY}"
                )


def _resized(x: Inputs, size: int) -> Any:
    """Return inputs with another number of examples, repeated if necessary."""
    return map_tensors(lambda t: t[torch.arange(1, size + 1, device=t.device) % len(t)], x)


def _for_any_size(function: Answer, x: Inputs) -> GraphModule:
    """Return the operations of a function, including derivatives, for any number of examples."""

    def at(size: int) -> GraphModule:
        return make_fx(function, decomposition_table=_PLAIN)(_resized(x, size))

    size = len(tensors_in(x)[0])
    graph, other = at(size), at(size + 1)
    # torch may choose other operations from some size on
    if len(graph.graph.nodes) != len(other.graph.nodes):
        size, graph, other = size + 1, other, at(size + 2)
    mine, theirs = ([(node.op, node.target) for node in one.graph.nodes] for one in (graph, other))
    if mine != theirs:
        raise ValueError("the network runs other operations with one more example")
    pairs = list(zip(graph.graph.nodes, other.graph.nodes, strict=True))
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    with graph.graph.inserting_after(inputs[-1]):
        count = graph.graph.call_function(aten.sym_size.int, (inputs[0], 0))
    free = partial(_freed, count=count, size=size)
    for node, its in pairs:
        if node.op == "get_attr":
            mine, theirs = getattr(graph, node.target), getattr(other, its.target)
            if not torch.equal(mine, theirs):
                raise ValueError("the network turns its inputs into constants")
            if mine.untyped_storage().nbytes() != mine.nbytes:  # a file would hold all of it
                setattr(graph, node.target, mine.clone())
        with graph.graph.inserting_before(node):
            node.args = pytree.tree_map(free, node.args, its.args)
            node.kwargs = pytree.tree_map(free, node.kwargs, its.kwargs)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _freed(value: object, other: object, count: Node, size: int) -> Any:
    """Return an argument of an operation; a number that depends on the batch size becomes a
    function of it."""
    if isinstance(value, Node) or value == other:
        return value
    if type(value) is not int or type(other) is not int:
        raise ValueError(f"{value} becomes {other} with one more example")
    slope = other - value
    scaled = count.graph.call_function(operator.mul, (count, slope))
    return count.graph.call_function(operator.add, (scaled, value - slope * size))


def _changed(x: Tensor) -> Tensor:
    """Return inputs that are flipped along their last axis, have the opposite sign, or are half
    zero."""
    x = x.flip(-1) if x.dim() > 1 else x
    if x.is_floating_point():
        return -1.5 * x
    return x * (torch.arange(x.shape[-1], device=x.device) >= x.shape[-1] / 2) if x.dim() > 1 else x


def _without_nan(
    x: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    # infinite scores stay infinite if nothing is given: ONNX has no largest double in its constants
    found = x if posinf is None else x.masked_fill(x == torch.inf, posinf)
    found = found if neginf is None else found.masked_fill(x == -torch.inf, neginf)
    return found.masked_fill(x != x, nan or 0.0)


_REMEDY = (
    "Exported networks must use only torch operations on values that depend on their inputs: no "
    ".item(), .tolist(), numpy, `if`, or loop over examples. Otherwise distil a student with "
    "another network, and export it: la.distil(x, student=...)."
)

# replacements for operations that torch.export or ONNX does not know
_PLAIN: dict[Any, Callable[..., Any]] = {
    aten._new_zeros_with_same_feature_meta.default: lambda like, other, self_num_batch_dims=0: (
        like.new_zeros([*like.shape[:self_num_batch_dims], *other.shape])
    ),
    aten._efficientzerotensor.default: lambda size, **kwargs: torch.zeros(size, **kwargs),
    aten.sort.stable: lambda x, *, stable, **kwargs: torch.sort(x, **kwargs),
}
_PLAIN_IN_ONNX: dict[Any, Callable[..., Any]] = {
    aten.searchsorted.Tensor: lambda known, x, **_: (known[..., None, :] < x[..., None]).sum(-1),
    aten.nan_to_num.default: _without_nan,
    aten._cdist_forward.default: lambda x, others, *_: (
        (x.square().sum(1)[:, None] + others.square().sum(1) - 2 * x @ others.T).clamp_min(0).sqrt()
    ),
}
