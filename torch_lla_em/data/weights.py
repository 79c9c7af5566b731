"""Batches whose examples have weights, which travel beside their targets in one tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torch_lla_em.data.batch import TargetFn, as_targets, default_targets, inputs_of
from torch_lla_em.data.sources import as_loader, is_pair


class Weighed:
    """A loader that yields (inputs, targets with their weights)."""

    def __init__(
        self,
        loader: Any,
        weights: Tensor | str | Callable[[Tensor], Tensor],
        target_fn: TargetFn | None,
    ):
        if isinstance(weights, str) and weights != "last":
            raise ValueError(
                f'weights={weights!r}: pass "last" where batches end with their weights, a tensor '
                "beside inputs and targets, or a function of the targets."
            )
        if not (callable(weights) or isinstance(weights, str)):
            # fit(x, y) comes as one batch
            loader = loader[0] if isinstance(loader, list) and len(loader) == 1 else loader
            if not is_pair(loader):
                raise TypeError(
                    "A tensor of weights goes with inputs and targets: fit(x, y, weights=w). For a "
                    'loader, have batches end with their weights and pass weights="last".'
                )
            loader, weights = [(*loader, torch.as_tensor(weights, device="cpu"))], "last"
        self._loader, self._weights, self._target_fn = as_loader(loader), weights, target_fn
        self.loaders = (self._loader,)
        """Where the generators of its order are."""

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        for batch in self._loader:
            weights = self._weights
            if not callable(weights):
                if not isinstance(batch, (tuple, list)) or len(batch) < 3:
                    raise TypeError(
                        'With weights="last" batches are (inputs, targets, weights), not a '
                        f"{type(batch).__name__}."
                    )
                *batch, weights = batch
            given = None if self._target_fn is None else self._target_fn(batch)
            y = as_targets(default_targets(batch) if given is None else given)
            yield inputs_of(batch, given), _packed(y, weights(y) if callable(weights) else weights)

    def __deepcopy__(self, memo: dict[int, Any]) -> Weighed:
        return self

    def __reduce__(self) -> tuple[type[tuple], tuple[tuple[()]]]:
        """Leave the data out of pickles."""
        return tuple, ((),)


def _packed(y: Tensor, weights: Any) -> Tensor:
    """Return targets and weights, (*y.shape, 2), in double precision, which holds any label."""
    w = torch.as_tensor(weights, dtype=torch.float64, device=y.device)
    if w.shape not in (y.shape, y.shape[:1]):
        raise ValueError(
            f"The weights have shape {tuple(w.shape)}, but the targets {tuple(y.shape)}: pass one "
            "weight for each example, or for each label."
        )
    if not (torch.isfinite(w).all() and (w >= 0).all()):
        raise ValueError("Weights must be finite and not negative.")
    w = w.reshape(*w.shape, *(1,) * (y.dim() - w.dim())).expand(y.shape)
    return torch.stack([y.double(), w], -1)
