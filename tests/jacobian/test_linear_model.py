"""Products of the linear model in pieces, what the probe must see, and inputs that are transposed."""

import pickle

import pytest
import torch
from allocator import Largest
from jacobians import X, check, linear_model, mlp, prepared, products
from tiny import draw
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from torch_lla_em.jacobian import rows


def test_large_batches_take_few_columns_at_once():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2)).double()
    linear, x = linear_model(model), torch.randn(10_000, 3).double()
    linear.probe(x[:5])
    linear.leave_factors()
    w, u = torch.randn(7, linear.layout.size).double(), torch.randn(7, len(x), 2).double()
    with linear.network.guarded():
        assert linear.at(x[:5]).columns > 1000 and linear.at(x).columns == 5
        assert linear.by_autodiff(x, at_once=3).columns == 3
    for few, all_at_once in zip(products(linear, x, w, u), products(linear.steady(x), x, w, u)):
        assert_close(few, all_at_once)


class Dead(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False)

    def forward(self, x):
        return self.head(F.relu(self.layer(x)))


def test_a_first_batch_of_zeros_is_no_verdict():
    linear = linear_model(prepared(Dead()))
    assert linear.probe(torch.zeros(4, 2).double()) is None and linear.report is None
    assert linear.probe(draw(4, 2)).names and linear.report is not None


def test_it_is_asked_for_again_elsewhere_and_when_forgotten():
    linear = linear_model(mlp())
    linear.probe(X)
    assert linear.report is not None
    linear.forget()
    assert linear.report is None
    linear.probe(X)
    with torch.no_grad():
        linear.network.module[0].weight += 1  # between two blocks nothing is kept
    parameters = nn.utils.parameters_to_vector(linear.network.module.parameters())
    assert torch.equal(linear.w_MAP, parameters)
    linear.network.module.float()
    assert linear.report is None and linear.probe(X.float()) is linear.report


def test_copies_are_the_same():
    linear = linear_model(mlp())
    w = draw(2, linear.layout.size)
    linear.probe(X)
    for model in (linear, pickle.loads(pickle.dumps(linear))):
        with model.network.guarded():
            assert_close(model.by_autodiff(X).push(w), model.at(X, 9).push(w))


ACTIVATIONS = nn.Tanh(), nn.ReLU(), nn.Sigmoid(), nn.GELU(), nn.Softplus(), nn.Dropout()


@pytest.mark.parametrize(
    "activation", [*ACTIVATIONS, nn.ReLU(inplace=True), nn.Softmax(-1)], ids=str
)
def test_few_rows_of_a_plain_network_need_no_backward_pass(activation):
    """J w is carried along; functions that are not known, or write to what is known, are left to others."""
    model, backward = mlp(activation, nn.Linear(2, 3, bias=False)), []
    linear = linear_model(prepared(model), ["0.weight", "4.*", "6.weight"])
    linear.probe(X)

    def see(layer, given, f):
        if f.requires_grad:
            f.register_hook(backward.append)

    model.register_forward_hook(see)
    w = draw(5, linear.layout.size)
    with linear.network.guarded():
        f, Jw = linear.push(X, w[:2], w[2:])
        assert bool(backward) == (activation not in ACTIVATIONS)
        rows = linear.by_autodiff(X)
        assert_close((f, Jw), (rows.f, rows.push(w)))


BATCH, LENGTH, WIDTH = 4, 96, 32
SEQUENCES = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


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
    linear.probe(SEQUENCES)
    linear.leave_factors()
    linear = linear.steady(SEQUENCES)
    with Largest() as seen, linear.network.guarded():
        at = linear.at(SEQUENCES)
        at.pull(at.push(w), total)
    return seen.numel


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("make", [Attention, Mixer])
def test_no_product_is_taken_row_by_row(make, count, monkeypatch):
    """Without the copies, several columns have a gradient of the weight for every row."""
    torch.manual_seed(0)
    model = make().eval()
    size = largest(model, count)
    monkeypatch.setattr(rows, "contiguous", lambda func, args, kwargs: func(*args, **kwargs))
    assert size <= largest(model, count) / (3 if count > 1 else 1)
    attention_maps = BATCH * 2 * LENGTH * LENGTH
    weights = sum(p.numel() for p in model.parameters())
    assert size <= count * max(weights, attention_maps)
    monkeypatch.undo()
    if count == 1:
        check(make(dtype=torch.float64), SEQUENCES.double())
