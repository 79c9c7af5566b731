"""Out-of-distribution detection by a density of a network's features.

One Gaussian for each class, or a mixture without labels, is fitted to the outputs of one layer
(Mukhoti et al., 2023).
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.data import TensorDataset

from torch_lla_em.data import (
    Inputs,
    Loader,
    as_loader,
    default_targets,
    inputs_of,
    is_sequence,
    tensors_in,
    to_device,
)
from torch_lla_em.jacobian import Network, NetworkState
from torch_lla_em.mixtures.mixture import GaussianMixture
from torch_lla_em.runtime import Adapter, refuse_former


class FeatureDensity:
    """OOD detection by a mixture that is fitted to the outputs of one layer of a network.

    The model runs in evaluation mode and without gradients, and is not changed.

    Args:
        model (nn.Module): Any trained module.
        layer (str or nn.Module): A submodule or its name. If it runs several times in a forward
            pass, its last output is used. If the output is a tuple or a mapping, its first tensor
            is used.
        mixture (GaussianMixture, optional): Default None: full Gaussians with ``prior=1``, one for
            each class with ``by_label``, and ten without. Pass a mixture with
            ``covariance="diagonal"`` if the layer has hundreds of outputs.
        by_label (bool): Whether each class of batches (inputs, labels) has its own components.
            Default False; set it for a classifier.
        pool (callable, optional): Maps outputs (B, ...) to features (B, D), such as ``lambda h:
            h.mean(1)`` for tokens (B, T, D). Default None: the mean over all axes but the first
            two, as for convolutions.
        adapter (Adapter): How a batch becomes outputs and targets, as in ``LinearisedLaplace``.

    Example:
        >>> density = FeatureDensity(model, "0", by_label=True).fit(loader)
        >>> score = density.score(x)  # log density of the features, (B,): low for OOD inputs
    """

    def __init__(
        self,
        model: nn.Module,
        layer: str | nn.Module,
        mixture: GaussianMixture | None = None,
        *,
        by_label: bool = False,
        pool: Callable[[Tensor], Tensor] | None = None,
        adapter: Adapter = Adapter(),
        **former: Any,
    ):
        refuse_former("FeatureDensity", former, {"forward_fn": "pass adapter=Adapter(outputs=...)"})
        self._network, self._targets = Network(model, adapter.outputs or _forward), adapter.targets
        module = self._network.module
        self.layer = module.get_submodule(layer) if isinstance(layer, str) else layer
        self.model, self.by_label = model, by_label
        self.mixture = mixture or GaussianMixture(1 if by_label else 10, prior=1.0)
        self.pool = pool
        self._state: NetworkState | None = None

    def fit(self, data: Loader | Tensor, labels: Tensor | None = None) -> "FeatureDensity":
        """Fit the density to the features of training data.

        Args:
            data (DataLoader, Dataset, list of batches or Tensor): Training data. Batches are
                inputs, tuples (inputs, labels) or dicts with "labels".
            labels (Tensor, optional): Labels, if ``data`` is a tensor of inputs. Default None. A
                fit by label ignores the label −100, as PyTorch's losses do.

        Returns:
            The density itself.
        """
        if isinstance(data, Tensor):
            data = TensorDataset(data) if labels is None else TensorDataset(data, labels)
        # without labels, a list of two tensors is two batches
        batches = as_loader(data, self._targets or (None if self.by_label else default_targets))
        known, self._state = [], None
        for batch in batches:
            found: Any = None if self._targets is None else self._targets(batch)
            y = default_targets(batch) if self.by_label and found is None else found
            known.append((self.features(inputs_of(batch, found)), y))
        self.mixture.fit(known, by_label=self.by_label)
        self._state = NetworkState(self._network)
        return self

    def score(self, inputs: Inputs) -> Tensor:
        """Return the log density of the features of ``inputs``, (B,): low for OOD inputs.

        A RuntimeError is raised before ``fit``, or if the model's weights have changed since.
        """
        return self.mixture.log_prob(self.features(inputs))

    def class_scores(self, inputs: Inputs) -> Tensor:
        """Return log p(features, label) of ``inputs`` after a fit by label, (B, C), with labels in
        increasing order."""
        return self.mixture.class_log_prob(self.features(inputs))

    def features(self, inputs: Inputs) -> Tensor:
        """Return the pooled outputs of the layer for a batch of inputs, shape (B, D)."""
        if self._state is not None and not self._state.holds(self._network):
            raise RuntimeError("The model's weights changed after fit(): call fit() again.")
        outputs: list[Any] = []
        with self._network.guarded():
            hook = self.layer.register_forward_hook(lambda module, args, out: outputs.append(out))
            try:
                self._network.outputs(to_device(inputs, self._network.device))
            finally:
                hook.remove()
        if not outputs:
            raise RuntimeError("The layer did not run in the forward pass. Choose one that does.")
        found = tensors_in(outputs[-1])
        if not found or not found[0].is_floating_point() or found[0].ndim == 0:
            what = f"{found[0].dtype} tensor" if found else type(outputs[-1]).__name__
            raise TypeError(f"The layer returns a {what}, not floats (B, ...): choose another one.")
        features = found[0].detach()
        features = features if self.pool is None else self.pool(features)
        if features.ndim == 1:
            return features[:, None]
        return features.flatten(2).mean(2) if features.ndim > 2 else features


def _forward(model: nn.Module, inputs: Inputs) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if is_sequence(inputs) else model(inputs)
