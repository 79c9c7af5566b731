"""Attention of our own gives torch's numbers, with one softmax for all columns."""

import pytest
import torch
from jacobians import (
    Written,
    check,
    check_bfloat16,
    choices,
    drawn,
    linear_model,
    prepared,
    shared_pass,
)
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.own_attention import OwnAttention
from torch_lla_em.jacobian.own_tangents import OwnTangents

pytestmark = pytest.mark.usefixtures("own_tangents_at_any_size")

WIDTH, X = 4, (2, 5, 4)
# the second query sees nothing
SEEN = torch.ones(3, 5, dtype=torch.bool).tril(1)
SEEN[1] = False
# of the two tokens in a row, where the others are rows
PADDING = torch.tensor(
    [[False, False], [False, True], [False, True], [False, False], [False, False]]
)


class Attention(nn.Module):
    """Queries of the first tokens to all, with what ``scaled_dot_product_attention`` may be told."""

    def __init__(self, queries=3, heads=2, **how):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.queries, self.heads, self.how = queries, heads, how

    def forward(self, x):
        q, k, v = self.q(x[:, : self.queries]), self.k(x), self.v(x)
        if self.heads:
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, **self.how)
        return y.transpose(1, 2).flatten(-2).mean(1) if self.heads else y.mean(1)


class SharedKeys(Attention):
    """Two heads of queries for one of keys and values."""

    def forward(self, x):
        q, k, v = (
            self.q(x).unflatten(-1, (2, 2)).transpose(1, 2),
            self.k(x)[..., :2],
            self.v(x)[..., :2],
        )
        y = F.scaled_dot_product_attention(q, k[:, None], v[:, None], enable_gqa=True)
        return y.mean((1, 2))


class Biased(Attention):
    """With a bias of the scores that is learnt."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(3, 5))

    def forward(self, x):
        self.how = {"attn_mask": self.bias}
        return super().forward(x)


class ToItself(nn.Module):
    def __init__(self, how=None, **kind):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, **kind)
        self.how = {"need_weights": False} if how is None else how

    def forward(self, x):
        return self.attention(x, x, x, **self.how)[0].mean(1)


class ToOthers(ToItself):
    def forward(self, x):
        return self.attention(x[:, :2], x, x, **self.how)[0].mean(1)


OURS = {
    "plain": Attention,
    "causal": lambda: Attention(is_causal=True),
    "scaled": lambda: Attention(scale=0.7),
    "masked": lambda: Attention(attn_mask=SEEN),
    "added to": lambda: Attention(attn_mask=drawn(2, 1, 3, 5)),
    "learnt bias": Biased,
    "no heads": lambda: Attention(heads=0),
    "layer": lambda: ToItself(batch_first=True),
    "layer, tokens first": ToItself,
    "layer, no bias": lambda: ToItself(bias=False),
    "encoder": lambda: nn.Sequential(
        nn.TransformerEncoderLayer(WIDTH, 2, 6, batch_first=True), nn.Flatten(), nn.Linear(20, 2)
    ),
}
TORCHS = {
    "shared keys": SharedKeys,
    "layer, weights": lambda: ToItself({}),
    "layer, to others": lambda: ToOthers(batch_first=True),
    "layer, masked": lambda: ToItself({"need_weights": False, "key_padding_mask": PADDING}),
    "layer, zeros": lambda: ToItself(add_zero_attn=True),
    "layer, keys of another width": lambda: ToItself(kdim=WIDTH, vdim=WIDTH, add_bias_kv=True),
}


@pytest.mark.parametrize("name", [*OURS, *TORCHS])
def test_products_are_those_of_the_dense_jacobian(name):
    make = {**OURS, **TORCHS}[name]
    for names in choices(make()):
        report = check(prepared(make()), drawn(*X), names)
        assert report.path.forward and not report.unbatched
        assert report.path.shared or report.last_layer


@pytest.mark.parametrize("name", [*OURS, *TORCHS])
def test_outputs_are_torchs(name):
    model = prepared({**OURS, **TORCHS}[name]())
    network = Network(model)
    with network.guarded():
        assert_close(network.call(drawn(*X)), model(drawn(*X)))
    assert model(drawn(*X)).isfinite().all()


@pytest.mark.parametrize("name", [*OURS, *TORCHS])
def test_ours_is_used_where_torchs_is_told_nothing_special(name):
    model = prepared({**OURS, **TORCHS}[name]())
    linear = linear_model(model, [name for name, _ in model.named_parameters()])
    linear.probe(drawn(*X))
    assert linear.network.own_tangents.allowed
    assert (F.scaled_dot_product_attention in linear.network.own_tangents.used) == (name in OURS)


def test_less_is_written():
    model, numbers = prepared(ToItself()), {}
    for allowed in (True, False):
        linear = linear_model(model)
        linear.network.own_tangents.allowed = allowed
        w = torch.randn(20, linear.layout.size).double()
        with linear.network.guarded(), Written() as seen:
            linear.jvp(drawn(2, 9, WIDTH), w)
        numbers[allowed] = seen.numbers
    assert numbers[True] < 0.7 * numbers[False], numbers


def test_tangents_of_a_shared_pass_are_in_no_graph():
    f, tangent, network = shared_pass(prepared(ToItself()), drawn(*X))
    assert f.requires_grad and not tangent.requires_grad
    assert F.scaled_dot_product_attention in network.own_tangents.used


@pytest.mark.parametrize("name", ["plain", "layer"])
def test_bfloat16_products_are_near(name):
    check_bfloat16(prepared(OURS[name]()).float(), drawn(*X).float())


def test_gradients_in_the_inputs_are_torchs():
    model, gradients = prepared(ToItself()), []
    linear = linear_model(model)
    w = torch.randn(3, linear.layout.size, generator=torch.Generator().manual_seed(0)).double()
    for linear.network.own_tangents.allowed in (True, False):
        x = drawn(*X).requires_grad_()
        with linear.network.guarded(), torch.enable_grad():
            linear.jvp(x, w)[1].square().sum().backward()
        gradients.append(x.grad)
    assert_close(*gradients)


def test_attention_that_drops_is_torchs():
    network = Network(prepared(Attention(dropout_p=0.5)))
    with network.guarded(), torch.random.fork_rng():
        torch.manual_seed(0)
        f = network.call(drawn(*X))
        torch.manual_seed(0)
        assert torch.equal(f, network.module(drawn(*X)))
        assert not torch.equal(f, network.call(drawn(*X)))


def test_short_attention_is_torchs(monkeypatch):
    """And that of narrow layers."""
    monkeypatch.setattr("torch_lla_em.jacobian.own_attention._LEAST_SCORES", 3 * 8)
    monkeypatch.setattr("torch_lla_em.jacobian.own_attention._LEAST_WIDTH", WIDTH + 1)
    for length, expected in ((7, False), (8, True)):
        linear = linear_model(prepared(Attention()))
        linear.probe(drawn(2, length, WIDTH))
        assert (F.scaled_dot_product_attention in linear.network.own_tangents.used) == expected
    assert OwnAttention(OwnTangents()).forward_of(nn.MultiheadAttention(WIDTH, 2)) is None
    assert OwnAttention(OwnTangents()).forward_of(nn.MultiheadAttention(2 * WIDTH, 2))


def test_another_layer_keeps_its_forward():
    class Scaled(nn.MultiheadAttention):
        def forward(self, *args, **kwargs):
            y, weights = super().forward(*args, **kwargs)
            return 2 * y, weights

    model = prepared(ToItself())
    model.attention.__class__ = Scaled
    report = check(model, drawn(*X))
    assert report.path.forward
