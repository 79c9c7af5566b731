"""Estimators for scikit-learn: a network, its posterior and its calibration in one object.

They need ``pip install torch_lla_em[sklearn]``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import chain, pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.utils import check_array, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from torch_lla_em import LinearisedLaplace, Prediction, Regression
from torch_lla_em.runtime import check_whole, first, group_of, report, require

__all__ = ["LaplaceClassifier", "LaplaceRegressor"]

# with 192 the NLL on four tables changes by 3 % at most; so does it with 64, except on one table
# where it is 22 % lower, but this takes 1.5 times as long
_BATCH = 128
# half of them are the reference of sets and intervals, which need nine examples for a level of 90 %
_LEAST_HELD_OUT = 20
# AdamW's weight decay is this number divided by the number of examples, but at most 1; it was
# chosen on tables of 100 to 3,000 examples, where networks with less weight decay overfit
_DECAY = 300
_DTYPES = [np.float64, np.float32]
# lock that is held during a fit, because initial weights and dropout are drawn from torch's global
# generator
_FITTING = threading.Lock()


class _Standardise(nn.Module):
    """Shift and scale inputs by the mean and standard deviation of the training data."""

    mean: Tensor
    width: Tensor

    def __init__(self, x: Tensor):
        super().__init__()
        self.register_buffer("mean", x.mean(0))
        self.register_buffer("width", _width(x))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.width


Fitted = TypeVar("Fitted", bound="_Estimator")


class _Estimator(BaseEstimator):
    """Trains a network by AdamW, with standardised inputs, and fits and calibrates its
    posterior."""

    _likelihood: Any
    _options: dict[str, Any] = {}
    _checks: dict[str, Any] = {}
    _targets: Callable[[np.ndarray, Tensor], tuple[Tensor, int]]
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
        num_samples: int = 32,
        random_state: int | np.random.RandomState | None = None,
    ):
        """Store the hyperparameters, which ``fit`` checks.

        Args:
            module (callable, optional): A function of the numbers of features and outputs that
                returns the network to train. Default None: a perceptron with tanh activations.
            hidden (int or tuple of int): Widths of its hidden layers. Default (50, 50).
            epochs (int, optional): Number of passes over the training data. Default None: at least
                100, and at least 1,000 gradient steps.
            learning_rate (float): Initial step size of AdamW. Default 0.01; reduce it if the loss
                oscillates.
            weight_decay (float, optional): Weight decay of AdamW. Default None: 300 / number of
                training examples, but at most 1.
            validation_fraction (float): Share of the examples that calibrate the posterior instead
                of training. Default 0.1. If that is fewer than 20 examples, none are held out.
            num_samples (int): Number of posterior samples. Default 32; fewer are faster.
            random_state (int, RandomState or None): Seed of all random numbers. Default None. Fits
                in several threads wait for each other, so that results are reproducible; processes
                run in parallel.
        """
        self.module, self.hidden, self.epochs = module, hidden, epochs
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.validation_fraction = validation_fraction
        self.num_samples, self.random_state = num_samples, random_state

    def fit(
        self: Fitted, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> Fitted:
        """Train the network, fit its posterior and calibrate it; return the estimator itself.

        Args:
            X (array): Inputs, shape (N, D).
            y (array): Labels of any type, shape (N,), or continuous targets, shape (N,) or (N, C).
            sample_weight (array, optional): Weights, shape (N,), of the network's loss and of the
                posterior: an example of weight 2 counts twice, and one of weight 0 is left out.
                Examples that are held out for calibration have equal weights. Default None: all
                weights are 1.
        """
        for width in np.atleast_1d(self.hidden):
            check_whole(1, hidden=width)
        check_whole(1, epochs=1 if self.epochs is None else self.epochs)
        share = self.validation_fraction
        require(0 <= share < 1, "validation_fraction", share, "at least 0 and below 1")
        inputs, values = validate_data(self, X, y, dtype=_DTYPES, **self._checks)
        weights = None
        if sample_weight is not None:
            counts = _weights(sample_weight, len(inputs))
            inputs, values = inputs[counts > 0], values[counts > 0]
            weights = torch.tensor(counts[counts > 0])
        x = torch.tensor(inputs)
        targets, outputs = self._targets(values, x)
        drawn = int(check_random_state(self.random_state).randint(2**31 - 1))
        seed = group_of().meet(drawn, first)  # every rank trains the same network
        how = {"num_samples": self.num_samples, "seed": seed, **self._options}
        count = int(share * len(x))
        if 0 < count < _LEAST_HELD_OUT:
            few = f"validation_fraction={share:g} holds out fewer than {_LEAST_HELD_OUT} examples"
            more = "increase it, or pass more data. Intervals, sets and OOD flags need calibration."
            report("log", f"Predictions are not calibrated: {few}: {more}")
            count = 0
        with _FITTING, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            out, kept = torch.randperm(len(x)).tensor_split([count])
            some, y = x[kept], targets[kept]
            weights = None if weights is None else weights[kept]
            standard = _Standardise(some)
            network = (self.module or self._perceptron)(x.shape[1], outputs)
            network = network.to(x.dtype)
            self._train(network, standard(some), y, weights)
            network = nn.Sequential(standard, network).eval()
            likelihood = self._likelihood
            if weights is not None and likelihood == "regression":  # σ is not learnt with weights
                with torch.no_grad():
                    errors = (network(some) - y).square().mean(1).to(weights)
                likelihood = Regression((weights @ errors / weights.sum()).sqrt().item())
            self.laplace_ = LinearisedLaplace(network, likelihood, **how)
            self.laplace_.fit(some, y, weights=weights, progress_bar=False)
            if count:
                self.laplace_.calibrate(x[out], targets[out])
        return self

    def _perceptron(self, features: int, outputs: int) -> nn.Module:
        widths = [features, *np.atleast_1d(self.hidden).tolist(), outputs]
        layers = [(nn.Linear(*pair), nn.Tanh()) for pair in pairwise(widths)]
        return nn.Sequential(*chain(*layers))[:-1]

    def _train(self, network: nn.Module, x: Tensor, y: Tensor, weights: Tensor | None) -> None:
        classes = self._likelihood == "classification"
        loss = nn.functional.cross_entropy if classes else nn.functional.mse_loss
        weights = torch.ones(len(x)) if weights is None else weights
        relative, total = (weights / weights.mean()).to(x), weights.sum().item()
        batches = -(-len(x) // _BATCH)
        epochs = self.epochs or max(100, -(-1000 // batches))
        decay = min(1.0, _DECAY / total) if self.weight_decay is None else self.weight_decay
        optimiser = torch.optim.AdamW(network.parameters(), self.learning_rate, weight_decay=decay)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs * batches)
        for _ in range(epochs):
            for rows in torch.randperm(len(x)).tensor_split(batches):
                optimiser.zero_grad()
                terms = loss(network(x[rows]), y[rows], reduction="none").view(len(rows), -1)
                (relative[rows] * terms.mean(1)).mean().backward()
                optimiser.step()
                schedule.step()

    def is_ood(self, X: ArrayLike, rate: float = 0.05) -> np.ndarray:
        """Return which inputs are out-of-distribution (OOD), as a mask of shape (N,).

        Args:
            X (array): Inputs, shape (N, D).
            rate (float): Largest share of false alarms among inputs like the training data. Default
                0.05, which needs 38 held-out examples.
        """
        return self._predicted(X, lambda p: p.is_ood(rate)).numpy()

    def _predicted(self, X: ArrayLike, of: Callable[[Prediction], Tensor]) -> Tensor:
        """Return a quantity of predictions, computed for a few examples at a time."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=_DTYPES, reset=False)
        dtype = next(self.laplace_.model.parameters()).dtype
        parts = torch.tensor(X, dtype=dtype).split(8 * _BATCH)
        return torch.cat([of(self.laplace_.predict(rows)) for rows in parts]).cpu()


