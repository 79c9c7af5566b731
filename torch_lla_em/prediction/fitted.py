"""The public methods of a fitted posterior: predictions, calibration, export."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.export import ExportedProgram

from torch_lla_em.data import Data, paired
from torch_lla_em.inference import Estimate
from torch_lla_em.likelihoods import Regression
from torch_lla_em.prediction import metrics, summary
from torch_lla_em.prediction.calibration import calibrated
from torch_lla_em.prediction.conformal import REFERENCE, Judge, Reference
from torch_lla_em.prediction.export import Ways, exported
from torch_lla_em.prediction.functions import MODE, NETWORK, SCALE, WEIGHT, mixed, slots
from torch_lla_em.prediction.posterior import StoredPosterior
from torch_lla_em.prediction.prediction import Prediction
from torch_lla_em.prediction.pushed import joined, posterior_alone, predicted, push_forward
from torch_lla_em.prediction.validation import held_out_evidence, pushed
from torch_lla_em.runtime import check_choice, check_options, collected_warnings, group_of

logger = logging.getLogger("torch_lla_em")

# number of training examples whose predictions are checked, and of values that their samples take
_EXAMPLES, _NUMBERS = 256, 2**22

Mean = Literal["network", "linear"]
Link = Literal["mc", "probit", "probit_shared"]
Own = TypeVar("Own", bound="Fitted")


class Fitted(summary.Printed, StoredPosterior):
    """A fitted posterior that predicts; the base class of ``LinearisedLaplace``."""

    def forward(
        self,
        x: Any = None,
        link_approx: Link = "mc",
        generator: torch.Generator | None = None,
        **inputs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return predicted probabilities or rates; for continuous targets (mean, variance) of y.

        Args:
            x (Tensor, tuple, dict, DataLoader or Dataset): Inputs, as the model takes them. The
                model may also be given its inputs by name: ``la(input_ids=...)``.
            link_approx (str): How E[y] is computed. "mc" (default): as an average over functions.
                "probit": from the mean and the variance of f. "probit_shared": with one variance for
                all classes, which keeps the network's most probable class.
            generator (torch.Generator, optional): Used to draw new samples with the same covariance.
                Default None: the posterior samples themselves, so that calls are repeatable.

        Returns:
            Tensor (B, ..., C) of probabilities or rates; for regression two tensors, the mean and
            the variance of y. The variance includes the observation noise σ².

        Raises:
            NotFittedError: Before ``fit``, or if the model has changed since.

        Example:
            >>> probabilities = la(x)
            >>> mean, variance = regression(x)
        """
        check_choice("link_approx", link_approx, ("mc", "probit", "probit_shared"))
        prediction = self.predict(x, generator=generator, **inputs)
        if self.likelihood.real_valued:
            return prediction.expectation, prediction.predictive_variance
        if link_approx == "mc":
            return prediction.expectation
        return prediction.smoothed(shared=link_approx == "probit_shared")

    def predict(
        self,
        x: Any = None,
        mean: Mean | None = None,
        generator: torch.Generator | None = None,
        num_samples: int | None = None,
        **inputs: Any,
    ) -> Prediction:
        """Return the predictive distribution at x: as fitted, or as calibrated.

        Args:
            x (Tensor, tuple, dict, DataLoader or Dataset): Inputs, as the model takes them; or pass
                them by name.
            mean (str, optional): Use the posterior alone, around f(x) ("network") or J(x) w_lin
                ("linear"). Default None: the mixture that the fit or ``calibrate`` has chosen.
            generator (torch.Generator, optional): Used to draw new samples with the same covariance.
            num_samples (int, optional): Number of samples to use; fewer are faster and less
                accurate. Default None: all.

        Returns:
            A ``Prediction``. It is differentiable in x if x requires gradients.

        Raises:
            NotFittedError: Before ``fit``, or if the model has changed since.
            ValueError: If ``num_samples`` exceeds the number of samples.
            TypeError: If inputs are passed both by position and by name.

        Example:
            >>> uncertainty = la.predict(x).epistemic
        """
        self._require_fit()
        count = len(self.w_samples)
        if num_samples is not None and not 1 <= num_samples <= count:
            raise ValueError(f"num_samples={num_samples}, but there are {count} samples.")
        if inputs and x is not None:
            raise TypeError("Pass all inputs by name, or all in one tuple or dict.")
        prediction = self._predicted(
            inputs if x is None else x, self._table_around(mean), num_samples
        )
        if generator is None:
            return prediction
        return replace(prediction, deviations=mixed(prediction.deviations, generator))

    def is_ood(self, x: Any = None, rate: float = 0.05, **inputs: Any) -> Tensor:
        """Return which inputs are out-of-distribution (OOD).

        Call ``calibrate`` first. Without it, posteriors with variational curvature compare inputs
        with training examples and give more false alarms than ``rate``; others raise an error.

        Args:
            x (Tensor, tuple, dict, DataLoader or Dataset): Inputs, as the model takes them.
            rate (float): Largest share of false alarms among inputs from the validation set's
                distribution. Default 0.05.

        Returns:
            A mask of shape (B,). ``predict(x).p_value`` has the p-values.

        Raises:
            ValueError: If there are no reference examples, or too few for this rate.

        Example:
            >>> suspicious = la.is_ood(x, rate=0.1)
        """
        return self.predict(x, **inputs).is_ood(rate)

    def functional_samples(self, x: Any, generator: torch.Generator | None = None) -> Tensor:
        """Return samples of f at x, shape (K, B, ..., C), joint over inputs.

        Args:
            x (Tensor, tuple, dict, DataLoader or Dataset): Inputs, as the model takes them.
            generator (torch.Generator, optional): Used to draw new samples with the same covariance.

        Example:
            >>> spread = la.functional_samples(x).std(0)
        """
        return self.predict(x, generator=generator).samples

    def predictive_samples(self, x: Any, generator: torch.Generator | None = None) -> Tensor:
        """Return the functional samples after the link function, such as softmax.

        Args:
            x (Tensor, tuple, dict, DataLoader or Dataset): Inputs, as the model takes them.
            generator (torch.Generator, optional): Used to draw new samples with the same covariance.

        Returns:
            Tensor of shape (K, B, ..., C).
        """
        return self.predict(x, generator=generator).predictive_samples

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
        count, table = len(self.w_samples), self.mixture
        if not -count <= k < count:
            raise IndexError(f"There are {count} samples: k runs from 0, not to {k}.")
        part = slots(table[:, WEIGHT], count)[k]
        alone = table[part].to(self.w_lin, copy=True)
        w = alone[MODE] * self.w_lin + alone[SCALE].sqrt() * self.w_samples[k]
        training, class_dim = self._training(), self._linear_model.network.class_dim

        def sample(x: Any) -> Tensor:
            f, Jw = push_forward(self._linear_model, x, w[None])
            return Prediction(self.likelihood, alone[NETWORK].to(f) * f, Jw, class_dim).samples[0]

        def shrunk(x: Any) -> Tensor:  # by the variance of all samples
            f, Jw = push_forward(self._linear_model, x, self.w_lin[None], self.w_samples)
            return predicted(self.likelihood, f, Jw, table, training, class_dim).samples[k]

        return sample if training is None else shrunk

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
        judges = num_samples is None
        of_products = partial(self._of_products, table=self.mixture, judges=judges)
        ways = Ways(partial(self.predict, num_samples=num_samples), of_products, level)
        if not judges:
            few, every = (self.predict(x, num_samples=n).expectation for n in (num_samples, None))
            logger.info(
                "With %d of %d samples, predictions at the example inputs change by up to %.2g.",
                *(num_samples, len(self.w_samples), (few - every).abs().max()),
            )
        return exported(self._linear_model, self._columns(num_samples), x, ways, path)

    def joint_log_prob(self, x: Any, y: Tensor) -> Tensor:
        """Return log p(y_1..y_B | x_1..x_B), shape ().

        Args:
            x (Tensor, tuple, dict, DataLoader or Dataset): Inputs, as the model takes them.
            y (Tensor): Targets, as in the training data.
        """
        return self.predict(x).joint_log_prob(y)

    def calibrate(self: Own, loader: Any, targets: Tensor | None = None) -> Own:
        """Fit a few numbers of the predictions to a validation set, in one pass.

        For classes and labels these are a temperature of the network, a scale of the posterior's
        variance, a factor of the softmax at the posterior's mean, and the weights of the three. For
        regression they are the scale, the observation noise σ, and the share of the linear mode in
        the mean. If the validation NLL does not improve, predictions are kept as they were.

        The numbers are fitted to all examples. For ``p_value``, ``is_ood``, ``prediction_set`` and
        ``interval`` they are fitted a second time, to every other example; the others are the
        reference.

        Args:
            loader (DataLoader, Dataset, list of batches, or inputs): The validation set. It must
                not have been used in training.
            targets (Tensor, optional): The targets, if ``loader`` are inputs.

        Returns:
            The posterior itself; ``la.calibration`` holds the improvement. In a distributed run all
            ranks have to call this method.

        Raises:
            ValueError: If no example has a label.
            NotFittedError: Before ``fit``, or if the model has changed since.

        Example:
            >>> improvement = str(la.calibrate(x, y).calibration)
        """
        self._require_fit(surely=True)
        group = group_of(self._shard)
        with collected_warnings(self.messages), torch.inference_mode(False), torch.no_grad():
            parts = pushed(self, paired(loader, targets), group)
            found = calibrated(joined(part for _, part in parts), group, self.mixture)
        self.mixture, self.calibration = found.table.to(self.mixture), found.calibration
        for name, tensor in zip(REFERENCE, found.reference):
            setattr(self, name, tensor)
        if isinstance(self.likelihood, Regression):
            self.sigma_noise = self.sigma_noise * found.noise
            self.likelihood = self.likelihood.at_noise(self.sigma_noise)
        return self

    def held_out_evidence(
        self, loader: Any, targets: Tensor | None = None, *, together: int = 1
    ) -> Estimate:
        """Return the log predictive density of held-out data; larger is better.

        Use it to choose between posteriors of different networks. To choose between networks that
        are used without a posterior, compare their validation losses.

        Args:
            loader (DataLoader, Dataset, list of batches, or inputs): The held-out data.
            targets (Tensor, optional): The targets, if ``loader`` are inputs.
            together (int): Number of consecutive examples that are predicted jointly, whatever the
                loader's batch size. Default 1.

        Returns:
            An ``Estimate`` of ``value`` and ``standard_error`` over groups of examples.

        Raises:
            NotFittedError: Before ``fit``, or if the model has changed since.

        Example:
            >>> log_density = la.held_out_evidence(x, y, together=5).value
        """
        check_options(together=together)
        self._require_fit(surely=True)
        with torch.inference_mode(False), torch.no_grad():
            data = paired(loader, targets)
            return held_out_evidence(self, data, together, group_of(self._shard))

    def _table_around(self, mean: Mean | None) -> Tensor:
        """Return the components of predictions, of the posterior alone if a mean is given."""
        check_choice("mean", mean, (None, "network", "linear"))
        if mean is None:
            return self.mixture
        return posterior_alone(mean, scale=self.posterior_scale)

    def _predicted(self, x: Any, table: Tensor, num_samples: int | None = None) -> Prediction:
        judges = table is self.mixture and num_samples is None
        has_mode = judges or bool(table[:, MODE].any())
        mode = [self.w_lin[None]] * has_mode
        f, Jw = push_forward(self._linear_model, x, *mode, self.w_samples[:num_samples])
        if not has_mode:
            Jw = torch.cat([torch.zeros_like(Jw[:1]), Jw])
        return self._of_products(f, Jw, table, judges)

    def _of_products(self, f: Tensor, Jw: Tensor, table: Tensor, judges: bool) -> Prediction:
        """Return the prediction from f, (B, ..., C), and J w of w_lin and the samples."""
        class_dim = self._linear_model.network.class_dim
        training = self._training(len(Jw) - 1) if table is self.mixture else None
        prediction = predicted(self.likelihood, f, Jw, table, training, class_dim)
        if not judges or (self.conformal_table is None and training is None):
            return prediction
        likelihood, table = self.likelihood, self.conformal_table
        table = self.mixture if table is None else table
        if isinstance(likelihood, Regression) and self.conformal_sigma is not None:
            likelihood = likelihood.at_noise(self.conformal_sigma)
        other = partial(predicted, likelihood, f, Jw, table, training, class_dim)
        return replace(prediction, judge=Judge(self._reference, other))

    def _reference(self) -> Reference:
        """Return the scores of validation examples, or of training examples without a calibration."""
        if self.conformal_table is not None:
            return Reference(*(getattr(self, name) for name in REFERENCE))
        unusual = self._training().distances(self.likelihood)[:, None]
        return Reference(self.mixture, None, unusual, None)

    def _warn_of_collapse(self, data: Data) -> None:
        """Log a warning for each sign that the fit has failed, judged by some training examples."""
        most = _NUMBERS // (len(self.w_samples) * max(data.num_outputs // data.num_rows, 1))
        if data.group.rank > 0 or not most:
            return
        batch = next(data.first().split(min(_EXAMPLES, most)))
        if len(batch.rows) > most:  # a batch that cannot be split
            return
        y = batch.targets if batch.targets.is_floating_point() else batch.targets.long()
        prediction = self._predicted(batch.inputs, self.mixture)
        for words in metrics.warnings_of(self, prediction, y):
            logger.warning("%s", words)

    def _table(self) -> tuple[str, summary.Cells]:
        return summary.of_fit(self)
