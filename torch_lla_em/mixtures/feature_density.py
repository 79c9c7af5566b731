"""How familiar an input is: a density over a network's features.

As in deep deterministic uncertainty (Mukhoti et al., 2023): a Gaussian for each class,
or a mixture without labels, fitted to the outputs of one layer.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from torch_lla_em.data import copied, to_device
from torch_lla_em.mixtures.base import Mixture
from torch_lla_em.mixtures.conjugate import ConjugatePrior
from torch_lla_em.mixtures.gaussian import GaussianMixture

_PIECE = 256
"""Examples that the network runs on at once where whole tensors are passed."""


class FeatureDensity:
    """A mixture over the outputs of ``layer``, the name of a submodule or the module itself.

    With ``by_label`` every class of batches (inputs, labels) has components of its own.
    ``mixture`` defaults to Gaussians with the conjugate prior: one for each class, or ten
    without labels.

    Features become rows (B, D): of an output with more axes, ``pool="mean"`` averages
    over all but the first and ``feature_axis`` (1: channels of a convolution; −1: tokens
    of a transformer), ``pool="flatten"`` keeps every number, and a callable may do as it
    likes. Of a tuple or a mapping the first tensor is meant; of a layer that runs more than
    once, the last run.

    The model runs in evaluation mode and without gradients, and is afterwards as it was:
    mode, hooks, buffers and attributes.
    """

    def __init__(
        self,
        model: nn.Module,
        layer: str | nn.Module,
        mixture: Mixture | None = None,
        *,
        by_label: bool = False,
        pool: str | Callable[[Tensor], Tensor] = "mean",
        feature_axis: int = 1,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
    ):
        if not callable(pool) and pool not in ("mean", "flatten"):
            raise ValueError(f"pool must be 'mean', 'flatten' or a callable, not {pool!r}.")
        self.model = model
        self.layer = _find(model, layer)
        self.by_label = by_label
        self.mixture = mixture or GaussianMixture(1 if by_label else 10, prior=ConjugatePrior())
        self.pool, self.feature_axis = pool, feature_axis
        self.forward_fn = forward_fn or _forward
        self._checksum: int | None = None

    def fit(self, data: Any, labels: Any = None) -> "FeatureDensity":
        """Fit to the batches of a loader, or to tensors: ``fit(x, labels)``; return self.

        Batches are inputs, tuples (inputs, labels, ...) or dicts with "labels"; a tuple of two
        tensors, (x, labels), is taken as one batch. A fit by label leaves out examples labelled
        −100, which PyTorch's losses ignore too. Each EM step takes one pass over the data; if
        all examples fit in the mixture's ``sample_size``, the network runs only once over them.
        """
        batches = _FeatureBatches(self, _as_batches(data, labels))
        self.mixture.fit(batches, by_label=self.by_label)
        self._checksum = _checksum(self.model)
        return self

    def score(self, inputs: Any) -> Tensor:
        """Return the log density of the inputs' features, shape (B,): higher is more familiar."""
        self._require_same_weights()
        return self.mixture.log_prob(self.features(inputs))

    def class_scores(self, inputs: Any) -> Tensor:
        """Return log p(features, label), shape (B, C), with labels in increasing order."""
        self._require_same_weights()
        return self.mixture.class_log_prob(self.features(inputs))

    def _require_same_weights(self) -> None:
        if self._checksum not in (None, _checksum(self.model)):
            raise RuntimeError(
                "The model's weights changed after fit(), so the density no longer describes its "
                "features. Call fit() again."
            )

    def features(self, inputs: Any) -> Tensor:
        """Return the pooled outputs of the layer, shape (B, D)."""
        with _untouched(self.model):
            return self._rows(inputs)

    def _rows(self, inputs: Any) -> Tensor:
        caught: list[Any] = []
        handle = self.layer.register_forward_hook(lambda module, args, out: caught.append(out))
        own = next(self.model.parameters(), next(self.model.buffers(), None))
        try:
            with torch.no_grad():
                inputs = inputs if own is None else to_device(inputs, own.device)
                self.forward_fn(self.model, copied(inputs))
        finally:
            handle.remove()
        if not caught:
            raise RuntimeError("The layer did not run in the forward pass. Choose one that does.")
        return self._pooled(caught[-1])

    def _pooled(self, output: Any) -> Tensor:
        while isinstance(output, (tuple, list, Mapping)) and output:
            output = next(iter(output.values() if isinstance(output, Mapping) else output))
        if callable(self.pool) and isinstance(output, Tensor):
            output = self.pool(output)
        if not isinstance(output, Tensor) or not output.is_floating_point() or output.ndim == 0:
            what = f"{output.dtype} tensor" if isinstance(output, Tensor) else type(output).__name__
            raise TypeError(
                f"The layer's output is a {what}, not a floating-point tensor (B, ...). "
                "Choose another layer."
            )
        # A layer without gradients may hand out the very tensor that it keeps.
        output = output.detach().clone()
        if output.ndim == 1:
            return output[:, None]
        if output.ndim == 2 or self.pool == "flatten":
            return output.flatten(1)
        return output.movedim(self.feature_axis, 1).flatten(2).mean(2)