class LaplaceClassifier(ClassifierMixin, _Estimator):
    """A classifier with calibrated probabilities, for scikit-learn.

    Attributes:
        classes_ (ndarray): The labels, in the order of the probabilities.
        laplace_ (LinearisedLaplace): The posterior, with its ``calibration``.

    Example:
        >>> classifier = LaplaceClassifier(epochs=20, random_state=0).fit(X, labels)
        >>> probabilities = classifier.predict_proba(X)
    """

    _likelihood = "classification"
    # with standardised inputs all features have similar sizes, and the plain prior predicts better
    _options = {"prior": "isotropic"}

    def _targets(self, y: np.ndarray, x: Tensor) -> tuple[Tensor, int]:
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("A classifier needs at least two classes, but y has one class.")
        return torch.as_tensor(labels), len(self.classes_)

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Return calibrated probabilities of ``classes_``, shape (N, C), at inputs X (N, D)."""
        return self._predicted(X, lambda p: p.probs).numpy()

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Return the most probable classes, shape (N,), at inputs X (N, D)."""
        best = self.predict_proba(X).argmax(1)
        return np.asarray(self.classes_[best])

    def predict_set(self, X: ArrayLike, level: float = 0.9) -> np.ndarray:
        """Return masks of ``classes_`` that contain the label with probability ``level``, (N, C).

        Args:
            X (array): Inputs, shape (N, D).
            level (float): Coverage, between 0 and 1. Default 0.9.
        """
        return self._predicted(X, lambda p: p.prediction_set(level)).numpy()


