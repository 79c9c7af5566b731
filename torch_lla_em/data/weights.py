"""Weights of examples: how users pass them, and those of one batch."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

Weights = str | Callable[[Tensor], Tensor]
"""Where the weights of a batch come from: "last", its last entry; or a function of its targets."""


def with_weights(loader: Any, weights: Any) -> tuple[Any, Weights]:
    """Return a loader and where its weights come from, for the ``weights`` of a user."""
    if callable(weights) or (isinstance(weights, str) and weights == "last"):
        return loader, weights
    if isinstance(weights, Real):
        number = float(weights)
        return loader, lambda y: torch.full(y.shape[:1], number, device=y.device)
    # fit(x, y) passes a list of one batch
    loader = loader[0] if isinstance(loader, list) and len(loader) == 1 else loader
    if isinstance(weights, str) or not is_pair(loader):
        raise TypeError(
            f"weights are {type(weights).__name__} {weights if isinstance(weights, str) else ''!r}: pass a tensor "
            'together with tensors of inputs and targets, fit(x, y, weights=w); or "last" for a loader of '
            "batches (inputs, targets, weights); or a function of the targets."
        )
    return [(*loader, torch.as_tensor(weights, device="cpu"))], "last"


def without_weights(batch: Any, weights: Weights | None) -> tuple[Any, Any]:
    """Return a batch of a loader without the weights at its end, and these, or None."""
    if weights != "last":
        return batch, None
    if not isinstance(batch, (tuple, list)) or len(batch) < 3:
        raise TypeError(
            'With weights="last" batches are (inputs, targets, weights), not a '
            f"{type(batch).__name__}."
        )
    return tuple(batch[:-1]), batch[-1]


def checked_weights(given: Any, targets: Tensor) -> Tensor:
    """Return weights in float64, with the shape of the targets, or one for each example."""
    w = torch.as_tensor(given, dtype=torch.float64, device=targets.device)
    if w.shape not in (targets.shape, targets.shape[:1]):
        raise ValueError(
            f"The weights have shape {tuple(w.shape)}, but the targets {tuple(targets.shape)}: pass "
            "one weight for each example, or for each label."
        )
    if not (torch.isfinite(w).all() and (w >= 0).all()):
        raise ValueError("Weights must be finite and not negative.")
    return w


def is_pair(data: Any) -> bool:
    """Whether this is (X, y): a list of two batches without targets cannot be fitted."""
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        return False
    arrays = all(isinstance(p, Tensor | np.ndarray) or hasattr(p, "to_numpy") for p in data)
    return arrays and all(part.ndim for part in data) and len(data[0]) == len(data[1])
