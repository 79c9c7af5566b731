"""The public method that exports predictions, the same for a posterior and for an ensemble."""

from __future__ import annotations

from os import PathLike
from typing import Any, NamedTuple

from torch import Tensor
from torch.export import ExportedProgram

from torch_lla_em.prediction.export import (
    ByMember,
    ExportedMember,
    Ways,
    exported,
)
from torch_lla_em.prediction.prediction import Prediction
from torch_lla_em.prediction.predictor import Predictor
from torch_lla_em.prediction.pushforward import stack_members
from torch_lla_em.runtime import report


class ProgramOutputs(NamedTuple):
    """What a program returns besides ``la(x)``: comparisons with the validation set."""

    level: float | None = None
    """The level of prediction sets or intervals."""

    p_value: bool = False
    """Whether p-values are returned."""


def returned(prediction: Prediction, outputs: ProgramOutputs) -> dict[str, Tensor]:
    """Return the tensors of a prediction that a program returns, by the names that students have too."""
    likelihood, level = prediction.likelihood, outputs.level
    found = {"probs" if likelihood.gives_probabilities else "expectation": prediction.expectation}
    if likelihood.real_valued:
        found["predictive_variance"] = prediction.predictive_variance
    if level is not None and likelihood.real_valued:
        found |= prediction.interval(level)._asdict()
    elif level is not None:
        found["prediction_set"] = prediction.prediction_set(level)
    if outputs.p_value:
        found["p_value"] = prediction.p_value
    return found


class Exports(Predictor):
    """Predictions, and programs of them."""

    def export(
        self,
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
            x (Tensor, tuple or dict): Example inputs. The program takes any number of examples if
                the network allows it, which is logged otherwise.
            path (str, optional): Where to save it: a name that ends with .pt2 for torch.export, or
                with .onnx for ONNX. Default None: it is not saved.
            num_samples (int, optional): Number of samples to use; fewer are faster. How much this
                changes the predictions at x is shown. Default None: all.
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
        posteriors, outputs = self._members(surely=True), ProgramOutputs(level, p_value)

        def of_inputs(x: Any) -> dict[str, Tensor]:
            return returned(self._predicted(self._at(x, slice(num_samples))), outputs)

        def of_products(found: ByMember) -> dict[str, Tensor]:
            each = [
                posterior.of_products(f, Jw, f, posterior.setting.linear_model.network.class_dim)
                for posterior, (f, Jw) in zip(posteriors, found)
            ]
            return returned(self._predicted(stack_members(each)), outputs)

        if num_samples is not None:
            few, every = (self.predict(x, num_samples=n).expectation for n in (num_samples, None))
            text = (
                f"With {num_samples} of {len(posteriors[0].result.w_samples)} samples, predictions at the "
                f"example inputs differ from la(x) by up to {(few - every).abs().max():.2g}."
            )
            if level is not None:
                text += (
                    f" The coverage of {level:g} is approximate, since all samples were calibrated."
                )
            if p_value:
                text += " The p-values are approximate, since all samples were compared."
            report("show", text)
        members = [
            ExportedMember(p.setting.linear_model, p.columns(num_samples)) for p in posteriors
        ]
        return exported(members, x, Ways(of_inputs, of_products), path)
