"""What is wrong with inputs that a network fails on, in the words of its user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from torch_lla_em.data import tensors_in
from torch_lla_em.jacobian.network import Network


@contextmanager
def explained(network: Network, x: Any) -> Iterator[None]:
    """Raise a TypeError with the remedy where a network fails on inputs of another dtype."""
    try:
        yield
    except RuntimeError as error:
        own = {p.dtype for p in network.module.parameters() if p.is_floating_point()}
        given = {tensor.dtype for tensor in tensors_in(x)} - own
        words = str(error).splitlines()[0] if str(error) else ""
        if len(own) != 1 or not given or "type" not in words:
            raise
        dtype = own.pop()
        raise TypeError(
            f"The inputs are {', '.join(sorted(map(str, given)))}, but the network's weights are "
            f"{dtype}, and the forward pass failed ({words}). Convert the inputs: x.to({dtype}), "
            f"or for arrays x.astype({str(dtype).removeprefix('torch.')!r})."
        ) from error


def require_rows(f: Tensor, x: Any) -> None:
    """Raise an error for the outputs of a single example; one number per example, (B,), is fine."""
    flat = any(t.dim() > 1 and len(t) == len(f) for t in tensors_in(x)) if f.dim() == 1 else False
    if f.dim() < 2 and not flat:
        raise ValueError(
            f"The network returned outputs of shape {tuple(f.shape)} for these inputs, but "
            "predictions are for batches of examples, with outputs (B, ..., C): for a single "
            "example pass x[None]."
        )
