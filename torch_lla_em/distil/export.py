"""A student as one program of torch operations with named outputs."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from torch_lla_em.data import map_tensors, tensors_in
from torch_lla_em.distil.predicted import StudentPrediction
from torch_lla_em.prediction import combined

# relative differences that ONNX may make, which stores constants in single precision
_OF_ONNX = 1e-5


class Program(nn.Module):
    """What is exported: maps inputs to named tensors."""

    shrink: Tensor
    bounds: Tensor
    above: Tensor

    def __init__(self, student: Any, level: float | None):
        super().__init__()
        self.student, self.level = student, level
        reference = student.reference_scores
        if reference is not None:
            # a tensor, because ONNX stores numbers in single precision
            shrink = torch.full_like(reference[0], 1 - student._room())
            self.register_buffer("shrink", shrink)
            self.register_buffer("bounds", shrink * reference)
            self.register_buffer("above", (reference[None] >= self.bounds[:, None]).sum(1))

    def forward(self, x: Any) -> dict[str, Tensor]:
        """Return all outputs by name."""
        prediction = self.student.predict(x)
        found = named_outputs(prediction, self.level)
        if prediction.reference is not None:
            found["p_value"] = self._p_values(prediction._ood_scores())
        return found

    def _p_values(self, scores: Tensor) -> Tensor:
        """Return the p-values by comparisons alone, which every runtime has."""
        reference = self.student.reference_scores
        own = combined((1 + (reference >= (self.shrink * scores)[:, None]).sum(1)).double())
        theirs = combined((self.above + (scores[:, None] >= self.bounds)).double())
        return (1 + (theirs <= own[:, None] * (1 + 1e-9)).sum(1)).double() / (1 + len(reference))


def named_outputs(prediction: StudentPrediction, level: float | None) -> dict[str, Tensor]:
    """Return all outputs of a program but the p-values, by name."""
    likelihood = prediction.likelihood
    if likelihood.gives_probabilities:
        found = {"probs": prediction.probs}
    else:
        found = {
            "expectation": prediction.expectation,
            "predictive_variance": prediction.predictive_variance,
        }
    found |= {"epistemic": prediction.epistemic, "aleatoric": prediction.aleatoric}
    found["ood_score"] = prediction._ood_scores().to(prediction.centre)
    if level is not None and likelihood.real_valued:
        found |= prediction.interval(level)._asdict()
    elif level is not None:
        found["prediction_set"] = prediction.prediction_set(level)
    return found


def exported(
    student: Any, x: Any, path: str | PathLike[str] | None, level: float | None
) -> ExportedProgram:
    """Return a student as a program for any number of examples, and save it to ``path``."""
    suffix = ".pt2" if path is None else Path(path).suffix
    if suffix not in (".pt2", ".onnx"):
        raise ValueError(
            f"{str(path)!r} has no known ending. Use .pt2 for torch.export or .onnx for ONNX."
        )
    program = Program(student, level)
    with torch.no_grad():
        due = program(x)
        twice = map_tensors(lambda t: torch.cat([t, t]), x)
        shapes = map_tensors(lambda t: {0: Dim("batch")}, x)
        found = torch.export.export(program, (twice,), dynamic_shapes=(shapes,), strict=False)
        _compare(found.module()(x), due, 0.0)
        if suffix == ".onnx":
            _save_onnx(found, path, x, due)
        elif path is not None:
            torch.export.save(found, path)
    return found


def _save_onnx(program: ExportedProgram, path: Any, x: Any, due: dict[str, Tensor]) -> None:
    """Write an ONNX file, and compare its values in onnxruntime with the student's."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "Export to ONNX needs onnxscript and onnxruntime: pip install torch_lla_em[onnx] "
            f"({error})."
        ) from error
    program = program.run_decompositions({torch.ops.aten.sort.stable: _sorted})
    torch.onnx.export(program, dynamo=True, verbose=False, output_names=list(due)).save(path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    values = [tensor.cpu().numpy() for tensor in tensors_in(x)]
    names = [each.name for each in session.get_inputs()]
    found = session.run(list(due), dict(zip(names, values)))
    _compare({name: torch.from_numpy(v) for name, v in zip(due, found)}, due, _OF_ONNX)


def _sorted(x: Tensor, *, stable: bool, **kwargs: Any) -> Any:
    """Replaces an operation that ONNX does not know."""
    return torch.sort(x, **kwargs)


def _compare(found: dict[str, Tensor], due: dict[str, Tensor], least: float) -> None:
    """Raise an error if a program returns other values than the student."""
    for name, expected in due.items():
        a, b = found[name].double().cpu(), expected.double().cpu()
        eps = torch.finfo(expected.dtype).eps if expected.is_floating_point() else 0.0
        room = max(100 * eps**0.75, least) * b.abs().max()
        if name in ("p_value", "prediction_set"):  # rounding may change one rank, or one class
            room = b.new_tensor(0.01 + 1 / b.numel())
            gap = (a - b).abs().mean()
        else:
            gap = (a - b).abs().max()
        if a.shape != b.shape or not gap <= room:
            raise RuntimeError(
                f"The exported program is off by {gap:.2g} in {name!r}: the network computes "
                "constants from the example inputs, or draws random numbers. Exported networks must "
                "use only torch operations on values that depend on their inputs: no .item(), "
                ".tolist(), numpy or `if`."
            )
