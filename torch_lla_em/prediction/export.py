"""The predictive as a program of torch's own operations, which runs without this library."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from torch_lla_em.data import map_tensors, tensors_in
from torch_lla_em.jacobian import LinearModel
from torch_lla_em.prediction.free_batch import batch_size, record, record_free, resized
from torch_lla_em.prediction.prediction import Prediction

logger = logging.getLogger("torch_lla_em")


class Ways(NamedTuple):
    """How a posterior predicts, by itself and in a program."""

    predict: Callable[[Any], Prediction]
    of_products: Callable[[Tensor, Tensor], Prediction]
    """f, (B, ..., C), and J w of w_lin and the samples -> what ``predict`` returns."""

    level: float | None = None
    """Of conformal sets or intervals beside the answer; None for the answer alone."""

    def answer(self, prediction: Prediction) -> Any:
        """Return what is said of y."""
        real = prediction.likelihood.real_valued
        found: tuple[Tensor, ...] = (prediction.expectation,)
        if real:
            found = tuple(prediction.moments())
        if self.level is not None and real:
            found += (*prediction.interval(self.level),)
        elif self.level is not None:
            found += (prediction.prediction_set(self.level),)
        return found if len(found) > 1 else found[0]


def exported(
    model: LinearModel, columns: Tensor, x: Any, ways: Ways, path: str | PathLike[str] | None
) -> ExportedProgram:
    """Return the map from inputs like x to what a posterior says of y, and save it to ``path``.

    It takes any number of examples where its graph can be freed of that of x, else as many as x.
    """
    suffix = ".pt2" if path is None else Path(path).suffix
    if suffix not in _FORMATS:
        raise ValueError(
            f"{str(path)!r} names no format: end it with .pt2 for torch.export or .onnx for ONNX."
        )
    x = map_tensors(lambda tensor: tensor.detach().to(model.network.device), x)
    # what cannot be is refused here, derivatives are probed, and what is random is drawn
    ways.answer(ways.predict(x))

    columns_at_once = model.by_autodiff(x, pulls=False).pushed

    def answer(x: Any) -> Any:
        rows = model.by_autodiff(x, pulls=False)
        rows.pushed = columns_at_once  # the same for every batch size
        return ways.answer(ways.of_products(rows.f, rows.push(columns)))

    def due(x: Any) -> Any:
        return ways.answer(ways.predict(x))

    try:
        with torch.no_grad(), model.network.guarded():
            graph = record_free(answer, x)
        shapes = map_tensors(lambda t: {0: Dim("batch")} if t.dim() else None, x)
        program = torch.export.export(graph, (x,), dynamic_shapes=(shapes,))
        sizes = 1, 2 * batch_size(x) + 1
        _check(program.module(), due, x, {f"{n} examples": resized(x, n) for n in sizes})
    except Exception as error:  # torch's are of many kinds
        reason = str(error).partition("\n")[0]
        logger.warning(
            "The exported program takes as many examples as x and no other number: %s", reason
        )
        with torch.no_grad(), model.network.guarded():
            program = torch.export.export(record(answer, x), (x,))
    _check(program.module(), due, x, dict(_others(x)))
    if path is not None:
        _FORMATS[suffix](program, path, due, x)
    return program


def _check(run: Callable[[Any], Any], due: Callable[[Any], Any], x: Any, others: Any) -> None:
    """Refuse a program that does not answer as the posterior does at x and at other inputs."""
    _compare(run(x), due(x), "its example inputs")
    for kind, other in others.items():
        try:
            expected = due(other)
        except Exception:  # inputs that the network does not take tell nothing
            continue
        _compare(run(other), expected, kind)


def _save_program(program: ExportedProgram, path: str | PathLike[str], *_: Any) -> None:
    torch.export.save(program, path)


def _save_onnx(
    program: ExportedProgram, path: str | PathLike[str], due: Callable[[Any], Any], x: Any
) -> None:
    """Write ONNX, and compare what onnxruntime makes of the file with the posterior."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"Export to ONNX needs onnxscript and onnxruntime: pip install torch_lla_em[onnx] ({error})."
        ) from error
    torch.onnx.export(program, dynamo=True, verbose=False).save(path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def run(x: Any) -> Any:
        values = [tensor.cpu().numpy() for tensor in tensors_in(x)]
        found = [torch.from_numpy(out) for out in session.run(None, dict(zip(names, values)))]
        return tuple(found) if len(found) > 1 else found[0]

    _check(run, due, x, {})


_FORMATS = {".pt2": _save_program, ".onnx": _save_onnx}


def _others(x: Any) -> Iterator[tuple[str, Any]]:
    """Yield inputs like x, with what they are: of other values, in another order."""

    def scaled(tensor: Tensor, factor: float) -> Tensor:
        return factor * tensor if tensor.is_floating_point() else tensor

    def rolled(tensor: Tensor) -> Tensor:
        return tensor.roll(1, 0) if tensor.dim() else tensor

    def flipped(tensor: Tensor) -> Tensor:
        return tensor.flip(-1) if tensor.dim() > 1 else tensor

    def shortened(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() or tensor.dim() < 2:
            return tensor
        kept = torch.arange(tensor.shape[-1], device=tensor.device) < tensor.shape[-1] / 2
        return tensor * kept

    yield "the examples in another order", map_tensors(rolled, x)
    yield "half the inputs", map_tensors(lambda tensor: scaled(tensor, 0.5), x)
    yield "inputs of the opposite sign", map_tensors(lambda tensor: scaled(tensor, -1.5), x)
    yield "inputs flipped along their last axis", map_tensors(flipped, x)
    yield "tokens or masks that are 0 from the middle on", map_tensors(shortened, x)


def _compare(answer: Any, due: Any, kind: str) -> None:
    """Refuse a program that does not answer as the posterior does, at inputs of some kind."""
    for found, expected in zip(*((a if isinstance(a, tuple) else (a,)) for a in (answer, due))):
        if expected.dtype == torch.bool:  # of sets, whose edge rounding may move
            found, expected = found.double(), expected.double()
            if (found != expected).double().mean() <= 0.01 + 1 / expected.numel():
                continue
        room = 100 * torch.finfo(expected.dtype).eps ** 0.75 * expected.abs().max()
        if found.shape != expected.shape:
            raise RuntimeError(
                f"The exported program returns the shape {tuple(found.shape)} for "
                f"{tuple(expected.shape)} at {kind}."
            )
        gap = (found.to(expected) - expected).abs().max()
        if expected.isfinite().all() and not gap <= room:
            raise RuntimeError(
                f"The exported program is off by {gap.item():.2g} at {kind}: it holds values that "
                "the network computed at the example inputs, or the network draws at random. "
                "Exported networks use torch operations alone on what depends on their inputs: no "
                ".item(), .tolist(), numpy or `if` on values."
            )
