"""Out-of-distribution detection by a density of a network's features.

As in deep deterministic uncertainty (Mukhoti et al., 2023): one Gaussian for each class, or a
mixture without labels, is fitted to the outputs of one layer.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from torch_lla_em.data import copied, map_tensors, to_device
from torch_lla_em.mixtures.conjugate import ConjugatePrior
from torch_lla_em.mixtures.data import require_several_passes
from torch_lla_em.mixtures.gaussian import GaussianMixture
from torch_lla_em.mixtures.mixture import Mixture

_BATCH_SIZE = 256
"""How many examples the network runs on at once if whole tensors are passed."""


class FeatureDensity:
    """A mixture fitted to the outputs of one layer of a network, which shows OOD inputs.

    The model runs in evaluation mode and without gradients; its mode, hooks, buffers and
    attributes are put back afterwards.

    Args:
        model (nn.Module): any trained module.
        layer (str or nn.Module): a submodule or its name. If it runs more than once in a forward
            pass, its last output counts; of a tuple or a mapping, the first tensor.
        mixture (Mixture, default None): None for full Gaussians with the conjugate prior, one for
            each class with ``by_label``, ten without. Pass one with ``covariance="diagonal"`` if
            the layer has hundreds of outputs.
        by_label (bool, default False): whether every class of batches (inputs, labels) has
            components of its own. Use it for a classifier.
        pool ("mean", "flatten" or callable, default "mean"): how outputs become features (B, D).
            "mean" averages over all axes but the first and ``feature_axis``.
        feature_axis (int, default 1): 1 for the channels of a convolution, −1 for the tokens of a
            transformer.
        forward_fn (callable, default None): called with the model and the inputs in place of
            ``model(inputs)``.

    Raises:
        ValueError: if the model has no such layer, or ``pool`` is not known.

    Example::

        density = FeatureDensity(model, "body", by_label=True).fit(train_loader)
        density.score(x)                 # log density of the features, (B,): low for OOD inputs
    """

    def __init__(
        self,
        model: nn.Module,
        layer: str | nn.Module,
        mixture: Mixture | None = None,
        *,
        by_label: bool = False,
        pool: Literal["mean", "flatten"] | Callable[[Tensor], Tensor] = "mean",
        feature_axis: int = 1,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
    ):
        if not callable(pool) and pool not in ("mean", "flatten"):
            raise ValueError(f"pool must be 'mean', 'flatten' or a callable, not {pool!r}.")
        self.model, self.layer, self.by_label = model, _find(model, layer), by_label
        self.mixture = mixture or GaussianMixture(1 if by_label else 10, prior=ConjugatePrior())
        self.pool, self.feature_axis = pool, feature_axis
        self.forward_fn = forward_fn or _forward
        self._checksum: int | None = None

    def fit(self, data: Any, labels: Any = None) -> "FeatureDensity":
        """Fit to the features of training data; return self.

        Each EM step takes one pass over the data, but if all examples fit in the mixture's
        ``sample_size``, the network runs only once over them.

        Args:
            data: a loader or list of batches, a dataset, or a tensor. Batches are inputs, tuples
                (inputs, labels, ...) or dicts with "labels". A tuple (x, labels) is one batch.
            labels (Tensor, default None): the labels of a tensor ``data``. A fit by label leaves
                out examples labelled −100, which PyTorch's losses ignore too.

        Raises:
            TypeError: if the data are an iterator or lack labels, or the layer returns no floats.
            ValueError: if features are not finite, or there are fewer examples than components.
        """
        batches = _FeatureBatches(self, _as_batches(data, labels))
        self.mixture.fit(batches, by_label=self.by_label)
        self._checksum = _checksum(self.model)
        return self

    def score(self, inputs: Any) -> Tensor:
        """Return the log density of the inputs' features, shape (B,): low if they are OOD.

        Args:
            inputs: one batch of what the network takes.

        Raises:
            RuntimeError: before ``fit``, or if the model's weights have changed since.
        """
        self._require_same_weights()
        return self.mixture.log_prob(self.features(inputs))

    def class_scores(self, inputs: Any) -> Tensor:
        """Return log p(features, label), shape (B, C), with labels in increasing order.

        Args:
            inputs: one batch of what the network takes.

        Raises:
            RuntimeError: before ``fit``, after one without labels, or if the weights have changed.
        """
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
        outputs: list[Any] = []
        own = next(self.model.parameters(), next(self.model.buffers(), None))
        inputs = inputs if own is None else to_device(inputs, own.device)
        with _restored(self.model), torch.no_grad():
            self.layer.register_forward_hook(lambda module, args, out: outputs.append(out))
            self.forward_fn(self.model, copied(inputs))
        if not outputs:
            raise RuntimeError("The layer did not run in the forward pass. Choose one that does.")
        return self._pooled(outputs[-1])

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
        output = output.detach().clone()  # it may be a buffer of the model
        if output.ndim == 1:
            return output[:, None]
        if output.ndim == 2 or self.pool == "flatten":
            return output.flatten(1)
        return output.movedim(self.feature_axis, 1).flatten(2).mean(2)


class _FeatureBatches:
    """The batches (features, labels) of a loader, computed anew in every pass."""

    def __init__(self, density: FeatureDensity, batches: Iterable):
        self.density, self.batches = density, batches

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for batch in self.batches:
            labels: list[Any] = []
            if isinstance(batch, Mapping):
                labels = [batch["labels"]] if "labels" in batch else []
                batch = {name: value for name, value in batch.items() if name != "labels"}
            elif isinstance(batch, (tuple, list)):
                batch, *labels = batch
            yield (self.density.features(batch), *labels)


def _as_batches(data: Any, labels: Any) -> Iterable:
    """Return the batches of a loader, of a dataset, of a dict, or of tensors x and labels."""
    require_several_passes(data)
    if labels is not None:
        data = (data, labels)
    elif isinstance(data, (Tensor, np.ndarray)):
        data = (data,)
    if isinstance(data, Mapping):
        return [data]
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return DataLoader(data, _BATCH_SIZE)
    if not isinstance(data, tuple) or len(data) > 2:
        return data
    data = map_tensors(lambda tensor: tensor, data)  # arrays become tensors
    if not all(isinstance(part, Tensor) for part in data):
        return [data]
    shapes = [tuple(part.shape) for part in data]
    if shapes[0][0] != shapes[-1][0] or (labels is None and shapes[0] in shapes[1:]):
        raise ValueError(
            f"The data are two tensors of shapes {shapes[0]} and {shapes[1]}, which are not inputs "
            "and one label each. Pass fit(x, labels), or a list of batches."
        )
    return [*zip(*(part.split(_BATCH_SIZE) for part in data))]


def _forward(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def _find(model: nn.Module, layer: str | nn.Module) -> nn.Module:
    modules = dict(model.named_modules())
    if isinstance(layer, nn.Module):
        if layer not in modules.values():
            raise ValueError("The layer is not a part of the model.")
        return layer
    if layer not in modules:
        names = ", ".join(name for name in modules if name)
        raise ValueError(f"The model has no layer {layer!r}. It has: {names}.")
    return modules[layer]


def _checksum(model: nn.Module) -> int:
    """Return a number that changes with every weight and running statistic."""
    total = 0
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            entries = tensor.detach().cpu().contiguous().reshape(-1)
            total = crc32(entries.view(torch.uint8).numpy().data, total)
    return total


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode; restore its mode, attributes and buffers at the end."""
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    contents = [
        (value, value.copy())
        for _, before in attributes
        for value in before.values()
        if isinstance(value, (dict, list, set))
    ]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        for module in model.modules():
            module.training = False  # not .eval(), in which some models merge adapters
        yield
    finally:
        for now, before in (*attributes, *contents):
            now.clear()
            now.extend(before) if isinstance(now, list) else now.update(before)
        with torch.no_grad():
            for buffer, copy in buffers:
                if not torch.equal(buffer, copy):
                    buffer.copy_(copy)
