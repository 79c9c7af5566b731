"""Estimators for scikit-learn: a network, its posterior and its calibration in one object.

Needs scikit-learn: ``pip install torch_lla_em[sklearn]``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from numbers import Integral
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from torch_lla_em.data import Standardise, as_numbers, weighted_size, width_of
from torch_lla_em.distil import distilled
from torch_lla_em.ensemble import LaplaceEnsemble
from torch_lla_em.laplace import LinearisedLaplace, Task
from torch_lla_em.prediction import Prediction
from torch_lla_em.runtime import report

_BATCH = 128
# gradient steps and epochs of a training whose length is not given
_STEPS, _EPOCHS = 1000, 100
# fewest validation examples; with fewer none are held out
_LEAST_HELD_OUT = 20
_FEW = "validation_fraction={:g} holds out fewer than 20 examples: increase it, or pass more data."
# AdamW's weight decay is this number divided by the number of examples, and 1 at most. It was chosen
# on tables of 100 to 3,000 examples, on which networks with less weight decay overfit
_DECAY = 300
_DTYPES = [np.float64, np.float32]


class _Estimator(BaseEstimator):
    """Base class of both estimators: trains a network by AdamW, fits and calibrates its posterior.

    Inputs and continuous targets are standardised, in the dtype of X.
    """

    _likelihood: Task
    _options: dict[str, Any] = {}
    laplace_: Any

    def __init__(
        self,
        module: Callable[[int, int], nn.Module] | None = None,
        *,
        hidden: int | tuple[int, ...] = (50, 50),
        epochs: int | None = None,
        learning_rate: float = 1e-2,
        weight_decay: float | None = None,
        validation_fraction: float = 0.1,
        ensemble: int | None = None,
        distil: bool | dict[str, Any] = False,
        num_samples: int = 32,
        options: dict[str, Any] | None = None,
        device: str = "cpu",
        random_state: Any = None,
    ):
        """Keep the hyperparameters, which ``fit`` checks.

        Args:
            module (callable, optional): Called with the numbers of features and outputs, returns the
                network to train. Default None: a perceptron with tanh activations. Pass your own for
                data with a structure that a perceptron ignores.
            hidden (int or tuple of int): Widths of the hidden layers. Default (50, 50).
            epochs (int, optional): Passes over the training data. Default None: 100, or as many as make
                1,000 gradient steps.
            learning_rate (float): Initial step size of AdamW, which falls to 0 along a cosine. Default
                0.01; reduce it if the training loss oscillates.
            weight_decay (float, optional): Weight decay of AdamW. Default None: 300 divided by the
                number of training examples, and 1 at most.
            validation_fraction (float): Share of the examples that are held out to calibrate the
                posterior, at least 0 and below 1. Default 0.1. If that is fewer than 20 examples, none
                are held out; the predictions can then have a slightly higher NLL than the network's own.
            ensemble (int, optional): Train so many networks, each without one fold of the data, by
                ``LaplaceEnsemble.from_folds``; no other examples are held out then. Predictions have
                a lower NLL at the cost of as many fits. Default None: a single network.
            distil (bool or dict): Whether to predict by ``student_``, a network that is trained on the
                posterior's predictions at the training inputs and takes one forward pass for a
                prediction; or a dict of arguments of ``laplace_.distil``. With ``ensemble``, sets,
                intervals and p-values are those of the posterior. Default False.
            num_samples (int): Number of posterior samples. Default 32; fewer are faster.
            options (dict, optional): Further arguments of ``LinearisedLaplace``. Default None.
            device (str): Device to train and predict on. Default "cpu".
            random_state (int, RandomState or None): Seed of the split, the initial weights and the
                samples. Default None; set it for reproducible results.
        """
        self.module, self.hidden, self.epochs = module, hidden, epochs
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.validation_fraction, self.ensemble = validation_fraction, ensemble
        self.distil, self.num_samples = distil, num_samples
        self.options, self.device, self.random_state = options, device, random_state

    def _check(self) -> None:
        """Raise an error for invalid hyperparameters."""
        if not all(isinstance(width, (int, np.integer)) and width > 0 for width in self._widths()):
            raise ValueError(
                f"hidden must be one or more positive whole numbers, not {self.hidden!r}: the "
                "widths of the hidden layers, as hidden=50 or hidden=(50, 50)."
            )
        if self.epochs is not None and not (isinstance(self.epochs, Integral) and self.epochs > 0):
            raise ValueError(
                f"epochs must be None or a positive whole number, not {self.epochs!r}."
            )
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(
                f"validation_fraction must be at least 0 and below 1, not "
                f"{self.validation_fraction!r}: the other examples train the network."
            )
        folds = self.ensemble
        if folds is not None and not (isinstance(folds, Integral) and folds >= 2):
            raise ValueError(
                f"ensemble must be None or a number of networks from 2, not {folds!r}."
            )

    def _fit(self, x: Tensor, y: Tensor, outputs: int, sample_weight: Any = None) -> None:
        """Train, fit and calibrate, and distil if asked to."""
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        out = self._fit_posterior(x, y, outputs, seed, sample_weight)
        held_out = (x[out], y[out]) if len(out) else None
        x = x[torch.isin(torch.arange(len(x)), out, invert=True)]
        self.student_ = distilled(self.laplace_, self.distil, x, held_out, seed=seed)

    def _fit_posterior(
        self, x: Tensor, y: Tensor, outputs: int, seed: int, sample_weight: Any
    ) -> Tensor:
        """Train, fit and calibrate; return the numbers of the held-out examples."""
        w = None
        if sample_weight is not None:
            if self.ensemble is not None:
                raise ValueError("sample_weight is not supported with ensemble: use ensemble=None.")
            checked = _check_sample_weight(sample_weight, x.numpy(), ensure_non_negative=True)
            w = torch.tensor(checked)
        held_out = int(self.validation_fraction * len(x))
        if 0 < held_out < _LEAST_HELD_OUT and self.ensemble is None:
            few = _FEW.format(self.validation_fraction)
            report("log", f"Predictions are not calibrated: {few}")
        held_out = held_out if held_out >= _LEAST_HELD_OUT else 0
        options = {"num_samples": self.num_samples, "seed": seed, **self._options}
        options |= self.options or {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if self.ensemble is not None:
                options |= {"folds": int(self.ensemble), "likelihood": self._likelihood}
                self.laplace_ = LaplaceEnsemble.from_folds(
                    partial(self._trained, outputs=outputs), x, y, progress_bar=False, **options
                )
                return torch.zeros(0, dtype=torch.long)
            out, kept = torch.randperm(len(x)).tensor_split([held_out])
            of_kept = None if w is None else w[kept]
            model = self._trained(x[kept], y[kept], outputs, of_kept)
        if of_kept is not None and self._likelihood == "regression":  # σ is not learnt with weights
            with torch.no_grad():
                residuals = model(x[kept].to(self.device)).cpu() - y[kept]
            options.setdefault("sigma_noise", max(weighted_size(residuals, of_kept), 1e-6))
        self.laplace_ = LinearisedLaplace(model, self._likelihood, **options)
        self.laplace_.fit(x[kept], y[kept], progress_bar=False, weights=of_kept)
        if held_out:
            self.laplace_.calibrate(x[out], y[out])
        return out

    def _trained(
        self, x: Tensor, y: Tensor, outputs: int, weights: Tensor | None = None
    ) -> nn.Module:
        """Return a network that was trained on these examples, in eval mode."""
        standard = Standardise(x)
        network = (self.module or self._perceptron)(x.shape[1], outputs).to(x.dtype)
        self._train(network.to(self.device), standard(x), y, weights)
        return nn.Sequential(standard, network).to(self.device).eval()

    def _widths(self) -> tuple[Any, ...]:
        return self.hidden if isinstance(self.hidden, tuple) else tuple(np.atleast_1d(self.hidden))

    def _perceptron(self, features: int, outputs: int) -> nn.Module:
        layers: list[nn.Module] = []
        for width in self._widths():
            layers += [nn.Linear(features, width), nn.Tanh()]
            features = width
        return nn.Sequential(*layers, nn.Linear(features, outputs))

    def _train(self, network: nn.Module, x: Tensor, y: Tensor, weights: Tensor | None) -> None:
        classes = self._likelihood == "classification"
        loss = nn.functional.cross_entropy if classes else nn.functional.mse_loss
        batches = -(-len(x) // _BATCH)
        epochs = self.epochs or max(_EPOCHS, -(-_STEPS // batches))
        decay = min(1.0, _DECAY / len(x)) if self.weight_decay is None else self.weight_decay
        optimiser = torch.optim.AdamW(network.parameters(), self.learning_rate, weight_decay=decay)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs * batches)
        w = torch.ones(len(x)) if weights is None else weights
        x, y, w = x.to(self.device), y.to(self.device), w.to(x).to(self.device)
        for _ in range(epochs):
            for rows in torch.randperm(len(x)).tensor_split(batches):
                optimiser.zero_grad()
                each = loss(network(x[rows]), y[rows], reduction="none").view(len(rows), -1).mean(1)
                ((w[rows] * each).sum() / w[rows].sum().clamp_min(1e-12)).backward()
                optimiser.step()
                schedule.step()

    def p_value(self, X: Any) -> np.ndarray:
        """Return p-values, which are small for out-of-distribution (OOD) inputs.

        Args:
            X (array): Inputs, shape (N, D).

        Returns:
            The share of held-out examples that are at least as unusual as each input, shape (N,).
        """
        return self._predicted(X, lambda p: p.p_value, held_out=True).numpy()

    def is_ood(self, X: Any, rate: float = 0.05) -> np.ndarray:
        """Return which inputs are out-of-distribution (OOD), as a mask of shape (N,).

        Args:
            X (array): Inputs, shape (N, D).
            rate (float): Largest share of false alarms among inputs like the training data. Default
                0.05, which needs 38 held-out examples.
        """
        return self._predicted(X, lambda p: p.is_ood(rate), held_out=True).numpy()

    def _predicted(
        self, X: Any, of: Callable[[Prediction], Tensor], held_out: bool = False
    ) -> Tensor:
        """Return a value of predictions, which may need a comparison with ``held_out`` examples."""
        check_is_fitted(self)
        if held_out and self.laplace_.calibration is None:
            few = _FEW.format(self.validation_fraction)
            raise ValueError(f"Error rates are guaranteed by held-out examples, but {few}")
        X = validate_data(self, X, dtype=_DTYPES, reset=False)
        members = getattr(self.laplace_, "members", [self.laplace_])
        own = next(members[0].model.parameters()).dtype
        parts = torch.tensor(X, dtype=own).split(8 * _BATCH)
        student, predictor = self.student_, self.laplace_
        if student is not None and (not held_out or student.reference_scores is not None):
            predictor = student
        return torch.cat([of(predictor.predict(rows)) for rows in parts]).cpu()


class LaplaceClassifier(ClassifierMixin, _Estimator):
    """A classifier with calibrated probabilities, for scikit-learn.

    ``fit`` trains a network by AdamW, fits its posterior, and calibrates it on held-out examples.
    Inputs are standardised.

    Attributes:
        classes_ (ndarray): The labels, in the order of the probabilities.
        laplace_ (LinearisedLaplace or LaplaceEnsemble): The posterior. ``laplace_.calibration``
            holds the validation NLL before and after calibration.
        student_ (Student or None): The network that predicts, with ``distil=True``.

    Raises:
        ValueError: In ``fit``, if an argument is out of range.

    Example:
        >>> classifier = LaplaceClassifier(epochs=20, random_state=0).fit(X, labels)
        >>> probabilities = classifier.predict_proba(X)
    """

    _likelihood: Task = "classification"
    # with standardised inputs all features have similar sizes, and the plain prior predicts better
    _options = {"g_prior": False}

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> LaplaceClassifier:
        """Train the network, fit its posterior and calibrate it.

        Args:
            X (array): Inputs, shape (N, D).
            y (array): Labels of any type, shape (N,).
            sample_weight (array, optional): Weights of the examples in training and in the posterior,
                shape (N,): an example of weight 2 counts twice. Default None: each counts once.

        Returns:
            The estimator itself.
        """
        self._check()
        X, y = validate_data(self, X, y, dtype=_DTYPES)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("A classifier needs at least two classes, but y has one class.")
        self._fit(torch.tensor(X), torch.as_tensor(labels), len(self.classes_), sample_weight)
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return calibrated probabilities of ``classes_``, shape (N, C).

        Args:
            X (array): Inputs, shape (N, D).
        """
        return self._predicted(X, lambda p: p.probs).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable classes, shape (N,).

        Args:
            X (array): Inputs, shape (N, D).
        """
        best = self.predict_proba(X).argmax(1)
        labels: np.ndarray = self.classes_[best]
        return labels

    def predict_set(self, X: Any, level: float = 0.9) -> np.ndarray:
        """Return sets of classes that contain the label with probability ``level`` or more.

        Args:
            X (array): Inputs, shape (N, D).
            level (float): Coverage, between 0 and 1. Default 0.9.

        Returns:
            A mask of shape (N, C): which of ``classes_`` are in the set of each input.
        """
        return self._predicted(X, lambda p: p.prediction_set(level), held_out=True).numpy()


class LaplaceRegressor(MultiOutputMixin, RegressorMixin, _Estimator):
    """A regressor with predictive standard deviations, for scikit-learn.

    ``fit`` trains a network by AdamW, fits its posterior, and calibrates it on held-out examples.
    Inputs and targets are standardised, and predictions are in the units of y.

    Attributes:
        laplace_ (LinearisedLaplace or LaplaceEnsemble): The posterior of standardised targets.
            ``laplace_.calibration`` holds the validation NLL before and after calibration.
        student_ (Student or None): The network that predicts, with ``distil=True``.

    Raises:
        ValueError: In ``fit``, if an argument is out of range.

    Example:
        >>> regressor = LaplaceRegressor(epochs=20, random_state=0).fit(X, y)
        >>> mean, standard_deviation = regressor.predict(X, return_std=True)
    """

    _likelihood: Task = "regression"

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> LaplaceRegressor:
        """Train the network, fit its posterior and calibrate it.

        Args:
            X (array): Inputs, shape (N, D).
            y (array): Continuous targets, shape (N,) or (N, C).
            sample_weight (array, optional): Weights of the examples in training and in the posterior,
                shape (N,): an example of weight 2 counts twice. Default None: each counts once.

        Returns:
            The estimator itself.
        """
        self._check()
        several = {"multi_output": True, "y_numeric": True, "ensure_min_samples": 2}
        X, y = validate_data(self, X, as_numbers(y), dtype=_DTYPES, **several)
        x, self._shape = torch.tensor(X), y.shape[1:]
        targets = torch.tensor(y.reshape(len(y), -1)).to(x)
        if (targets == targets[0]).all():
            raise ValueError(
                f"All targets are equal ({y[0]}), so there is nothing to learn. Check y; to predict "
                "a constant, use sklearn.dummy.DummyRegressor."
            )
        self._centre, self._width = targets.mean(0), width_of(targets)
        standard = (targets - self._centre) / self._width
        self._fit(x, standard, targets.shape[1], sample_weight)
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the predictive mean, and the standard deviation if asked for.

        Args:
            X (array): Inputs, shape (N, D).
            return_std (bool): Whether to return the standard deviation of y too, which includes the
                observation noise. Default False.

        Returns:
            The mean in the shape of y, or a tuple of mean and standard deviation.
        """
        both = self._predicted(X, lambda p: torch.stack([p.expectation, p.predictive_variance], 1))
        mean = self._in_units(both[:, 0], self._centre)
        return (mean, self._in_units(both[:, 1].sqrt(), 0)) if return_std else mean

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """Return the ends of intervals that contain y with probability ``level`` or more.

        Args:
            X (array): Inputs, shape (N, D).
            level (float): Coverage of each output, between 0 and 1. Default 0.9.

        Returns:
            The lower and the upper ends, in the units and the shape of y.
        """
        ends = self._predicted(X, lambda p: torch.stack([*p.interval(level)], 1), held_out=True)
        lower, upper = (self._in_units(end, self._centre) for end in ends.unbind(1))
        return lower, upper

    def _in_units(self, values: Tensor, start: Tensor | int) -> np.ndarray:
        array: np.ndarray = (start + self._width * values).view(len(values), *self._shape).numpy()
        return array
