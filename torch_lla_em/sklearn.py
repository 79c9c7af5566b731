"""Networks with their posterior as scikit-learn estimators: ``torch_lla_em[sklearn]``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from torch_lla_em.laplace import LinearisedLaplace
from torch_lla_em.prediction import Prediction

_BATCH = 128
# of gradients, where few rows make for short epochs; and held-out rows that are worth their while
_LEAST_STEPS, _LEAST_HELD_OUT = 1000, 20
_DTYPES = [np.float64, np.float32]


class _Estimator(BaseEstimator):
    """A network trained by AdamW, then its posterior, calibrated by rows that were held out.

    ``module`` is called with the numbers of features and outputs and returns the network; None:
    a perceptron with ``hidden`` layers. Inputs and real targets are standardised, in the dtype of
    X. ``options`` go to ``LinearisedLaplace``. After ``fit``, ``laplace_`` is the posterior; real
    targets are standardised there.
    """

    _likelihood: str

    def __init__(
        self,
        module: Callable[[int, int], nn.Module] | None = None,
        *,
        hidden: tuple[int, ...] = (50, 50),
        epochs: int = 100,
        learning_rate: float = 1e-2,
        weight_decay: float = 1e-4,
        validation_fraction: float = 0.1,
        num_samples: int = 32,
        options: dict[str, Any] | None = None,
        device: str = "cpu",
        random_state: Any = None,
    ):
        self.module, self.hidden, self.epochs = module, hidden, epochs
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.validation_fraction, self.num_samples = validation_fraction, num_samples
        self.options, self.device, self.random_state = options, device, random_state

    def _fit(self, x: Tensor, y: Tensor, outputs: int) -> None:
        count, features = x.shape
        held_out = int(self.validation_fraction * count)
        held_out = held_out if held_out >= _LEAST_HELD_OUT else 0
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        # torch 2.11 refuses an eps of 0
        standard = nn.BatchNorm1d(features, eps=1e-30, affine=False).to(x.dtype).eval()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            out, kept = torch.randperm(count).split([held_out, count - held_out])
            standard.running_mean, standard.running_var = x[kept].mean(0), _width(x[kept]).square()
            network = (self.module or self._perceptron)(features, outputs).to(x.dtype)
            self._train(network.to(self.device), standard(x[kept]), y[kept])
        model = nn.Sequential(standard, network).to(self.device).eval()
        options = {"num_samples": self.num_samples, "seed": seed, **(self.options or {})}
        self.laplace_ = LinearisedLaplace(model, self._likelihood, **options)
        self.laplace_.fit(x[kept], y[kept], progress_bar=False)
        if held_out:
            self.laplace_.calibrate(x[out], y[out])

    def _perceptron(self, features: int, outputs: int) -> nn.Module:
        layers: list[nn.Module] = []
        for width in self.hidden:
            layers += [nn.Linear(features, width), nn.Tanh()]
            features = width
        return nn.Sequential(*layers, nn.Linear(features, outputs))

    def _train(self, network: nn.Module, x: Tensor, y: Tensor) -> None:
        classes = self._likelihood == "classification"
        loss = nn.functional.cross_entropy if classes else nn.functional.mse_loss
        batches = -(-len(x) // _BATCH)
        epochs = max(self.epochs, -(-_LEAST_STEPS // batches))
        rate, decay = self.learning_rate, self.weight_decay
        optimiser = torch.optim.AdamW(network.parameters(), rate, weight_decay=decay)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs * batches)
        x, y = x.to(self.device), y.to(self.device)
        for _ in range(epochs):
            for rows in torch.randperm(len(x)).tensor_split(batches):
                optimiser.zero_grad()
                loss(network(x[rows]), y[rows]).backward()
                optimiser.step()
                schedule.step()

    def _predictions(self, X: Any) -> Iterator[Prediction]:
        check_is_fitted(self)
        X = validate_data(self, X, dtype=_DTYPES, reset=False)
        own = next(self.laplace_.model.parameters()).dtype
        for rows in torch.tensor(X, dtype=own).split(8 * _BATCH):
            yield self.laplace_.predict(rows)


class LaplaceClassifier(ClassifierMixin, _Estimator):
    __doc__ = _Estimator.__doc__
    _likelihood = "classification"

    def fit(self, X: Any, y: Any) -> LaplaceClassifier:
        """Train, and find the posterior."""
        X, y = validate_data(self, X, y, dtype=_DTYPES)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("A classifier needs two classes, but y has one class only.")
        self._fit(torch.tensor(X), torch.as_tensor(labels), len(self.classes_))
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probabilities of ``classes_``, (N, C)."""
        return np.concatenate([p.probs.cpu().numpy() for p in self._predictions(X)])

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable classes, (N,)."""
        probs = self.predict_proba(X)
        return self.classes_[probs.argmax(1)]


class LaplaceRegressor(MultiOutputMixin, RegressorMixin, _Estimator):
    __doc__ = _Estimator.__doc__
    _likelihood = "regression"

    def fit(self, X: Any, y: Any) -> LaplaceRegressor:
        """Train, and find the posterior and the noise."""
        several = {"multi_output": True, "y_numeric": True, "ensure_min_samples": 2}
        X, y = validate_data(self, X, y, dtype=_DTYPES, **several)
        x, self._shape = torch.tensor(X), y.shape[1:]
        targets = torch.tensor(y.reshape(len(y), -1)).to(x)
        self._centre, self._width = targets.mean(0), _width(targets)
        self._fit(x, (targets - self._centre) / self._width, targets.shape[1])
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the mean of y, and its standard deviation, noise included, if asked."""
        parts = [p.moments() for p in self._predictions(X)]
        mean, variance = (torch.cat(values).cpu() for values in zip(*parts))
        found = self._centre + self._width * mean, self._width * variance.sqrt()
        arrays = tuple(values.view(len(values), *self._shape).numpy() for values in found)
        return arrays if return_std else arrays[0]


def _width(values: Tensor) -> Tensor:
    """Return standard deviations, 1 where values are all the same."""
    width = values.std(0, correction=0)
    rounding = 8 * torch.finfo(values.dtype).eps * values.abs().amax(0)
    return torch.where(width > rounding, width, 1.0)
