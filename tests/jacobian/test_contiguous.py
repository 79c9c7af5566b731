"""Linear layers whose inputs are transposed: no product may grow by a factor of the length."""

import pytest
import torch
from allocator import Largest
from jacobians import check, linear_model
from torch import nn

from torch_lla_em.jacobian.network import ContiguousInputs

BATCH, LENGTH, WIDTH = 4, 96, 32
X = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    """Self-attention that transposes before it projects, as ``batch_first`` asks for."""

    def __init__(self, **kind):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, **kind)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0].mean(1)


class Mixer(nn.Module):
    """A linear layer over the tokens, as MLP-Mixer has it."""

    def __init__(self, **kind):
        super().__init__()
        self.tokens = nn.Linear(LENGTH, LENGTH, **kind)

    def forward(self, x):
        return self.tokens(x.transpose(1, 2)).mean(1)


def largest(model, count):
    linear = linear_model(model)
    w = torch.randn(count, linear.layout.size)
    total = torch.zeros_like(w)
    with Largest() as seen, linear.network.guarded():
        rows = linear.at(X)
        rows.pull(rows.push(w), total)
    return seen.numel


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("make", [Attention, Mixer])
def test_no_product_is_taken_row_by_row(make, count, monkeypatch):
    """Without the copies, several columns have a gradient of the weight for every row."""
    torch.manual_seed(0)
    model = make().eval()
    size = largest(model, count)
    monkeypatch.setattr(ContiguousInputs, "_contiguous", lambda self, args, count: args)
    assert size <= largest(model, count) / (3 if count > 1 else 1)
    attention_maps = BATCH * 2 * LENGTH * LENGTH
    weights = sum(p.numel() for p in model.parameters())
    assert size <= count * max(weights, attention_maps)


@pytest.mark.parametrize("make", [Attention, Mixer])
def test_products_are_those_of_the_dense_jacobian(make):
    torch.manual_seed(0)
    check(make(dtype=torch.float64), X.double())
