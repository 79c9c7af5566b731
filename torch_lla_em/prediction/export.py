"""Writes predictions as a program of torch operations, which runs without this library.

torch's symbolic sizes do not work where derivatives are taken in C++. The same computation is therefore
recorded at B and at B + 1 examples: a number that differs between the two graphs is linear in the batch
size, and is computed from it. What depends on weights and samples alone is computed once, when the
program is made.
"""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from io import BytesIO
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from torch_lla_em.data import map_tensors, tensors_in
from torch_lla_em.jacobian import Network
from torch_lla_em.runtime import report

aten = torch.ops.aten

Answer = Callable[[Any], dict[str, Tensor]]
"""Maps inputs to the tensors that a program returns, by name."""

# outputs that rounding changes in steps, and by how much one example may differ
_STEPS = {"prediction_set": 1.0, "p_value": 0.25}

# relative differences that ONNX may make, which stores numbers in single precision
_OF_ONNX = 1e-5


def program_of(
    direct: Answer,
    recorded: Iterable[Answer],
    networks: Sequence[Network],
    x: Any,
    path: str | PathLike[str] | None,
) -> ExportedProgram:
    """Return the program that maps inputs like x to what ``direct`` returns, and save it to ``path``.

    It accepts any number of examples if its graph can be rewritten for that, otherwise as many as x.

    Args:
        direct (callable): The predictions that the program is compared with.
        recorded (iterable of callables): Computes the same by operations that can be recorded; the first one
            whose program is correct is taken.
        networks (sequence of Network): The networks that are called.
        x (Tensor, tuple or dict): Example inputs, on the device of the networks.
        path (str, optional): Name of the file, which ends with .pt2 or .onnx; None: it is not saved.

    Raises:
        ValueError: If the name of the file has another ending.
        RuntimeError: If the program returns other values than ``direct``.
    """
    suffix = ".pt2" if path is None else Path(path).suffix
    if suffix not in (".pt2", ".onnx"):
        raise ValueError(
            f"{str(path)!r} has no known ending. Use .pt2 for torch.export or .onnx for ONNX."
        )
    folder_of = Path(path or ".").parent.resolve(strict=True)
    x, reason = map_tensors(Tensor.detach, x), ""
    direct(x)  # an error for inputs that cannot be predicted; checks derivatives, draws rotations
    for answer in recorded:
        try:
            with _guarded(networks):
                program = _for_any_batch(answer, x)
            sizes = {f"{n} examples": resized(x, n) for n in (1, 2 * batch_size(x) + 1)}
            _check(program.module(), direct, {"its example inputs": x, **sizes})
            break
        except Exception as error:  # torch's are of many kinds
            reason = str(error).partition("\n")[0]
    else:
        report("log", f"The exported program accepts only the batch size of x: {reason}")
        with _guarded(networks):
            program = torch.export.export(simplified(record(answer, x)), (x,))
    others = {kind: map_tensors(change, x) for kind, change in _CHANGES.items()}
    _check(program.module(), direct, {"its example inputs": x, **others})
    if path is None:
        return program
    # written beside the file, so that an earlier one remains if the disk is full
    with TemporaryDirectory(prefix=".writing-", dir=folder_of) as folder:
        place = Path(folder) / Path(path).name
        if suffix == ".onnx":
            _save_onnx(program, place, direct, x)
        else:
            buffer = BytesIO()  # torch's own writer of files ends the process if it fails
            torch.export.save(program, buffer)
            place.write_bytes(buffer.getbuffer())
        for part in Path(folder).iterdir():
            os.replace(part, folder_of / part.name)
    return program


@contextmanager
def _guarded(networks: Sequence[Network]) -> Iterator[None]:
    """Make calls of all networks safe for torch.func, without gradients."""
    with torch.no_grad(), ExitStack() as stack:
        for network in networks:
            stack.enter_context(network.guarded())
        yield


def _for_any_batch(answer: Answer, x: Any) -> ExportedProgram:
    """Return the program for any number of examples; raise an error if a network forbids it."""
    graph = simplified(record_free(answer, x))
    shapes = map_tensors(lambda t: {0: Dim("batch")} if t.dim() else None, x)
    several = resized(x, max(2, batch_size(x)))  # torch takes an axis of size 1 for a fixed one
    return torch.export.export(graph, (several,), dynamic_shapes=(shapes,))