class LaplaceRegressor(MultiOutputMixin, RegressorMixin, _Estimator):
    """A regressor with predictive standard deviations, for scikit-learn.

    Attributes:
        laplace_ (LinearisedLaplace): The posterior, of standardised targets.

    Example:
        >>> regressor = LaplaceRegressor(epochs=20, random_state=0).fit(X, y)
        >>> mean, standard_deviation = regressor.predict(X, return_std=True)
    """

    _likelihood = "regression"
    _checks = {"multi_output": True, "ensure_min_samples": 2}

    def _targets(self, y: np.ndarray, x: Tensor) -> tuple[Tensor, int]:
        self._shape = y.shape[1:]
        targets = torch.tensor(y.reshape(len(y), -1).astype(np.float64)).to(x)
        if (targets == targets[0]).all():
            raise ValueError(f"All targets are equal ({y[0]}), so there is nothing to learn.")
        self._centre, self._width = targets.mean(0), _width(targets)
        return (targets - self._centre) / self._width, targets.shape[1]

    def predict(self, X: ArrayLike, return_std: bool = False) -> Any:
        """Return the predictive mean, and with ``return_std`` the predictive standard deviation.

        Args:
            X (array): Inputs, shape (N, D).
            return_std (bool): Also return the standard deviation of y, with noise. Default False.
        """
        both = self._predicted(X, lambda p: torch.stack([p.expectation, p.predictive_variance], 1))
        mean = self._in_units(both[:, 0], self._centre)
        return (mean, self._in_units(both[:, 1].sqrt(), 0)) if return_std else mean

    def predict_interval(self, X: ArrayLike, level: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """Return the lower and upper ends of intervals that contain y with probability ``level``.

        Args:
            X (array): Inputs, shape (N, D).
            level (float): Coverage of each output, between 0 and 1. Default 0.9.
        """
        ends = self._predicted(X, lambda p: torch.stack([*p.interval(level)], 1))
        lower, upper = (self._in_units(end, self._centre) for end in ends.unbind(1))
        return lower, upper

    def _in_units(self, values: Tensor, start: Tensor | int) -> np.ndarray:
        return np.asarray((start + self._width * values).view(len(values), *self._shape))


def _weights(given: ArrayLike, count: int) -> np.ndarray:
    """Return one weight for each example; raise an error if the weights do not fit."""
    how = {"dtype": np.float64, "ensure_2d": False, "ensure_non_negative": True}
    weights: np.ndarray = check_array(given, input_name="sample_weight", **how)
    if weights.shape != (count,) or not weights.any():
        raise ValueError(
            f"sample_weight must be {count} numbers, one for each example, and not all zero; its "
            f"shape is {weights.shape}."
        )
    return weights


def _width(values: Tensor) -> Tensor:
    """Return the standard deviation of each column, 1 if it is constant, without overflow."""
    size = values.abs().amax(0)
    size = torch.where(size > 0, size, 1.0)
    width = (values / size).std(0, correction=0)
    return torch.where(width > 8 * torch.finfo(values.dtype).eps, size * width, 1.0)
