"""The posterior of a network that skorch has trained: a recipe to copy, for skorch 1.

    pip install skorch "torch_lla_em[sklearn]"
    python examples/recipes/skorch_networks.py

``of_skorch(net)`` takes a trained ``NeuralNetClassifier`` with ``NLLLoss`` or ``CrossEntropyLoss``, a
``NeuralNetBinaryClassifier``, or a ``NeuralNetRegressor`` with ``MSELoss``, and returns an object that takes and
returns its arrays and labels.
"""

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torch_lla_em.integrations.estimators import EstimatorPosterior


def of_skorch(net: Any, **options: Any) -> EstimatorPosterior:
    """Return the posterior of a trained estimator of skorch, with further arguments of ``LinearisedLaplace``."""
    if not getattr(net, "initialized_", False):
        raise ValueError("The estimator is not trained: call its fit first.")
    module, loss = net.module_.eval(), type(net.criterion_).__name__
    device, kinds = next(module.parameters()).device, {cls.__name__ for cls in type(net).__mro__}

    def inputs(X: Any) -> Tensor:
        if isinstance(X, (dict, list, tuple)):
            raise TypeError("The inputs must be one array: pass net.module_ to LinearisedLaplace.")
        return torch.as_tensor(np.asarray(X), device=device)

    if "NeuralNetBinaryClassifier" in kinds and loss == "BCEWithLogitsLoss":
        column = nn.Sequential(module, nn.Flatten(0), nn.Unflatten(0, (-1, 1)))
        found = column, "bernoulli", inputs, net.classes_
    elif "NeuralNetClassifier" in kinds and loss in ("NLLLoss", "CrossEntropyLoss"):
        # skorch takes the logarithm of the module's outputs before NLLLoss
        logits = nn.Sequential(module, Logarithm()) if loss == "NLLLoss" else module
        found = logits, "classification", inputs, net.classes_
    elif "NeuralNetRegressor" in kinds and loss == "MSELoss":
        found = module, "regression", inputs
    else:
        raise TypeError(f"A {type(net).__name__} with the criterion {loss} has no likelihood here.")
    return EstimatorPosterior(*found, **options)


class Logarithm(nn.Module):
    """Logits of probabilities."""

    def forward(self, probs: Tensor) -> Tensor:
        return probs.clamp_min(torch.finfo(probs.dtype).tiny).log()


if __name__ == "__main__":
    from skorch import NeuralNetClassifier

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    X = np.random.default_rng(0).normal(size=(300, 4)).astype(np.float32)
    y = (X[:, 0] > -0.5).astype(int) + (X[:, 0] + X[:, 1] > 0.5)
    layers = nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3), nn.Softmax(-1)
    net = NeuralNetClassifier(nn.Sequential(*layers), max_epochs=30, lr=0.1, verbose=0)
    la = of_skorch(net.fit(X[::2], y[::2])).fit(X[::2], y[::2]).calibrate(X[1::4], y[1::4])
    test = la.distribution(X[3::4]).log_prob(torch.tensor(y[3::4])).mean()
    print(f"NLL {-test:.3f}, accuracy {(la.predict(X[3::4]) == y[3::4]).mean():.3f}")
