"""``posterior(estimator)``: the posterior of a network that scikit-learn has trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from torch_lla_em import Likelihood, LinearisedLaplace, Prediction
from torch_lla_em.data import Inputs
from torch_lla_em.likelihoods import Task

__all__ = ["EstimatorPosterior", "posterior"]

_ACTIVATIONS = {"identity": nn.Identity, "logistic": nn.Sigmoid, "tanh": nn.Tanh, "relu": nn.ReLU}
_LIKELIHOODS: dict[str, Task] = {
    "identity": "regression",
    "exp": "poisson",
    "softmax": "classification",
    "logistic": "bernoulli",
}


class EstimatorPosterior:
    """The posterior of a trained estimator, which takes and returns its arrays X and y.

    Args:
        module (nn.Module): The network, which returns logits, log rates or means.
        likelihood (str or Likelihood): As in ``LinearisedLaplace``; for two classes "bernoulli" if
            the network returns one logit.
        inputs (callable): A function that returns the inputs of the network for those of the
            estimator, or raises an error for inputs that the estimator would refuse.
        classes (array, optional): The sorted labels. Default None: values, or several labels.
        **options: Further arguments of ``LinearisedLaplace``.

    Attributes:
        laplace (LinearisedLaplace): The posterior of the network.
        inputs (callable): As given.

    Example:
        >>> from sklearn.neural_network import MLPClassifier
        >>> estimator = MLPClassifier(hidden_layer_sizes=(8,), max_iter=5).fit(X, labels)
        >>> probabilities = posterior(estimator, num_samples=4).fit(X, labels).predict_proba(X)
    """

    def __init__(
        self,
        module: nn.Module,
        likelihood: Task | Likelihood,
        inputs: Callable[[Any], Tensor],
        classes: ArrayLike | None = None,
        **options: Any,
    ):
        """Create a posterior that is not fitted yet; the class documents the arguments."""
        self.inputs, self._classes = inputs, None if classes is None else np.asarray(classes)
        self.laplace = LinearisedLaplace(module, likelihood, **options)

    def fit(self, X: Inputs, y: ArrayLike) -> EstimatorPosterior:
        """Fit the posterior to the training data X and y of the estimator."""
        self.laplace.fit(*self._pair(X, y), progress_bar=False)
        return self

    def calibrate(self, X: Inputs, y: ArrayLike) -> EstimatorPosterior:
        """Calibrate the predictions on data X and y that were not used in training."""
        self.laplace.calibrate(*self._pair(X, y))
        return self

    def distribution(self, X: Inputs) -> Prediction:
        """Return the ``Prediction`` at X of ``LinearisedLaplace.predict``."""
        return self.laplace.predict(self.inputs(X))

    def predict_proba(self, X: Inputs) -> np.ndarray:
        """Return the probabilities of the classes at X, shape (N, C), or of the labels."""
        probs: np.ndarray = self.distribution(X).probs.cpu().numpy()
        if self._classes is not None and probs.shape[1] == 1:
            return np.concatenate([1 - probs, probs], axis=1)
        return probs

    def predict(self, X: Inputs, return_std: bool = False) -> Any:
        """Return the most probable classes at X, or the mean. With ``return_std`` the standard
        deviation of y is returned as well."""
        if self._classes is not None:
            return self._classes[self.predict_proba(X).argmax(1)]
        prediction = self.distribution(X)
        if prediction.likelihood.gives_probabilities:  # several labels
            return (prediction.probs > 0.5).int().cpu().numpy()
        both = prediction.expectation, prediction.predictive_variance.sqrt()
        mean, deviation = (each.squeeze(-1).cpu().numpy() for each in both)
        return (mean, deviation) if return_std else mean

    def _pair(self, X: Inputs, y: ArrayLike) -> tuple[Tensor, Tensor]:
        """Return inputs and targets: class indices, or values of shape (N, C)."""
        x, values = self.inputs(X), np.asarray(y)
        if self._classes is not None:
            classes = self._classes.tolist()
            if unknown := {*values.tolist()} - {*classes}:
                raise ValueError(
                    f"y has labels that the estimator has not seen: {[*unknown][:5]}. Its labels "
                    f"are {classes[:5]}."
                )
            values = np.searchsorted(self._classes, values.astype(self._classes.dtype))
            if not self.laplace.likelihood.elementwise:
                return x, torch.as_tensor(values, device=x.device)
        return x, torch.as_tensor(values.reshape(len(values), -1), device=x.device).to(x.dtype)


def posterior(estimator: Any, **options: Any) -> EstimatorPosterior:
    """Return the posterior of a trained estimator, to be fitted to its training data.

    Networks of ``MLPClassifier`` and ``MLPRegressor`` are converted exactly. For the last step of a
    pipeline, pass the data that the other steps return: ``pipeline[:-1].transform(X)``.

    Args:
        estimator (object): The trained estimator.
        **options: Further arguments of ``LinearisedLaplace``.

    Example:
        >>> from sklearn.neural_network import MLPRegressor
        >>> estimator = MLPRegressor(hidden_layer_sizes=(8,), max_iter=5).fit(X, y)
        >>> mean, deviation = posterior(estimator).fit(X, y).predict(X, return_std=True)
    """
    if "BaseMultilayerPerceptron" not in {cls.__name__ for cls in type(estimator).__mro__}:
        raise TypeError(
            f"{type(estimator).__name__} cannot be converted; MLPClassifier and MLPRegressor can "
            "(for skorch, copy examples/recipes/skorch_networks.py). Pass its network to "
            "EstimatorPosterior."
        )
    from sklearn.utils.validation import check_is_fitted, validate_data

    check_is_fitted(estimator, "coefs_")
    layers: list[nn.Module] = []
    for weight, bias in zip(estimator.coefs_, estimator.intercepts_, strict=True):
        matrix = torch.tensor(weight, device="cpu")
        layer = nn.Linear(len(matrix), matrix.shape[1], device="cpu", dtype=matrix.dtype)
        with torch.no_grad():
            layer.weight.copy_(matrix.T)
            layer.bias.copy_(torch.tensor(bias, device="cpu"))
        layers += [layer, _ACTIVATIONS[estimator.activation]()]
    module = nn.Sequential(*layers[:-1]).eval()

    def inputs(X: Inputs) -> Tensor:
        # as its predict does, with an error for other columns or another order of them
        X = validate_data(estimator, X, accept_sparse=True, reset=False)
        X = X.toarray() if hasattr(X, "toarray") else X
        return torch.tensor(X, dtype=matrix.dtype, device="cpu")

    likelihood = _LIKELIHOODS[estimator.out_activation_]
    has_several = likelihood == "bernoulli" and estimator.n_outputs_ > 1
    classes = None if has_several else getattr(estimator, "classes_", None)
    return EstimatorPosterior(module, likelihood, inputs, classes, **options)
