"""The networks of trained estimators of scikit-learn and skorch, and the average over heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torch_lla_em.laplace import Task

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


def of_perceptron(estimator: Any) -> EstimatorNetwork:
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

    values = partial(values_of, dtype=dtype)
    if classes is None:
        likelihoods: dict[str, Task] = {"identity": "regression", "exp": "poisson"}
        return EstimatorNetwork(module, likelihoods[last], inputs, values)
    if last == "softmax":
        return EstimatorNetwork(module, "classification", inputs, indices(classes), classes)
    if estimator.n_outputs_ == 1:
        return EstimatorNetwork(
            module, "bernoulli", inputs, lambda y: values(y == classes[1]), classes
        )
    return EstimatorNetwork(module, "bernoulli", inputs, values)


def of_skorch(net: Any) -> EstimatorNetwork:
    """Return the module of a skorch estimator, whose outputs become logits if they are probabilities."""
    module, kinds = net.module_.eval(), {cls.__name__ for cls in type(net).__mro__}
    device = next(module.parameters()).device

    def inputs(X: Any) -> Tensor:
        if isinstance(X, (dict, list, tuple)):
            raise TypeError(
                "The inputs of a skorch estimator must be one array. If its module takes several, pass "
                "net.module_ and a loader to LinearisedLaplace."
            )
        return torch.as_tensor(np.asarray(X), device=device)

    loss = type(net.criterion_).__name__
    if "NeuralNetBinaryClassifier" in kinds and loss == "BCEWithLogitsLoss":
        column = nn.Sequential(module, nn.Flatten(0), nn.Unflatten(0, (-1, 1)))
        classes = net.classes_
        return EstimatorNetwork(
            column, "bernoulli", inputs, lambda y: values_of(y == classes[1]), classes
        )
    if "NeuralNetClassifier" in kinds and loss in ("NLLLoss", "CrossEntropyLoss"):
        # skorch takes the logarithm of the module's outputs before NLLLoss
        logits = nn.Sequential(module, _Logarithm()) if loss == "NLLLoss" else module
        return EstimatorNetwork(
            logits, "classification", inputs, indices(net.classes_), np.asarray(net.classes_)
        )
    if "NeuralNetRegressor" in kinds and loss == "MSELoss":
        return EstimatorNetwork(module, "regression", inputs, values_of)
    raise TypeError(
        f"A {type(net).__name__} with the criterion {loss} has no likelihood here. Pass net.module_ to "
        "LinearisedLaplace with a likelihood of your own."
    )


def values_of(y: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return values of shape (N,) or (N, C) as a tensor (N, C)."""
    y = np.asarray(y)
    return torch.tensor(y.reshape(len(y), -1), dtype=dtype, device="cpu")


def indices(classes: Any) -> Callable[[Any], Tensor]:
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