def _save_onnx(program: ExportedProgram, path: Path, direct: Answer, x: Any) -> None:
    """Write an ONNX file, and compare its values in onnxruntime with the predictions."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"Export to ONNX needs onnxscript and onnxruntime: pip install torch_lla_em[onnx] ({error})."
        ) from error
    due, count = list(direct(x)), len(tensors_in(x))
    given = ["x"] if count == 1 else [f"x_{i}" for i in range(count)]
    if isinstance(x, Mapping) and len(x) == count:
        given = list(map(str, x))
    # what the exporter could not convert is compared afterwards
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        program = program.run_decompositions(_PLAIN_IN_ONNX)
        options: Any = {"input_names": given, "output_names": due, "verbose": False}
        torch.onnx.export(program, dynamo=True, **options).save(path)
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def run(x: Any) -> dict[str, Tensor]:
        values = [tensor.cpu().numpy() for tensor in tensors_in(x)]
        found = session.run(due, dict(zip(names, values)))
        return {name: torch.from_numpy(out) for name, out in zip(due, found)}

    _check(run, direct, {"its example inputs": x}, _OF_ONNX)


def _check(run: Answer, direct: Answer, inputs: dict[str, Any], least: float = 0.0) -> None:
    """Raise if a program's values differ from the predictions, at inputs that the network takes."""
    for number, (kind, some) in enumerate(inputs.items()):
        try:
            due = direct(some)
        except Exception:
            if number:
                continue
            raise
        answer = run(some)
        for name, expected in due.items():
            found = answer[name].to(expected.device)
            apart = torch.full((), torch.inf, dtype=torch.float64, device="cpu")
            if found.shape == expected.shape:
                apart = (found.double() - expected.double()).abs()
            if name in _STEPS:  # rounding may change the last class of a set, or a rank
                is_right = bool(apart.mean() <= 0.01 + _STEPS[name] / max(1, expected.numel()))
            else:
                room = max(100 * torch.finfo(expected.dtype).eps ** 0.75, least)
                is_right = bool((apart <= room * expected.abs().max()).all())
                is_right = is_right or (
                    found.shape == expected.shape and not expected.isfinite().all()
                )
            if not is_right:
                raise RuntimeError(
                    f"The exported program is off by {apart.max():.2g} in {name!r} at {kind}: it contains "
                    "constants that the network computed from the example inputs, or the network "
                    "draws random numbers. Exported networks must use only torch operations on "
                    "values that depend on their inputs: no .item(), .tolist(), numpy or `if`."
                )


def batch_size(x: Any) -> int:
    """Return the number of examples of inputs; raise an error if their tensors disagree."""
    sizes = {len(leaf) for leaf in pytree.tree_leaves(x) if _is_batched(leaf)}
    if len(sizes) != 1:
        raise ValueError(f"the inputs have first axes of the sizes {sorted(sizes)}")
    return sizes.pop()


def resized(x: Any, size: int) -> Any:
    """Return inputs with so many examples, repeated if need be."""
    at = torch.arange(size, device="cpu") % batch_size(x)
    return pytree.tree_map(lambda leaf: leaf[at.to(leaf.device)] if _is_batched(leaf) else leaf, x)


def record(function: Callable[[Any], Any], x: Any) -> GraphModule:
    """Return the operations of a function at x, derivatives among them, for this batch size."""
    return make_fx(function, decomposition_table=_PLAIN)(x)


def record_free(function: Callable[[Any], Any], x: Any) -> GraphModule:
    """Return the operations of a function for any batch size, or raise ``ValueError``."""
    size = max(batch_size(x), 2)  # operations treat an axis of size 1 differently
    at, next_at = (record(function, resized(x, n)) for n in (size, size + 1))
    if _operations(at) != _operations(next_at):  # from some size on torch may choose others
        size, at, next_at = size + 1, next_at, record(function, resized(x, size + 2))
    if _operations(at) != _operations(next_at):
        raise ValueError("the network runs other operations with one more example")
    pairs = list(zip(at.graph.nodes, next_at.graph.nodes))
    inputs = [node for node in at.graph.nodes if node.op == "placeholder"]
    batched = [_is_batched(leaf) for leaf in pytree.tree_leaves(x)]
    with at.graph.inserting_after(inputs[-1]):
        count = at.graph.call_function(aten.sym_size.int, (inputs[batched.index(True)], 0))
    free = partial(_freed, count=count, size=size)
    for node, other in pairs:
        if node.op == "get_attr" and not torch.equal(
            getattr(at, node.target), getattr(next_at, other.target)
        ):
            raise ValueError("the network turns the batch size into constants")
        with at.graph.inserting_before(node):
            node.args = pytree.tree_map(free, node.args, other.args)
            node.kwargs = pytree.tree_map(free, node.kwargs, other.kwargs)
    at.graph.eliminate_dead_code()
    at.recompile()
    return at


