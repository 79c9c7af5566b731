"""Sums that tell a tensor of weights from any other, at no memory of its size."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 18


class WeightSums:
    """‖p‖ and Σ c_i p_i by chunks, no two c_i alike: signs and changes of places show in these."""

    def __init__(self) -> None:
        self._known: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def of(self, parameter: Tensor) -> Tensor:
        """Return ‖p‖ and the sum of every chunk, where the parameter is."""
        values = _in_memory_order(parameter.detach())
        dtype = torch.promote_types(values.dtype, torch.float32)
        c = self._factors(min(_CHUNK, len(values)), dtype, values.device)
        # not by dot, whose order of summation another stream may change on a card
        sums = [(chunk.to(dtype) * c[: len(chunk)]).sum() for chunk in values.split(_CHUNK)]
        return torch.stack([values.norm().to(dtype), *sums])

    def _factors(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return at least so many numbers between 0 and 1, made once."""
        known = self._known.get((device, dtype))
        if known is None or len(known) < count:
            places = torch.arange(1, 1 + count, device=device).double()
            known = self._known[device, dtype] = (places * 0.618034).frac().to(dtype)
        return known


def _in_memory_order(parameter: Tensor) -> Tensor:
    """Return all entries in one row, without a copy unless they have gaps."""
    if parameter.is_complex():
        parameter = torch.view_as_real(parameter)
    places = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    return parameter.permute(places).flatten()
