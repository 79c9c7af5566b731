"""The predictive as a program of torch's own operations, which runs without this library."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx

from torch_lla_em.data import map_tensors
from torch_lla_em.prediction.parts import predicted
from torch_lla_em.prediction.prediction import Prediction

if TYPE_CHECKING:
    from torch_lla_em.prediction.fitted import Fitted


def exported(
    fitted: Fitted, x: Any, num_samples: int | None, path: str | PathLike | None
) -> ExportedProgram:
    """Return the map from inputs of the shape of x to what ``fitted(x)`` returns.

    It is recorded at x, derivatives and all, so that the number of rows stays as it is there: torch
    cannot take derivatives of many layers of which it does not know the size.
    """
    x = map_tensors(lambda tensor: tensor.detach().to(fitted._device), x)
    # what cannot be is refused here, derivatives are probed, and what is random is drawn
    due = _answer(fitted.predict(x, num_samples=num_samples))
    model, columns, table = fitted._linear_model, fitted._columns(num_samples), fitted.mixture
    class_dim = model.network.class_dim

    def answer(x: Any) -> Tensor | tuple[Tensor, Tensor]:
        f, Jw = model.jvp(x, columns)
        return _answer(predicted(fitted.likelihood, f, Jw, table, class_dim))

    with torch.no_grad(), model.network.guarded():
        graph = make_fx(answer)(x)
    program = torch.export.export(graph, (x,))
    _compare(program.module()(x), due)
    if path is not None:
        torch.export.save(program, path)
    return program


def _answer(prediction: Prediction) -> Tensor | tuple[Tensor, Tensor]:
    if prediction.likelihood.real_valued:
        return (*prediction.moments(),)
    return prediction.expectation


def _compare(answer: Any, due: Any) -> None:
    """Refuse a program that does not answer as it should."""
    for found, expected in zip(*((a if isinstance(a, tuple) else (a,)) for a in (answer, due))):
        room = 100 * torch.finfo(expected.dtype).eps ** 0.75 * expected.abs().max()
        if not (found - expected).abs().max() <= room:
            raise RuntimeError(
                "The exported program does not answer as the posterior does: the network does "
                "something that depends on its inputs' values, or draws at random."
            )
