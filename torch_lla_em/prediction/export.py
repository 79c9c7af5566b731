"""The predictive as a program of torch's own operations, which runs without this library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx

from torch_lla_em.data import map_tensors
from torch_lla_em.prediction.parts import predicted
from torch_lla_em.prediction.posterior import StoredPosterior
from torch_lla_em.prediction.prediction import Prediction


def exported(
    posterior: StoredPosterior,
    predict: Callable[[Any], Prediction],
    x: Any,
    num_samples: int | None,
    path: str | PathLike | None,
) -> ExportedProgram:
    """Return the map from inputs of the shape of x to what ``predict`` says of y.

    It is recorded at x, derivatives and all, so that the number of rows stays as it is there: torch
    cannot take derivatives of many layers of which it does not know the size.
    """
    x = map_tensors(lambda tensor: tensor.detach().to(posterior._device), x)
    # what cannot be is refused here, derivatives are probed, and what is random is drawn
    due = _answer(predict(x))
    model, columns, table = (
        posterior._linear_model,
        posterior._columns(num_samples),
        posterior.mixture,
    )
    class_dim = model.network.class_dim

    def answer(x: Any) -> Tensor | tuple[Tensor, Tensor]:
        rows = model.by_autodiff(x, pulls=False)
        Jw = rows.push(columns)
        return _answer(predicted(posterior.likelihood, rows.f, Jw, table, class_dim))

    with torch.no_grad(), model.network.guarded():
        graph = make_fx(answer)(x)
    program = torch.export.export(graph, (x,))
    run = program.module()
    _compare(run(x), due, "its example inputs")
    for kind, other in _others(x):
        with suppress(Exception):  # inputs that the network does not take tell nothing
            due = None
            due = _answer(predict(other))
        if due is not None:
            _compare(run(other), due, kind)
    if path is not None:
        torch.export.save(program, path)
    return program


def _answer(prediction: Prediction) -> Tensor | tuple[Tensor, Tensor]:
    if prediction.likelihood.real_valued:
        return (*prediction.moments(),)
    return prediction.expectation


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
        room = 100 * torch.finfo(expected.dtype).eps ** 0.75 * expected.abs().max()
        gap = (found - expected).abs().max()
        if expected.isfinite().all() and not gap <= room:
            raise RuntimeError(
                f"The exported program is off by {gap.item():.2g} at {kind}: it holds values that "
                "the network computed at the example inputs, or the network draws at random. "
                "Exported networks use torch operations alone on what depends on their inputs: no "
                ".item(), .tolist(), numpy or `if` on values."
            )
