"""``posterior(estimator)``: the posterior of a network that scikit-learn, skorch or pytabkit has trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from torch_lla_em.compat.networks import EstimatorNetwork, of_perceptron, of_skorch
from torch_lla_em.compat.pytabkit import of_pytabkit
from torch_lla_em.laplace import LinearisedLaplace
from torch_lla_em.prediction import Prediction

_NETWORKS: dict[str, tuple[str, Callable[[Any], EstimatorNetwork]]] = {
    "BaseMultilayerPerceptron": ("coefs_", of_perceptron),
    "NeuralNet": ("initialized_", of_skorch),
    "AlgInterfaceEstimator": ("alg_interface_", of_pytabkit),
}
"""Base classes of estimators -> an attribute that only trained ones have, and what returns their network."""


class EstimatorPosterior:
    """The posterior of a trained estimator, which takes and returns its arrays and labels.

    ``posterior`` creates it.

    Attributes:
        laplace (LinearisedLaplace): The posterior of the network. ``inputs(X)`` are its inputs.

    Example:
        >>> from sklearn.neural_network import MLPClassifier
        >>> estimator = MLPClassifier(hidden_layer_sizes=(8,), max_iter=5).fit(X, labels)
        >>> probabilities = posterior(estimator, num_samples=4).fit(X, labels).predict_proba(X)
    """

    def __init__(self, network: EstimatorNetwork, options: dict[str, Any]):
        """Create the posterior of a converted network.

        Args:
            network (EstimatorNetwork): The network, its likelihood and the conversion of its data.
            options (dict): Further arguments of ``LinearisedLaplace``.
        """
        self._network = network
        self.laplace = LinearisedLaplace(network.module, network.likelihood, **options)

    def inputs(self, X: Any) -> Tensor:
        """Return inputs as the network takes them.

        Args:
            X (array): Inputs, as the estimator takes them.
        """
        return self._network.inputs(X)

    def fit(self, X: Any, y: Any) -> EstimatorPosterior:
        """Fit the posterior to the training data of the estimator.

        Args:
            X (array): Inputs, as the estimator takes them.
            y (array): Targets, as the estimator takes them.

        Returns:
            The object itself.
        """
        self.laplace.fit(*self._pair(X, y), progress_bar=False)
        return self

    def calibrate(self, X: Any, y: Any) -> EstimatorPosterior:
        """Calibrate the predictions on data that were not used in training.

        Args:
            X (array): Inputs, as the estimator takes them.
            y (array): Targets, as the estimator takes them.

        Returns:
            The object itself.
        """
        self.laplace.calibrate(*self._pair(X, y))
        return self

    def distribution(self, X: Any) -> Prediction:
        """Return the ``Prediction`` of ``LinearisedLaplace.predict``.

        Args:
            X (array): Inputs, as the estimator takes them.
        """
        return self.laplace.predict(self.inputs(X))

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probabilities of the classes, shape (N, C), or of the labels.

        Args:
            X (array): Inputs, as the estimator takes them.

        Raises:
            TypeError: If the estimator predicts numbers.
        """
        probs: np.ndarray = self.distribution(X).probs.cpu().numpy()
        if self._network.classes is not None and probs.shape[1] == 1:
            return np.concatenate([1 - probs, probs], axis=1)
        return probs

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the most probable classes, or the mean.

        Args:
            X (array): Inputs, as the estimator takes them.
            return_std (bool): Also return the standard deviation of y, which includes the observation
                noise, of a regression. Default False.

        Returns:
            The classes or the mean; with ``return_std`` a tuple of mean and standard deviation.
        """
        if self._network.classes is not None:
            return np.asarray(self._network.classes)[self.predict_proba(X).argmax(1)]
        prediction = self.distribution(X)
        if prediction.likelihood.gives_probabilities:  # several labels
            return (prediction.probs > 0.5).int().cpu().numpy()
        found = prediction.expectation, prediction.predictive_variance.sqrt()
        arrays = [each.squeeze(-1).cpu().numpy() for each in found]
        return tuple(arrays) if return_std else arrays[0]

    def _pair(self, X: Any, y: Any) -> tuple[Tensor, Tensor]:
        x = self.inputs(X)
        return x, self._network.targets(y).to(x.device)


def posterior(estimator: Any, **options: Any) -> EstimatorPosterior:
    """Return the posterior of a trained estimator, to be fitted to its training data.

    Supported are ``MLPClassifier`` and ``MLPRegressor`` of scikit-learn, whose networks are converted
    exactly, the estimators of skorch, and RealMLP and TabM of pytabkit, with their encodings of
    categorical columns. If the estimator is a step of a pipeline, pass the data that the steps
    before it return: ``pipeline[:-1].transform(X)``.

    Args:
        estimator (object): The trained estimator.
        **options: Further arguments of ``LinearisedLaplace``.

    Returns:
        An ``EstimatorPosterior`` with ``fit``, ``calibrate``, ``predict`` and ``predict_proba``.

    Raises:
        TypeError: If the estimator has no network that can be converted.
        ValueError: If it is not trained.

    Example:
        >>> from sklearn.neural_network import MLPRegressor
        >>> estimator = MLPRegressor(hidden_layer_sizes=(8,), max_iter=5).fit(X, y)
        >>> mean, deviation = posterior(estimator).fit(X, y).predict(X, return_std=True)
    """
    kinds = {cls.__name__ for cls in type(estimator).__mro__}
    for kind, (trained, of) in _NETWORKS.items():
        if kind in kinds:
            if not getattr(estimator, trained, None):
                raise ValueError("The estimator is not trained: call its fit first.")
            return EstimatorPosterior(of(estimator), options)
    raise TypeError(
        f"{type(estimator).__name__} has no network that can be converted. Supported are MLPClassifier, "
        "MLPRegressor, skorch, and RealMLP and TabM of pytabkit; for others pass their nn.Module to "
        "LinearisedLaplace."
    )
