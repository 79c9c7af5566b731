"""``posterior(estimator)``: the posterior of a network that scikit-learn, skorch or TabM has trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torch_lla_em.laplace import LinearisedLaplace, Task
from torch_lla_em.prediction import Prediction

_ACTIVATIONS = {"identity": nn.Identity, "logistic": nn.Sigmoid, "tanh": nn.Tanh, "relu": nn.ReLU}


class EstimatorNetwork(NamedTuple):
    """The network of an estimator, and how its data become tensors."""

    module: nn.Module
    """Returns logits, log rates or means."""

    likelihood: Task
    inputs: Callable[[Any], Tensor]
    targets: Callable[[Any], Tensor]
    """Class indices, indicators of labels, or values of shape (N, C)."""

    classes: Any = None
    """The labels, in the order of the probabilities."""


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
    exactly, and the estimators of skorch. If the estimator is a step of a pipeline, pass the
    data that the steps before it return: ``pipeline[:-1].transform(X)``.

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
    if "BaseMultilayerPerceptron" in kinds:
        if not hasattr(estimator, "coefs_"):
            raise ValueError("The estimator is not trained: call its fit first.")
        return EstimatorPosterior(_of_perceptron(estimator), options)
    if "NeuralNet" in kinds:
        if not getattr(estimator, "initialized_", False):
            raise ValueError("The estimator is not trained: call its fit first.")
        return EstimatorPosterior(_of_skorch(estimator, kinds), options)
    raise TypeError(
        f"{type(estimator).__name__} has no network that can be converted. Supported are MLPClassifier, "
        "MLPRegressor and skorch; for others pass their nn.Module to LinearisedLaplace."
    )


class AverageHeads(nn.Module):
    """The average over the k heads of TabM and similar networks, as one network.

    Probabilities are averaged for classes, as these networks do, and means otherwise. All
    heads share most weights, so one posterior covers all of them.

    Args:
        module (nn.Module): Returns outputs of shape (B, k, C).
        classes (bool): Whether the outputs are logits of classes. Default True.

    Example:
        >>> heads = torch.nn.Sequential(torch.nn.Linear(2, 6), torch.nn.Unflatten(1, (2, 3)))
        >>> la = LinearisedLaplace(AverageHeads(heads), "classification")
    """

    def __init__(self, module: nn.Module, classes: bool = True):
        super().__init__()
        self.module, self.classes = module, classes

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return log probabilities, which are valid logits, or means, shape (B, C).

        Args:
            *inputs (Tensor): Inputs of the module.
        """
        heads: Tensor = self.module(*inputs)
        if not self.classes:
            return heads.mean(1)
        return heads.log_softmax(-1).logsumexp(1) - float(np.log(heads.shape[1]))


class _Logarithm(nn.Module):
    """Logits of probabilities."""

    def forward(self, probs: Tensor) -> Tensor:
        return probs.clamp_min(torch.finfo(probs.dtype).tiny).log()


def _of_perceptron(estimator: Any) -> EstimatorNetwork:
    """Return the network of scikit-learn's perceptron, with the same outputs."""
    layers: list[nn.Module] = []
    for weight, bias in zip(estimator.coefs_, estimator.intercepts_):
        inner, outer = weight.shape
        own = torch.tensor(weight, device="cpu")
        layer = nn.Linear(inner, outer, device="cpu", dtype=own.dtype)
        with torch.no_grad():
            layer.weight.copy_(own.T)
            layer.bias.copy_(torch.tensor(bias, device="cpu"))
        layers += [layer, _ACTIVATIONS[estimator.activation]()]
    module, dtype = nn.Sequential(*layers[:-1]).eval(), own.dtype
    classes, last = getattr(estimator, "classes_", None), estimator.out_activation_

    def inputs(X: Any) -> Tensor:
        if hasattr(X, "toarray"):
            X = X.toarray()
        return torch.tensor(np.asarray(X), dtype=dtype, device="cpu")

    def values(y: Any) -> Tensor:
        y = np.asarray(y)
        return torch.tensor(y.reshape(len(y), -1), dtype=dtype, device="cpu")

    if classes is None:
        likelihoods: dict[str, Task] = {"identity": "regression", "exp": "poisson"}
        return EstimatorNetwork(module, likelihoods[last], inputs, values)
    if last == "softmax":
        return EstimatorNetwork(module, "classification", inputs, _indices(classes), classes)
    if estimator.n_outputs_ == 1:
        return EstimatorNetwork(
            module, "bernoulli", inputs, lambda y: values(y == classes[1]), classes
        )
    return EstimatorNetwork(module, "bernoulli", inputs, values)


def _of_skorch(net: Any, kinds: set[str]) -> EstimatorNetwork:
    """Return the module of a skorch estimator, whose outputs become logits if they are probabilities."""
    module = net.module_.eval()
    device = next(module.parameters()).device

    def inputs(X: Any) -> Tensor:
        if isinstance(X, (dict, list, tuple)):
            raise TypeError(
                "The inputs of a skorch estimator must be one array. If its module takes several, pass "
                "net.module_ and a loader to LinearisedLaplace."
            )
        return torch.as_tensor(np.asarray(X), device=device)

    def values(y: Any) -> Tensor:
        y = np.asarray(y)
        return torch.tensor(y.reshape(len(y), -1), dtype=torch.float32, device="cpu")

    loss = type(net.criterion_).__name__
    if "NeuralNetBinaryClassifier" in kinds and loss == "BCEWithLogitsLoss":
        column = nn.Sequential(module, nn.Flatten(0), nn.Unflatten(0, (-1, 1)))
        classes = net.classes_
        return EstimatorNetwork(
            column, "bernoulli", inputs, lambda y: values(y == classes[1]), classes
        )
    if "NeuralNetClassifier" in kinds and loss in ("NLLLoss", "CrossEntropyLoss"):
        # skorch takes the logarithm of the module's outputs before NLLLoss
        logits = nn.Sequential(module, _Logarithm()) if loss == "NLLLoss" else module
        return EstimatorNetwork(
            logits, "classification", inputs, _indices(net.classes_), np.asarray(net.classes_)
        )
    if "NeuralNetRegressor" in kinds and loss == "MSELoss":
        return EstimatorNetwork(module, "regression", inputs, values)
    raise TypeError(
        f"A {type(net).__name__} with the criterion {loss} has no likelihood here. Pass net.module_ to "
        "LinearisedLaplace with a likelihood of your own."
    )


def _indices(classes: Any) -> Callable[[Any], Tensor]:
    """Return a function that maps labels to the indices of classes, which are sorted."""
    known = np.asarray(classes)

    def of(y: Any) -> Tensor:
        labels = np.asarray(y)
        unknown = np.setdiff1d(labels, known)
        if len(unknown):
            raise ValueError(
                f"y has labels that the estimator has not seen: {unknown[:5].tolist()}."
            )
        return torch.as_tensor(np.searchsorted(known, labels), device="cpu")

    return of
