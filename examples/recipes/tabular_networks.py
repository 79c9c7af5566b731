"""Posteriors of RealMLP and TabM: a recipe to copy, for pytabkit 1.7 and tabm.

    pip install "pytabkit[models]" tabm "torch_lla_em[sklearn]"
    python examples/recipes/tabular_networks.py

``of_pytabkit`` returns the posterior of a trained estimator of pytabkit, whose categorical columns are encoded as the
estimator encodes them. ``AverageHeads`` makes one network of the k heads of a TabM. Set ``use_ls=False`` for RealMLP:
label smoothing, its default, makes its probabilities too low. Outputs of RealMLP are not limited to the range of the
training targets here, because there would be no uncertainty at its ends.
"""

from collections.abc import Callable
from math import log
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from torch_lla_em.integrations.estimators import EstimatorPosterior


class AverageHeads(nn.Module):
    """The average of probabilities, or of means, over heads (B, k, C) that share most weights."""

    def __init__(self, module: nn.Module, classes: bool = True):
        super().__init__()
        self.module, self.classes = module, classes

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return log probabilities, which are valid logits, or means, shape (B, C)."""
        heads = self.module(*inputs)
        if not self.classes:
            return heads.mean(1)
        return heads.log_softmax(-1).logsumexp(1) - log(heads.shape[1])


class RealMLP(nn.Module):
    """RealMLP as a network of one tensor, in which its columns are joined."""

    def __init__(self, network: nn.Module, widths: dict[str, int]):
        super().__init__()
        self.network, self.widths = network, widths

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(self.widths, x.split([*self.widths.values()], dim=1), strict=True)
        # the first axis is that of networks
        given = {name: (y.long() if name == "x_cat" else y)[None] for name, y in parts}
        return self.network(given)["x_cont"][0]


class TabM(nn.Module):
    """TabM as a network of one tensor, whose first columns are numbers and the others categories."""

    def __init__(self, network: nn.Module, numbers: int, scale: tuple[float, float]):
        super().__init__()
        self.network, self.numbers, self.scale = network, numbers, scale

    def forward(self, x: Tensor) -> Tensor:
        categories = x[:, self.numbers :].long()
        outputs = self.network(x[:, : self.numbers], categories if categories.shape[1] else None)
        return outputs * self.scale[1] + self.scale[0]


def of_pytabkit(estimator: Any, **options: Any) -> EstimatorPosterior:
    """Return the posterior of a trained RealMLP or TabM, with ``fit``, ``calibrate`` and ``predict``."""
    if not hasattr(estimator, "alg_interface_"):
        raise ValueError("The estimator is not trained: call its fit first.")
    interface = estimator.alg_interface_
    parts = getattr(interface, "sub_split_interfaces", [interface])
    kind, count = type(parts[0]).__name__, len(parts)
    if kind not in ("NNAlgInterface", "TabMSubSplitInterface"):
        raise TypeError(f"{type(estimator).__name__} has no network: RealMLP and TabM have one.")
    if kind == "NNAlgInterface":
        count = len(next(parts[0].model.model.parameters()))
    if count > 1:
        raise TypeError(
            f"The estimator has trained {count} networks (n_cv, n_refit or n_ens). Train one for each random_state, "
            "and average: LaplaceEnsemble([of_pytabkit(e).fit(X, y).laplace for e in estimators])."
        )
    classes = getattr(estimator, "classes_", None)
    convert = _of_realmlp if kind == "NNAlgInterface" else _of_tabm
    module, encoded = convert(parts[0], estimator.x_converter_.tensor_infos, classes is not None)
    device = next(module.parameters()).device

    def inputs(X: Any) -> Tensor:
        dataset = estimator.x_converter_.transform(pd.DataFrame(X))
        if dataset.tensors["x_cont"].isnan().any():
            raise ValueError("pytabkit takes no missing numbers: fill them in, as for its fit.")
        return encoded(dataset).to(device)

    likelihood = "regression" if classes is None else "classification"
    return EstimatorPosterior(module, likelihood, inputs, classes, **options)


Converted = tuple[nn.Module, Callable[[Any], Tensor]]
"""A network of one tensor, and the function that makes this tensor from encoded columns."""


def _of_realmlp(part: Any, columns: dict[str, Any], has_classes: bool) -> Converted:
    encoder, network = part.model.creator.static_model, part.model.model
    after = encoder.forward_tensor_infos(columns)
    widths = {name: after[name].get_n_features() for name in sorted(after)}
    kept = [layer for layer in network.tfms if type(layer).__name__ != "ClampLayer"]

    def encoded(dataset: Any) -> Tensor:
        tensors = encoder.forward_ds(dataset.to(part.device)).tensors
        return torch.cat([tensors[name].float() for name in widths], dim=1)

    return RealMLP(type(network)(kept).eval(), widths), encoded


def _of_tabm(part: Any, columns: dict[str, Any], has_classes: bool) -> Converted:
    used = part.num_col_mask_.cpu()

    def encoded(dataset: Any) -> Tensor:
        tensors = part.tfm_(dataset).tensors
        return torch.cat([tensors["x_cont"][:, used], tensors["x_cat"].float()], dim=1)

    scale = (0.0, 1.0) if has_classes else (part.y_mean_, part.y_std_)
    heads = TabM(part.model_.eval(), int(used.sum()), scale)
    return AverageHeads(heads, has_classes).eval(), encoded


if __name__ == "__main__":
    from pytabkit import RealMLP_TD_Classifier
    from sklearn.datasets import load_breast_cancer

    X, y = load_breast_cancer(return_X_y=True, as_frame=True)
    estimator = RealMLP_TD_Classifier(
        use_ls=False, random_state=0, n_epochs=8, hidden_sizes=[32, 32], device="cpu"
    )
    estimator.fit(X[::2], y[::2])
    la = of_pytabkit(estimator).fit(X[::2], y[::2]).calibrate(X[1::4], y[1::4])
    test = la.distribution(X[3::4]).log_prob(torch.tensor(y[3::4].to_numpy())).mean()
    print(f"NLL {-test:.3f}, accuracy {(la.predict(X[3::4]) == y[3::4]).mean():.3f}")