def _operations(graph: GraphModule) -> list[tuple[str, Any]]:
    """Return the operations of a graph in order."""
    return [(node.op, node.target) for node in graph.graph.nodes]


def _freed(value: Any, other: Any, count: Node, size: int) -> Any:
    """Return an argument, or a number that differs as a function of the batch size."""
    if isinstance(value, Node) or value == other:
        return value
    if type(value) is not int or type(other) is not int:
        raise ValueError(f"{value} becomes {other} with one more example")
    slope = other - value
    scaled = count.graph.call_function(operator.mul, (count, slope))
    return count.graph.call_function(operator.add, (scaled, value - slope * size))


def simplified(graph: GraphModule) -> GraphModule:
    """Compute once what does not depend on the inputs, and is neither random nor written to."""
    known: dict[Node, Any] = {}
    written = _written(graph)
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            known[node] = getattr(graph, node.target)
        elif node.op == "call_function" and node not in written:
            is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            if not is_random and known.keys() >= {*node.all_input_nodes}:
                given = map_arg((node.args, node.kwargs), known.__getitem__)
                known[node] = node.target(*given[0], **given[1])
    for number, (node, value) in enumerate(known.items()):
        if node.op != "get_attr" and isinstance(value, Tensor) and node.users.keys() - known.keys():
            name = f"_known_{number}"
            graph.register_buffer(name, value.detach().clone(memory_format=torch.contiguous_format))
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(graph.graph.get_attr(name))
    graph.graph.eliminate_dead_code()
    used = [node.target for node in graph.graph.nodes if node.op == "get_attr"]
    return GraphModule({name: getattr(graph, name) for name in used}, graph.graph)


def _written(graph: GraphModule) -> set[Node]:
    """Return the nodes whose memory an operation writes to; a view is the first argument's."""
    written: set[Node] = set()
    for node in graph.graph.nodes:
        if getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            at: Any = node
            while isinstance(at, Node) and at not in written:
                written.add(at)
                at = at.args[0] if at.args else None
    return written


def _is_batched(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _shortened(tensor: Tensor) -> Tensor:
    """Return tokens or a mask that are 0 from the middle on."""
    if tensor.is_floating_point() or tensor.dim() < 2:
        return tensor
    return tensor * (torch.arange(tensor.shape[-1], device=tensor.device) < tensor.shape[-1] / 2)


def _zeros_with_axes_of(like: Tensor, other: Tensor, *, self_num_batch_dims: int = 0) -> Tensor:
    return like.new_zeros([*like.shape[:self_num_batch_dims], *other.shape])


def _without_nan(
    x: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    # infinite scores stay infinite if nothing is given: ONNX has no largest double in its constants
    found = x if posinf is None else x.masked_fill(x == torch.inf, posinf)
    found = found if neginf is None else found.masked_fill(x == -torch.inf, neginf)
    return found.masked_fill(x != x, nan or 0.0)


def _distances(x: Tensor, others: Tensor, *args: Any) -> Tensor:
    squares = x.square().sum(1)[:, None] + others.square().sum(1)
    return (squares - 2 * x @ others.T).clamp_min(0).sqrt()


# replacements for operations that torch.export or ONNX does not know
_PLAIN: dict[Any, Callable[..., Any]] = {
    aten._new_zeros_with_same_feature_meta.default: _zeros_with_axes_of,
    aten._efficientzerotensor.default: lambda size, **kwargs: torch.zeros(size, **kwargs),
    aten.sort.stable: lambda x, *, stable, **kwargs: torch.sort(x, **kwargs),
}

# further ones of comparisons with stored examples
_PLAIN_IN_ONNX: dict[Any, Callable[..., Any]] = {
    aten.searchsorted.Tensor: lambda known, x, **_: (known[..., None, :] < x[..., None]).sum(-1),
    aten.nan_to_num.default: _without_nan,
    aten._cdist_forward.default: _distances,
}

# changes of inputs by which constants of the example inputs in a program are noticed
_CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "the examples in another order": lambda x: x.roll(1, 0) if x.dim() else x,
    "inputs of the opposite sign": lambda x: -1.5 * x if x.is_floating_point() else x,
    "inputs flipped along their last axis": lambda x: x.flip(-1) if x.dim() > 1 else x,
    "tokens or masks that are 0 from the middle on": _shortened,
}
