"""Makes inputs of linear layers contiguous, for which derivatives are fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class ContiguousInputs(TorchFunctionMode):
    """Copies inputs of linear layers that are not contiguous.

    ``torch.func`` multiplies a contiguous (B, L, E) by the weight in one product. For other layouts,
    such as the transposed outputs of attention, it takes one product for each of the B or L entries,
    and a gradient of the weight's size for each. For a ViT this takes four to six times as long.
    """

    def __init__(self) -> None:
        super().__init__()
        self.needed = False
        """Whether anything had to be copied."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear:
            args = self._contiguous(args, 1)
        elif func is F.multi_head_attention_forward:  # what it calls in turn goes by unseen
            args = self._contiguous(args, 3)
        return func(*args, **(kwargs or {}))

    def _contiguous(self, args: tuple[Any, ...], count: int) -> tuple[Any, ...]:
        """Return the first ``count`` arguments as contiguous tensors; equal arguments stay one tensor."""
        copies: dict[int, Any] = {}
        for tensor in args[:count]:
            if tensor.dim() > 2 and not tensor.is_contiguous():
                copies.setdefault(id(tensor), tensor.contiguous())
        self.needed = self.needed or bool(copies)
        return tuple(copies.get(id(argument), argument) for argument in args)
