"""``Predicts``: the methods that a posterior and an ensemble of posteriors share, from predictions
to reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from torch_lla_em.data import AnyInputs, GivenWeights, Inputs, Loader, Values
from torch_lla_em.distil import Student, Way, distil
from torch_lla_em.prediction import (
    LOADERS,
    Calibration,
    Check,
    Holder,
    Mean,
    Monitor,
    Prediction,
    Record,
    Reference,
    Score,
    SuspiciousTargets,
    Table,
    calibrate,
    check,
    export,
    predict,
    predictions,
    require_one_shape,
    required,
    summary,
    suspicious,
)
from torch_lla_em.report import report

Own = TypeVar("Own", bound="Predicts")


class Predicts(Holder, nn.Module):
    """Base class of ``LinearisedLaplace`` and ``LaplaceEnsemble`` with the methods of a fitted
    posterior."""

    def take(self, posterior: Record) -> None:
        """Use another record from now on."""
        raise NotImplementedError

    def forward(
        self, x: AnyInputs | None = None, *more: Any, **inputs: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return predicted probabilities or rates; for continuous targets (mean, variance) of y.

        Args:
            x (Tensor, tuple, dict, DataLoader or Dataset): Inputs, as the model takes them: several
                in one tuple, ``la((a, b))``.
            *more: Not allowed, since x contains all inputs.
            **inputs: Inputs by name instead of x: ``la(input_ids=...)``. Pass a dict to other
                methods.

        Returns:
            Tensor (B, ..., C) of probabilities or rates; for regression two tensors, the mean and
            the variance of y. The variance includes the observation noise σ².

        Raises:
            NotFittedError: Before ``fit``, or if the model has changed since.
            TypeError: If inputs are passed both by position and by name.

        Example:
            >>> probabilities = la(x)
            >>> mean, variance = regression(x)
        """
        if more:
            raise TypeError(
                "la takes all inputs of the model as its first argument: pass several in one "
                "tuple, la((a, b)), or by their names."
            )
        if inputs and x is not None:
            raise TypeError(
                f"x was passed by position, but {', '.join(inputs)} by name, and arguments by name "
                "are inputs of the model: pass all inputs by name, or all in one tuple or dict. "
                "For options such as mean, call la.predict."
            )
        if x is None and not inputs:
            raise TypeError("la needs inputs of the model: pass them as its first argument, la(x).")
        if not isinstance(x, LOADERS):
            found = predict(self, inputs if x is None else x)
            if found.likelihood.real_valued:
                return found.expectation, found.predictive_variance
            return found.expectation
        is_real, means, variances = required(self).likelihood.real_valued, [], []
        for found in predictions(self, x):
            means.append(found.expectation)
            variances += [found.predictive_variance] if is_real else []
        require_one_shape(means, "predict batch by batch, with la.predictions(loader).")
        return (torch.cat(means), torch.cat(variances)) if is_real else torch.cat(means)

    def predict(
        self,
        x: AnyInputs,
        mean: Mean | None = None,
        *,
        groups: Values | None = None,
        weights: Values | None = None,
    ) -> Prediction:
        """Return the predictive distribution at x: as fitted, or as calibrated.

        Args:
            x (Tensor, tuple, dict, DataLoader or Dataset): Inputs, as the model takes them; a dict
                contains the inputs of the model by name. Batches of a loader may have no targets,
                and are read in the order of its dataset. The samples of all outputs have to fit
                into memory; otherwise use ``predictions``.
            mean (str, optional): Use the posterior alone, around f(x) ("network") or J(x) w_lin
                ("linear"), where f(x) are the network's outputs, and J(x) w_lin those of the mode
                of the linear model. Default None: as chosen by the fit or by ``calibrate``. A fit
                chooses J(x) w_lin for a regression, with the σ that is learnt from it (f(x) has the
                σ of its own residuals); a mixture with variational curvature; and otherwise f(x),
                at which the curvature was evaluated.
            groups (integers, optional): The group of each input, if ``calibrate`` had groups.
            weights (sequence, optional): The weight of each input, if ``calibrate`` had weights.
                Default None: the largest of a reference example.

        Returns:
            A ``Prediction``. It is differentiable in x if x requires gradients. That of an ensemble
            has the predictions of its ``members``.

        Raises:
            NotFittedError: Before ``fit``, or if the model has changed since.

        Example:
            >>> uncertainty = la.predict(x).epistemic
        """
        return predict(self, x, mean, groups=groups, weights=weights)

    def predictions(self, loader: Loader, mean: Mean | None = None) -> Iterator[Prediction]:
        """Yield the predictive distribution at each batch of a loader, in the order of its dataset.

        Only one batch is held in memory at a time. The k-th sample is the same function for all
        batches.

        Args:
            loader (DataLoader, Dataset or list of batches): Batches may have no targets. A
                ``DataLoader`` that shuffles is read in the order of its dataset, as by ``fit`` and
                all other methods. Two tensors of equal shape and type in a list are two batches; in
                a tuple they are inputs and targets.
            mean (str, optional): As in ``predict``.

        Returns:
            An iterator of ``Prediction``.

        Raises:
            NotFittedError: Before ``fit``, or if the model has changed since.

        Example:
            >>> uncertainty = torch.cat([batch.epistemic for batch in la.predictions(loader)])
        """
        return predictions(self, loader, mean)

    def is_ood(
        self,
        x: AnyInputs,
        rate: float = 0.05,
        *,
        groups: Values | None = None,
        score: Score = "all",
    ) -> Tensor:
        """Return which inputs are out-of-distribution (OOD), as a mask of shape (B,), after
        ``calibrate``.

        Args:
            x (Tensor, tuple, dict, DataLoader or Dataset): Inputs, as in ``predict``.
            rate (float): Largest share of false alarms among inputs from the validation set's
                distribution. Default 0.05.
            groups (integers, optional): The group of each input, if ``calibrate`` had groups.
            score (str): "all" (default), "epistemic" or "distance", as in
                ``predict(x).p_values(score)``.

        Raises:
            ValueError: Before ``calibrate``, or with too few validation examples for this rate.

        Example:
            >>> suspicious = la.is_ood(x, rate=0.1)
        """
        if isinstance(x, LOADERS) and groups is None:
            return torch.cat([each.is_ood(rate, score) for each in predictions(self, x)])
        return predict(self, x, groups=groups).is_ood(rate, score)

    def functional_samples(self, x: AnyInputs) -> Tensor:
        """Return ``predict(x).samples``: samples of f at x, shape (K, B, ..., C), joint over
        inputs.

        Args:
            x (Tensor, tuple, dict, DataLoader or Dataset): Inputs, as in ``predict``.

        Example:
            >>> spread = la.functional_samples(x).std(0)
        """
        return predict(self, x).samples

    def calibrate(
        self: Own,
        x: Inputs | Loader | None = None,
        y: Tensor | None = None,
        *,
        groups: Values | str | None = None,
        weights: Values | None = None,
    ) -> Own:
        """Fit a few numbers of the predictions to a validation set, in one pass for each network.

        Without arguments the numbers are fitted to the training examples of ``fit``, which are
        moved so that a network that has memorised them is wrong as often as at new inputs. No
        guarantee follows: p-values, sets and intervals need validation data.

        For classes and labels the prediction is a mixture of the posterior, its mean alone, and the
        network. The numbers are a scale of the posterior's variance, factors of the logits of mean
        and network (temperature scaling), and the weights. For regression they are the scale, the
        observation noise σ, and the share of the linear mode in the mean. If the validation
        negative log-likelihood (NLL) does not improve, the numbers are not used. The members of an
        ensemble share these numbers, and are not changed.

        For ``p_value``, ``is_ood``, ``prediction_set`` and ``interval`` the numbers are fitted a
        second time, to every other example; the others are the reference. Guarantees hold on
        average over all inputs, or for each group.

        Args:
            x (DataLoader, Dataset, list of batches, or inputs, optional): The validation set. It
                must not have been used in training. Default None: moved training examples.
            y (Tensor, optional): The targets, if ``x`` are inputs.
            groups ("classes" or integers, optional): With "classes" the guarantees of sets and of
                ``is_ood`` hold for each class. With an integer for each validation example, in the
                order of the dataset, they hold for each group, and ``predict(x, groups=...)`` needs
                the groups of the inputs. Every group needs as many examples as a validation set
                without groups. Default None: one group.
            weights (sequence, optional): A weight for each validation example, if new inputs have
                another distribution: the ratio of the densities, up to a factor. Guarantees then
                hold for the new inputs. The numbers are fitted without weights. Default None: no
                shift.

        Returns:
            The object itself; ``la.calibration`` holds the improvement. In a distributed run all
            ranks have to call this method; an ensemble is calibrated by each process on its own.

        Raises:
            ValueError: If no example has a label, if most are training examples, or if groups or
                weights do not fit them. Without arguments, if the training data are not available,
                as after ``load``, or if their inputs have no distances.
            NotFittedError: Before ``fit``, or if the model has changed since.

        Example:
            >>> improvement = str(la.calibrate(x, y).calibration)
            >>> la.calibrate(x, y, groups="classes")  # doctest: +SKIP
        """
        self.take(calibrate(self, x, y, groups=groups, weights=weights))
        return self

    def check(
        self,
        x: Inputs | Loader,
        y: Tensor | None = None,
        level: float = 0.9,
        groups: Values | None = None,
    ) -> Check:
        """Return the coverage of sets or intervals within groups of held-out examples; print it.

        Conformal guarantees hold on average. Groups are those passed, classes, and quarters by the
        predicted entropy, or by the predicted mean and noise. For images, the result also shows how
        well ``is_ood`` detects shifted copies of up to 200 examples. For a regression with one
        observation noise, ``residuals`` is a test of whether the size of residuals depends on the
        inputs, at a level of 5 %, through the noise or through the network's errors; if it does,
        the result names the likelihood to use.

        Args:
            x (DataLoader, Dataset, list of batches, or inputs): Data that neither ``fit`` nor
                ``calibrate`` used.
            y (Tensor, optional): The targets, if ``x`` are inputs.
            level (float): Level of the sets or intervals. Default 0.9.
            groups (integers, optional): The group of each example, in the order of the dataset.

        Returns:
            A ``Check``; print it.

        Raises:
            ValueError: Before ``calibrate``, or with too few validation examples for the level.

        Example:
            >>> low = [group.name for group in la.check(x, y).groups if group.is_low(0.9)]
        """
        return check(self, x, y, level, groups)

    def suspicious(
        self,
        x: Inputs | Loader,
        y: Tensor | None = None,
        *,
        weights: GivenWeights | None = None,
        folds: Tensor | None = None,
    ) -> SuspiciousTargets:
        """Return which training targets are probably wrong, without training again or a validation
        set; print it.

        A label is suspicious if it is improbable under the posterior, although the posterior was
        fitted to it. It is in the mask if another label is more probable by a factor over 1 / m,
        where m is the mean probability of all given labels. A continuous target or count is in the
        mask if fewer than one of all targets is expected to be as far from its prediction.

        Args:
            x (DataLoader, Dataset, list of batches, or inputs): The training data without
                augmentation, or other labelled data.
            y (Tensor, optional): The targets, if ``x`` are inputs.
            weights (Tensor, str, callable or float, optional): As in ``fit``. Examples with weight
                0 are not judged.
            folds (integers, optional): The member of an ensemble that each example is judged by,
                (N,), such as the one that has not seen it. Default None: by all together.

        Returns:
            A ``SuspiciousTargets``; print it.

        Raises:
            NotFittedError: Before ``fit``, or if the model has changed since.
            ValueError: If targets do not fit the outputs or contain NaN, or if there is no label.
            TypeError: If the likelihood has no probabilities of labels, no continuous targets and
                no Poisson counts.

        Example:
            >>> look_at = la.suspicious(x, y).order[:12]
        """
        return suspicious(self, x, y, weights=weights, folds=folds)

    def monitor(self, rate: float = 0.01, *, level: float = 0.9, seed: int = 0) -> Monitor:
        """Return a monitor of new inputs, which raises an alarm when their distribution differs
        from that of the validation set.

        Args:
            rate (float): Largest probability that a false alarm is ever raised. Default 0.01.
            level (float): Level of the sets or intervals whose coverage is measured if there are
                targets. Default 0.9.
            seed (int): Seed of the random order of equal scores. Default 0.

        Raises:
            ValueError: Before ``calibrate``, or if p-values are not exact because of folds or
                weights.

        Example:
            >>> monitor = la.calibrate(x, y).monitor(rate=0.01)
            >>> is_raised = monitor.update(x)
        """
        return Monitor(self, rate, level, seed)

    def distil(
        self,
        inputs: Inputs | Loader,
        *,
        student: nn.Module | None = None,
        augment: Way | Sequence[Way] | None = None,
        num_inputs: int = 12_000,
        steps: int = 3000,
        seed: int = 0,
        progress_bar: bool = True,
        **former: Any,
    ) -> Student:
        """Train a network that predicts what this posterior predicts, in one forward pass.

        The student learns the posterior's predictions at the given inputs, and at more inputs that
        are made from them. Elsewhere its predictions are arbitrary: include unlabelled inputs of
        all kinds that you expect, also unusual ones. Inputs are stored on the network's device. If
        you have a validation set, call ``la.calibrate`` first. ``print(student)`` shows the
        student's error at held-out inputs.

        Args:
            inputs (Tensor, tuple, dict, DataLoader, Dataset or iterable of batches): Unlabelled
                inputs of one shape, or training data.
            student (nn.Module, optional): A network with the inputs and outputs of the model, which
                is copied. Default None: the model itself (for an ensemble, the first one).
            augment (str, callable or list of them, optional): How inputs are made: "noise" adds
                noise of random size, "swap" replaces entries (also tokens) by those of another
                input, and functions map inputs to as many others. Default None: "noise" and "swap",
                as far as they apply.
            num_inputs (int): Number of inputs to make. Default 12,000.
            steps (int): Number of steps of the training. Default 3000.
            seed (int): Seed of all random numbers. Default 0.
            progress_bar (bool): Show progress bars. Default True.

        Returns:
            A ``Student``, which is not calibrated yet.

        Raises:
            ValueError: If there are fewer than ten inputs, or if the outputs of ``student`` have
                another shape than those of the model.
            TypeError: If inputs are not tensors, or for an argument of an earlier version.
            RuntimeError: If inputs have several shapes.

        Example:
            >>> student = la.distil(x, steps=100, progress_bar=False)
            >>> probabilities = student(x)
        """
        options: dict[str, Any] = {"num_inputs": num_inputs, "steps": steps, "seed": seed, **former}
        return distil(
            self, inputs, student=student, augment=augment, progress_bar=progress_bar, **options
        )

    def export(
        self,
        x: Inputs,
        path: str | PathLike[str] | None = None,
        level: float | None = None,
        p_value: bool = False,
    ) -> ExportedProgram:
        """Return ``la(x)`` as a program of torch operations, which runs without this library.

        The program accepts any number of examples. It returns a dict with "probs" (for other
        likelihoods "expectation"), "predictive_variance" for continuous targets, and the outputs
        that ``level`` and ``p_value`` add; outputs in ONNX have the same names. The program of an
        ensemble contains every network and its samples.

        Args:
            x (Tensor, tuple or dict): Example inputs.
            path (str, optional): File to save the program to: .pt2 for torch.export, .onnx for
                ONNX. Default None: it is not saved.
            level (float, optional): Also return the mask "prediction_set" of
                ``prediction_set(level)``, or for continuous targets the ends "lower" and "upper" of
                ``interval(level)``. This needs ``calibrate``.
            p_value (bool): Also return ``predict(x).p_value`` as "p_value". An input is out of
                distribution if its p-value is at most the accepted rate of false alarms. Default
                False.

        Raises:
            ValueError: If the file has another ending, or without reference examples for ``level``
                or ``p_value``.
            RuntimeError: If the network cannot be recorded for any number of examples, or the
                program returns other values than ``la(x)``, for example because the network's
                operations depend on values of its inputs. A student can be exported instead:
                ``la.distil(x).export(x)``.

        Example:
            >>> program = la.export(x).module()  # doctest: +SKIP
        """
        return export(self, x, path, level=level, p_value=p_value)

    def report(
        self,
        loader: Loader,
        path: str | PathLike[str] = "report.html",
        other: Tensor | Loader | None = None,
    ) -> None:
        """Write an HTML page with metrics, plots, warnings and recommendations; needs Matplotlib.

        Args:
            loader (DataLoader, Dataset or list of batches): Held-out data with targets.
            path (str): Name of the file. Default "report.html".
            other (DataLoader, Dataset or inputs, optional): Out-of-distribution inputs.

        Example:
            >>> la.report(validation_loader)  # doctest: +SKIP
        """
        report(self, loader, path, other)

    def details(self) -> Table:
        """Return all numbers of the fit in the terms of the method, such as λ and γ; print the
        result.

        ``print(la)`` shows a summary in words.

        Example:
            >>> numbers = str(la.details())
        """
        title, rows = self._table()
        return Table(title, rows + (summary.numbers(self.posterior) if self.posterior else []))

    @property
    def reference(self) -> Reference | None:
        """The scores of validation examples; None before ``calibrate``."""
        return None if self.posterior is None else self.posterior.correction.reference

    @property
    def calibration(self) -> Calibration | None:
        """The result of the last ``calibrate``; None if there is none."""
        return None if self.posterior is None else self.posterior.correction.calibration
