"""Exports predictions as programs, of a posterior or of an ensemble: it is a method of both."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.export import ExportedProgram

from torch_lla_em.data import to_device
from torch_lla_em.jacobian import LinearModel
from torch_lla_em.prediction.export import Answer, program_of
from torch_lla_em.prediction.posterior import required
from torch_lla_em.prediction.prediction import Prediction
from torch_lla_em.prediction.predictor import at_inputs, predicted
from torch_lla_em.prediction.pushforward import stack_members


def export(
    la: Any,
    x: Any,
    path: str | PathLike[str] | None = None,
    num_samples: int | None = None,
    level: float | None = None,
    p_value: bool = False,
) -> ExportedProgram:
    """Return ``la(x)`` as a program of torch operations, which runs without this library.

    The program returns a dict: "probs" (for other likelihoods "expectation"), "predictive_variance" for
    continuous targets, and what ``level`` and ``p_value`` add. These are the names of outputs in ONNX, too.
    The program of an ensemble contains every network and its samples.

    Args:
        la (LinearisedLaplace or LaplaceEnsemble): The posterior; ``la.export(x)`` passes it.
        x (Tensor, tuple or dict): Example inputs. The program takes any number of examples if
            the network allows it, which is logged otherwise.
        path (str, optional): Where to save it: a name that ends with .pt2 for torch.export, or
            with .onnx for ONNX. Default None: it is not saved.
        num_samples (int, optional): Number of samples to use; fewer are faster. Coverage and p-values are
            approximate then, since all samples were calibrated. Default None: all.
        level (float, optional): Return the mask "prediction_set" of ``prediction_set(level)``, or the ends
            "lower" and "upper" of ``interval(level)`` for continuous targets, as well. It needs
            ``calibrate``.
        p_value (bool): Return the p-values of ``predict(x).p_value`` as well, as "p_value". An input is
            out of distribution if its p-value is at most the rate of false alarms that is accepted.
            Default False.

    Raises:
        ValueError: If the name of the file has another ending, or ``level`` or ``p_value`` are
            requested without reference examples.
        RuntimeError: If the program returns other values than ``la(x)``, for example because the
            network's operations depend on values of its inputs.

    Example:
        >>> program = la.export(x).module()  # doctest: +SKIP
    """
    known = required(la, surely=True)
    known = known if num_samples is None else known.few(num_samples)
    posteriors = known.members
    models = [posterior.setting.linear_model for posterior in posteriors]

    def returned(prediction: Prediction) -> dict[str, Tensor]:
        likelihood = prediction.likelihood
        name = "probs" if likelihood.gives_probabilities else "expectation"
        found = {name: prediction.expectation}
        if likelihood.real_valued:
            found["predictive_variance"] = prediction.predictive_variance
        if level is not None and likelihood.real_valued:
            found |= prediction.interval(level)._asdict()
        elif level is not None:
            found["prediction_set"] = prediction.prediction_set(level)
        return found | ({"p_value": prediction.p_value} if p_value else {})

    def direct(x: Any) -> dict[str, Tensor]:
        return returned(predicted(known, at_inputs(known, x)))

    def answer(steady: list[LinearModel], x: Any) -> dict[str, Tensor]:
        each = []
        for posterior, model in zip(posteriors, steady):
            columns = posterior.columns()
            rows = model.at(x, len(columns))
            Jw = rows.push(columns)  # f comes with it in forward mode
            each.append(posterior.of_products(rows.f, Jw, rows.f, model.network.class_dim))
        return returned(predicted(known, stack_members(each)))

    def recorded() -> Iterator[Answer]:
        # ONNX has no operations for the derivatives of convolutions and of pooling
        by_factors = any(model.factored for model in models)
        for factored in [True, False] if by_factors and not is_onnx else [False]:
            yield partial(answer, [model.steady(x, factored) for model in models])

    networks, is_onnx = [model.network for model in models], Path(path or "").suffix == ".onnx"
    x = to_device(x, networks[0].device)
    return program_of(direct, recorded(), networks, x, path)
