"""Products of the linear model in pieces, what the probe must see, and inputs that are transposed."""

import copy
import pickle

import pytest
import torch
from allocator import Largest
from jacobians import X, check, linear_model, mlp, prepared, products
from tiny import draw
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from torch_lla_em.jacobian.network import ContiguousInputs


def test_large_outputs_are_pulled_one_by_one(monkeypatch):
    """Where temporaries of few columns are large, only J w takes several at once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2)).double()
    linear, x = linear_model(model), torch.randn(10_000, 3).double()
    linear.probe(x[:5])
    linear.leave_factors()
    w, u = torch.randn(3, linear.layout.size).double(), torch.randn(3, len(x), 2).double()
    with linear.network.guarded():
        few, many = linear.at(x[:5]), linear.at(x)
        assert min(few.pushed, few.pulled) > 8 and many.pulled == 1 and many.pushed in range(2, 9)
    found = products(linear, x, w, u)
    linear._report = linear._report._replace(example_bytes=None)
    for one_by_one, at_once in zip(found, products(linear, x, w, u)):
        assert_close(one_by_one, at_once)


def test_the_last_layer_may_not_be_the_output():
    norm = nn.LayerNorm(2, elementwise_affine=False)
    for after in (nn.Softmax(-1), nn.ReLU(inplace=True), nn.Unflatten(-1, (2, 1)), norm):
        assert check(mlp(after), X, ["4.*"]).names

    class Overwrites(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = mlp()[:4], nn.Linear(4, 4)

        def forward(self, x):
            h = self.body(x)
            out = self.head(h)
            h.zero_()
            return out

    check(Overwrites().double(), X, ["head.bias"])


class Dead(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False)

    def forward(self, x):
        return self.head(F.relu(self.layer(x)))


def test_a_first_batch_of_zeros_is_no_verdict():
    linear = linear_model(prepared(Dead()))
    assert linear.probe(torch.zeros(4, 2).double()) is None and linear.report is None
    assert linear.probe(draw(4, 2)).forward and linear.report is not None


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


def test_a_network_made_in_inference_mode_says_what_to_do():
    with torch.inference_mode():
        model = nn.Linear(3, 2).double()
    with pytest.raises(ValueError, match="inference_mode.*copy.deepcopy"):
        linear_model(model)
    linear_model(copy.deepcopy(model)).probe(X)


def test_copies_hold_no_data_and_are_probed_when_they_need_to_be():
    linear = linear_model(mlp())
    linear.probe(X, needs_path=False)
    assert linear.report.forward is None and linear.factored
    again = pickle.loads(pickle.dumps(linear))
    assert not any(X.shape == getattr(value, "shape", None) for value in vars(again).values())
    w = draw(2, linear.layout.size)
    for model in (linear, again):
        with model.network.guarded():
            assert_close(model.by_autodiff(X).push(w), linear.at(X, 9).push(w))
        assert model.report.forward


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
    with Largest() as seen, linear.network.guarded():
        rows = linear.at(SEQUENCES)
        rows.pull(rows.push(w), total)
    return seen.numel


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("make", [Attention, Mixer])
def test_no_product_is_taken_row_by_row(make, count, monkeypatch):
    """Without the copies, several columns have a gradient of the weight for every row."""
    torch.manual_seed(0)
    model = make().eval()
    size = largest(model, count)
    monkeypatch.setattr(
        ContiguousInputs, "__torch_function__", lambda s, f, t, a=(), k=None: f(*a, **(k or {}))
    )
    assert size <= largest(model, count) / (3 if count > 1 else 1)
    attention_maps = BATCH * 2 * LENGTH * LENGTH
    weights = sum(p.numel() for p in model.parameters())
    assert size <= count * max(weights, attention_maps)
    monkeypatch.undo()
    if count == 1:
        check(make(dtype=torch.float64), SEQUENCES.double())


class Sometimes(nn.Sequential):
    def forward(self, x):
        with torch.set_grad_enabled(bool(x.sum() > 0)):
            return super().forward(x)


def test_a_later_batch_without_derivatives_raises():
    linear, x = linear_model(prepared(Sometimes(nn.Linear(2, 3), nn.Tanh()))), draw(4, 2).abs()
    linear.probe(x)
    with linear.network.guarded(), pytest.raises(NotImplementedError, match="unlike those of earl"):
        rows = linear.at(-x, 9)
        rows.pull(rows.f[None], torch.zeros(1, linear.layout.size).double())