class _FeatureBatches:
    """The batches (features, labels) of a loader, computed anew in every pass."""

    def __init__(self, density: FeatureDensity, loader: Iterable):
        self.density, self.loader = density, loader

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for batch in self.loader:
            inputs, labels = _split(batch)
            features = self.density.features(inputs)
            yield (features,) if labels is None else (features, labels)


def _as_batches(data: Any, labels: Any) -> Iterable:
    """Return batches that can be read again and again; whole tensors are cut into pieces."""
    if isinstance(data, Iterator):
        raise TypeError(
            f"The data are a {type(data).__name__}, which ends after one pass, and EM needs "
            "several. Pass tensors, a list of batches or a DataLoader."
        )
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return DataLoader(data, _PIECE)
    if isinstance(data, Mapping):
        return [data]
    whole = data if isinstance(data, tuple) and len(data) == 2 else (data,)
    whole = whole if labels is None else (data, labels)
    if not all(isinstance(part, (Tensor, np.ndarray)) for part in whole):
        return data if labels is None else [(data, labels)]
    x, *rest = parts = [
        part if isinstance(part, Tensor) else torch.from_numpy(part) for part in whole
    ]
    if rest and (len(rest[0]) != len(x) or (labels is None and rest[0].shape == x.shape)):
        raise ValueError(
            f"The data are two tensors of shapes {tuple(x.shape)} and {tuple(rest[0].shape)}, "
            "which are not inputs and one label each. Pass fit(x, labels), or a list of batches."
        )
    return [*zip(*(part.split(_PIECE) for part in parts))] if rest else x.split(_PIECE)


def _checksum(model: nn.Module) -> int:
    """Return a number that changes with every weight and running statistic."""
    total = 0
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            entries = tensor.detach().cpu().contiguous().reshape(-1)
            total = crc32(entries.view(torch.uint8).numpy(), total)
    return total


def _split(batch: Any) -> tuple[Any, Any]:
    """Return the inputs and the labels of a batch; None where it has no labels."""
    if isinstance(batch, Mapping):
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        return inputs, batch.get("labels")
    if isinstance(batch, (tuple, list)):
        return batch[0], batch[1] if len(batch) > 1 else None
    return batch, None


def _forward(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def _find(model: nn.Module, layer: str | nn.Module) -> nn.Module:
    modules = dict(model.named_modules())
    if isinstance(layer, nn.Module):
        if not any(module is layer for module in modules.values()):
            raise ValueError("The layer is not a part of the model.")
        return layer
    if layer not in modules:
        names = ", ".join(name for name in modules if name)
        raise ValueError(f"The model has no layer {layer!r}. It has: {names}.")
    return modules[layer]


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Run the model in evaluation mode; put back whatever changed, also after an error."""
    modules = list(model.modules())
    attributes = [dict(vars(module)) for module in modules]
    contents = [
        (value, value.copy())
        for attribute in attributes
        for value in attribute.values()
        if isinstance(value, (dict, list, set))
    ]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        for module in modules:
            # Not .eval(): some models do more in it, such as merging adapters.
            module.training = False
        yield
    finally:
        for module, attribute in zip(modules, attributes, strict=True):
            vars(module).clear()
            vars(module).update(attribute)
        for held, content in contents:
            held.clear()
            held.extend(content) if isinstance(held, list) else held.update(content)
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
