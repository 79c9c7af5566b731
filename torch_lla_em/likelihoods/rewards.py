"""Rewards of candidates side by side: what a network of one reward is to a preference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_lla_em.data import default_forward, default_targets, is_sequence, tensors_in


def compare(model: nn.Module, inputs: Any) -> Tensor:
    """Return one reward per candidate: (B, n) of a tuple of n candidates, (B, 1) of one.

    A dict {"chosen": ..., "rejected": ...} is the tuple of the two.
    """
    if isinstance(inputs, Mapping) and {"chosen", "rejected"} <= inputs.keys():
        inputs = inputs["chosen"], inputs["rejected"]
    candidates = inputs if is_sequence(inputs) else (inputs,)
    return torch.cat([_reward(default_forward(model, each)) for each in candidates], dim=-1)


def preferred(batch: Any) -> Tensor:
    """Return the index of the preferred candidate: the batch's targets, or 0 for "chosen"."""
    if isinstance(batch, Mapping) and "chosen" in batch and "labels" not in batch:
        first = tensors_in(batch["chosen"])[0]
        return torch.zeros(len(first), dtype=torch.long, device=first.device)
    return default_targets(batch)


def _reward(outputs: Tensor) -> Tensor:
    if outputs.dim() == 1:
        return outputs[:, None]
    if outputs.dim() == 2 and outputs.shape[1] == 1:
        return outputs
    raise ValueError(
        f"A reward is one number per row, (B,) or (B, 1), but the network returned "
        f"{tuple(outputs.shape)}. Pass forward_fn=lambda model, candidates: ... that returns "
        "(B, candidates)."
    )
