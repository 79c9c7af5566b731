"""The public methods of a fitted posterior: predictions, calibration, export."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

from torch import Tensor
from torch.export import ExportedProgram

from torch_lla_em.likelihoods import Regression, Weighted
from torch_lla_em.prediction import metrics, summary
from torch_lla_em.prediction.calibration import Kept
from torch_lla_em.prediction.conformal import Reference
from torch_lla_em.prediction.export import Ways, exported, returned
from torch_lla_em.prediction.functions import WEIGHT, slots
from torch_lla_em.prediction.posterior import StoredPosterior
from torch_lla_em.prediction.predictor import Predictor
from torch_lla_em.problem import Problem
from torch_lla_em.runtime import report

logger = logging.getLogger("torch_lla_em")

# number of training examples whose predictions are checked, and of values that their samples take
_EXAMPLES, _NUMBERS = 256, 2**22


class Fitted(summary.Printed, Predictor, StoredPosterior):
    """A fitted posterior that predicts; the base class of ``LinearisedLaplace``."""

    @property
    def _posteriors(self) -> Sequence[StoredPosterior]:
        return (self,)

    @property
    def _components(self) -> tuple[Tensor, None]:
        return self.mixture, None

    def _keep(self, found: Kept) -> None:
        self.mixture = found.table.to(self.mixture)
        if isinstance(self.likelihood, Regression):
            self.sigma_noise = self.sigma_noise * found.noise
            self.likelihood = self.likelihood.at_noise(self.sigma_noise)

    @property
    def _has_reference(self) -> bool:
        return super()._has_reference or self.training_deviations is not None

    def _reference(self) -> Reference:
        """Return the scores of validation or, without a calibration, of training examples."""
        training = self._training()
        if self.conformal_table is not None or training is None:
            return super()._reference()
        return Reference(self.mixture, None, training.distances()[:, None], None)

    def function_sample(self, k: int) -> Callable[[Any], Tensor]:
        """Return the k-th function of the posterior, the same function at every call.

        Args:
            k (int): Number of the sample, from 0 to K - 1.

        Returns:
            A function that maps inputs to outputs of shape (B, ..., C).

        Raises:
            IndexError: If there is no such sample.
            NotFittedError: Before ``fit``, or if the model has changed since.

        Example:
            >>> outputs = la.function_sample(0)(x)
        """
        self._require_fit()
        count, some = len(self.w_samples), slice(None)
        if not 0 <= k < count:
            raise IndexError(
                f"k must be from 0 to {count - 1}, since there are {count} samples, not {k}."
            )
        if self._training() is None:  # else the variance of all samples shrinks the mean
            some = slice(k, k + 1)
        part = slots(self.mixture[:, WEIGHT], count)[k]
        alone = self.mixture[None, part].clone()

        def sample(x: Any) -> Tensor:
            samples = self._at(x, some).prediction(alone).samples
            return samples[k] if len(samples) == count else samples[0]

        return sample

    def export(
        self,
        x: Any,
        path: str | PathLike[str] | None = None,
        num_samples: int | None = None,
        level: float | None = None,
    ) -> ExportedProgram:
        """Return ``la(x)`` as a program of torch operations, which runs without this library.

        Args:
            x (Tensor, tuple or dict): Example inputs. The program takes any number of examples if
                the network allows it, which is logged otherwise.
            path (str, optional): Where to save it: a name that ends with .pt2 for torch.export, or
                with .onnx for ONNX. Default None: it is not saved.
            num_samples (int, optional): Number of samples to use; fewer are faster. How much this
                changes the predictions at x is logged. Default None: all.
            level (float, optional): Return the mask of ``prediction_set(level)``, or the ends of
                ``interval(level)`` for continuous targets, as well. It needs ``calibrate``.

        Raises:
            ValueError: If the name of the file has another ending.
            RuntimeError: If the program returns other values than ``la(x)``, for example because the
                network's operations depend on values of its inputs.

        Example:
            >>> program = la.export(x).module()  # doctest: +SKIP
        """
        self._require_fit(surely=True)

        def of_inputs(x: Any) -> Any:
            return returned(self.predict(x, num_samples=num_samples), level)

        def of_products(f: Tensor, Jw: Tensor) -> Any:
            data = self._of_products(f, Jw, f, self._linear_model.network.class_dim)
            return returned(self._predicted(data, judged=num_samples is None), level)

        if num_samples is not None:
            few, every = (self.predict(x, num_samples=n).expectation for n in (num_samples, None))
            logger.info(
                "With %d of %d samples, predictions at the example inputs change by up to %.2g.",
                *(num_samples, len(self.w_samples), (few - every).abs().max()),
            )
        return exported(
            self._linear_model, self._columns(num_samples), x, Ways(of_inputs, of_products), path
        )

    def _warn_of_collapse(self, problem: Problem) -> None:
        """Log a warning for each sign that the fit has failed, judged by some training examples."""
        data, likelihood = problem.data, problem.likelihood
        most = _NUMBERS // (len(self.w_samples) * max(data.num_outputs // data.num_rows, 1))
        if data.group.rank > 0 or not most:
            return
        batch = next(data.first().split(min(_EXAMPLES, most)))
        if len(batch.rows) > most:  # a batch that cannot be split
            return
        y = batch.targets
        if isinstance(likelihood, Weighted):
            y, _ = likelihood.unpack(y, problem.w_MAP)
        y = y if y.is_floating_point() else y.long()
        prediction = self._predicted(self._at(batch.inputs), judged=False)
        for words in metrics.warnings_of(self, prediction, y):
            report("log", words)

    _table = summary.of_fit
