"""Inputs as people pass them, pushed through the linear model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from torch_lla_em.data import as_loader, inputs_of, map_tensors, tensors_in, to_device
from torch_lla_em.jacobian import LinearModel, explained, require_rows


def push_forward(linear_model: LinearModel, x: Any, *w: Tensor) -> tuple[Tensor, Tensor]:
    """Return f(x), shape (B, ..., C), and J(x) w, (K, B, ..., C); differentiable in x, if asked.

    Vectors come in one block or several, so that none are copied to lie beside each other. A
    DataLoader or a Dataset is run through, batch by batch, and its targets are left out.
    """
    if isinstance(x, (DataLoader, Dataset)):
        parts = [push_forward(linear_model, inputs_of(batch), *w) for batch in as_loader(x)]
        outputs, products = zip(*parts)
        return torch.cat(outputs), torch.cat(products, dim=1)
    network = linear_model.network
    x = to_device(inputs_of(x) if isinstance(x, Mapping) else x, network.device)
    tensors = tensors_in(x)
    differentiate = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    with explained(network, x), torch.set_grad_enabled(differentiate):
        if tensors and tensors[0].dim() and not len(tensors[0]):
            return _of_no_rows(linear_model, x, w)
        try:
            if linear_model.report is None:
                linear_model.probe(map_tensors(Tensor.detach, x))
            with network.guarded(), torch.set_grad_enabled(differentiate):
                rows = linear_model.at(x, sum(map(len, w)), pulls=False)
                Jw = torch.cat([rows.push(block) for block in w])
                f = rows.f
        except RuntimeError:  # perhaps of a single example
            with network.guarded():
                require_rows(linear_model.outputs(x), x)
            raise
        require_rows(f, x)
        return f, Jw


def _of_no_rows(linear_model: LinearModel, x: Any, w: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return outputs for no examples, (0, ..., C), and as many columns of nothing."""
    with linear_model.network.guarded():
        f = linear_model.outputs(x)
    return f, f.new_zeros(sum(map(len, w)), *f.shape)
