"""Inputs as people pass them, pushed through the linear model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from torch_lla_em.data import as_loader, inputs_of, map_tensors, tensors_in, to_device
from torch_lla_em.jacobian import LinearModel


def push_forward(linear_model: LinearModel, x: Any, *w: Tensor) -> tuple[Tensor, Tensor]:
    """Return f(x), shape (B, ..., C), and J(x) w, (K, B, ..., C); differentiable in x, if asked.

    Vectors come in one block or several, so that none are copied to lie beside each other. A
    DataLoader or a Dataset is run through, batch by batch, and its targets are left out.
    """
    if isinstance(x, (DataLoader, Dataset)):
        parts = [push_forward(linear_model, inputs_of(batch), *w) for batch in as_loader(x)]
        f, Jw = zip(*parts)
        return torch.cat(f), torch.cat(Jw, dim=1)
    network = linear_model.network
    x = to_device(inputs_of(x) if isinstance(x, Mapping) else x, network.device)
    differentiate = torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(x))
    try:
        if linear_model.report is None:
            linear_model.probe(map_tensors(Tensor.detach, x))
        with network.guarded(), torch.set_grad_enabled(differentiate):
            prepared = linear_model.prepare(x, sum(map(len, w)))
            products = [linear_model.jvp(prepared, block) for block in w]
            return products[0][0], torch.cat([Jw for _, Jw in products])
    except RuntimeError as error:
        _explain_dtype(error, x, network.module)
        raise


def _explain_dtype(error: RuntimeError, x: Any, module: nn.Module) -> None:
    """Raise with what to do where inputs are of another precision than all weights."""
    own = {p.dtype for p in module.parameters() if p.is_floating_point()}
    other = {t.dtype for t in tensors_in(x) if t.is_floating_point()} - own
    if other and len(own) == 1:
        raise TypeError(
            f"The inputs are {other.pop()}, but the network's weights {(*own,)[0]}, and it failed "
            f"({str(error).splitlines()[0]}): pass inputs of the weights' dtype."
        ) from error
