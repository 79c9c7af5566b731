"""The networks of RealMLP and TabM, as the estimators of pytabkit train them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.compat.networks import AverageHeads, EstimatorNetwork, indices, values_of

_Converted = tuple[nn.Module, Callable[[Any], Tensor]]
"""A network of one tensor, and what makes this tensor of encoded columns."""


def of_pytabkit(estimator: Any) -> EstimatorNetwork:
    """Return the network of an estimator of pytabkit, whose inputs are its columns as it encodes them.

    Raises:
        TypeError: If the estimator is neither RealMLP nor TabM, or has trained several networks.
    """
    interface = estimator.alg_interface_
    parts = getattr(interface, "sub_split_interfaces", [interface])
    kind, count = type(parts[0]).__name__, len(parts)
    if kind not in ("NNAlgInterface", "TabMSubSplitInterface"):
        raise TypeError(
            f"{type(estimator).__name__} has no network that can be converted. Of pytabkit, RealMLP and TabM have one."
        )
    if kind == "NNAlgInterface":
        count = len(next(parts[0].model.model.parameters()))
    if count > 1:
        raise TypeError(
            f"The estimator has trained {count} networks (n_cv, n_refit or n_ens). Train one for each random_state, "
            "and average their posteriors: LaplaceEnsemble([posterior(e).fit(X, y).laplace for e in estimators])."
        )
    convert = _of_realmlp if kind == "NNAlgInterface" else _of_tabm
    classes = getattr(estimator, "classes_", None)
    module, encoded = convert(parts[0], estimator.x_converter_.tensor_infos, classes is not None)
    device = next(module.parameters()).device

    def inputs(X: Any) -> Tensor:
        import pandas as pd  # which pytabkit needs

        dataset = estimator.x_converter_.transform(pd.DataFrame(X))
        if dataset.tensors["x_cont"].isnan().any():
            raise ValueError("pytabkit takes no missing numbers: fill them in, as for its fit.")
        return encoded(dataset).to(device)

    if classes is None:
        return EstimatorNetwork(module, "regression", inputs, values_of)
    return EstimatorNetwork(module, "classification", inputs, indices(classes), classes)


class _RealMLP(nn.Module):
    """RealMLP as a network of one tensor, in which its columns are joined."""

    def __init__(self, network: nn.Module, widths: dict[str, int]):
        super().__init__()
        self.network, self._widths = network, widths

    def forward(self, x: Tensor) -> Tensor:
        """Return logits or means, shape (B, C)."""
        parts = zip(self._widths, x.split([*self._widths.values()], dim=1))
        # the first axis is that of networks
        given = {name: (y.long() if name == "x_cat" else y)[None] for name, y in parts}
        outputs: Tensor = self.network(given)["x_cont"][0]
        return outputs


class _TabM(nn.Module):
    """TabM as a network of one tensor, whose first columns are numbers and the others categories."""

    def __init__(self, network: nn.Module, numbers: int, scale: tuple[float, float]):
        super().__init__()
        self.network, self._numbers, self._scale = network, numbers, scale

    def forward(self, x: Tensor) -> Tensor:
        """Return logits or means of each head, shape (B, k, C)."""
        categories = x[:, self._numbers :].long()
        given = (x[:, : self._numbers], categories if categories.shape[1] else None)
        mean, deviation = self._scale
        outputs: Tensor = self.network(*given)
        return outputs * deviation + mean


def _of_realmlp(part: Any, columns: dict[str, Any], has_classes: bool) -> _Converted:
    encoder, network = part.model.creator.static_model, part.model.model
    after = encoder.forward_tensor_infos(columns)
    widths = {name: after[name].get_n_features() for name in sorted(after)}
    # outputs limited to the range of y would have no uncertainty at its ends
    kept = [layer for layer in network.tfms if type(layer).__name__ != "ClampLayer"]

    def encoded(dataset: Any) -> Tensor:
        tensors = encoder.forward_ds(dataset.to(part.device)).tensors
        return torch.cat([tensors[name].float() for name in widths], dim=1)

    return _RealMLP(type(network)(kept).eval(), widths), encoded


def _of_tabm(part: Any, columns: dict[str, Any], has_classes: bool) -> _Converted:
    used = part.num_col_mask_.cpu()

    def encoded(dataset: Any) -> Tensor:
        tensors = part.tfm_(dataset).tensors
        return torch.cat([tensors["x_cont"][:, used], tensors["x_cat"].float()], dim=1)

    scale = (0.0, 1.0) if has_classes else (part.y_mean_, part.y_std_)
    heads = _TabM(part.model_.eval(), int(used.sum()), scale)
    return AverageHeads(heads, has_classes).eval(), encoded
