"""Products in pieces, what the probe must see, when factors are used, and what they keep."""

import pickle
from math import inf

import pytest
import torch
from allocator import Largest
from jacobians import Calls, X, check, linear_model, mlp, prepared, products
from tiny import draw
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from torch_lla_em.jacobian import factors, linearised
from torch_lla_em.jacobian.factors import ByFactors
from torch_lla_em.jacobian.graph import ByGraph


def net(*layers):
    return prepared(nn.Sequential(*layers))


def kept(model, x, selection=None):
    return check(model, x, selection)[1]


def test_large_batches_take_few_columns_at_once():
    """By either way; programs take all columns for any batch, and leave the model as it was."""
    linear, x = linear_model(net(nn.Linear(3, 300), nn.Tanh(), nn.Linear(300, 2))), draw(5_000, 3)
    linear.probe(x[:5])
    known, w, u = linear.ways, draw(7, linear.layout.size), draw(7, len(x), 2)
    expected, steady = products(linear.steady(x), x, w, u), linear.steady(x)
    for _ in range(2):
        assert_close(products(linear, x, w, u), expected)
        with linear.network.guarded():
            assert linear.at(x[:5], 4).columns > 100 and linear.at(x, 4).columns < 4
            assert linear.by_autodiff(x[:5], at_once=3).columns == 3
            for some in (x, x[:1]):
                at = steady.at(some, 4)
                assert type(at) is ByGraph and at.columns is None
        assert linear.ways == known
        linear.leave_factors()
        known = known._replace(names=())


def test_a_first_batch_of_zeros_is_no_verdict():
    layers = {"layer": nn.Linear(2, 3, bias=False), "head": nn.Linear(3, 2, bias=False)}
    linear = linear_model(prepared(Calls(lambda m, x: m.head(F.relu(m.layer(x))), **layers)))
    assert linear.probe(torch.zeros(4, 2).double()) is None and linear.ways is None
    assert linear.probe(draw(4, 2)).names and linear.ways is not None


def test_weights_are_never_kept():
    linear = linear_model(mlp())
    linear.probe(X)
    with torch.no_grad():
        linear.network.module[0].weight += 1  # between two blocks nothing is kept
    parameters = nn.utils.parameters_to_vector(linear.network.module.parameters())
    assert torch.equal(linear.w_MAP, parameters)
    again, w = pickle.loads(pickle.dumps(linear)), draw(2, linear.layout.size)
    with again.network.guarded():
        assert_close(again.by_autodiff(X).push(w), again.at(X, 9).push(w))


def test_what_is_kept_shares_no_memory():
    """The inputs of a head are often a part of a larger tensor, as of the first token."""
    model = Calls(lambda m, x: m.head(m.body(x)[:, 0]), body=nn.Linear(3, 4), head=nn.Linear(4, 2))
    at = kept(prepared(model), draw(4, 5, 3), "last_layer")
    held = [t for part in at.parts for t in part if isinstance(t, torch.Tensor)]
    assert held and all(t.untyped_storage().nbytes() == t.nbytes for t in held)
    assert at.nbytes == 8 * 4 * (4 + 2)


@pytest.mark.parametrize("layer", [nn.Linear(3, 2), nn.Conv1d(3, 30, 3)], ids=str)
def test_squares_of_single_rows_in_pieces(layer, monkeypatch):
    """The same with the gradients of one row at a time."""
    monkeypatch.setattr(factors, "_NUMBERS", 1)
    x = draw(4, 2, 3) if isinstance(layer, nn.Linear) else draw(4, 3, 3)
    assert kept(net(layer, nn.Tanh(), nn.Flatten()), x)


def test_a_weight_that_acts_otherwise_later_is_left_to_torch_func():
    class Net(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + (self[0].weight.sum() if x.sum() > 0 else 0)

    model = prepared(Net(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    linear, x = linear_model(model), -draw(4, 3).abs()
    linear.probe(x)
    with linear.network.guarded():
        assert isinstance(linear.at(x, inf, keep=True), ByFactors)
        assert isinstance(linear.at(-x, inf, keep=True), ByGraph)
    linear, x = linear_model(net(nn.Linear(3, 2))), draw(4, 3).requires_grad_()
    linear.probe(x.detach())
    with linear.network.guarded(), torch.enable_grad():
        assert isinstance(linear.at(x, inf, keep=True), ByGraph)


BATCH, LENGTH, WIDTH = 4, 96, 32
SEQUENCES = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
TRANSPOSED = {  # self-attention that transposes before it projects; a layer over tokens
    "attention": lambda **kind: Calls(
        lambda m, x: m.a(x, x, x, need_weights=False)[0].mean(1),
        a=nn.MultiheadAttention(WIDTH, 2, batch_first=True, **kind),
    ),
    "mixer": lambda **kind: Calls(
        lambda m, x: m.a(x.transpose(1, 2)).mean(1), a=nn.Linear(LENGTH, LENGTH, **kind)
    ),
}


def largest(model, count):
    linear = linear_model(model).steady(SEQUENCES)
    w = torch.randn(count, linear.layout.size)
    total = torch.zeros_like(w)
    with Largest() as seen, linear.network.guarded():
        at = linear.at(SEQUENCES)
        at.pull(at.push(w)).added_to(total)
    return seen.numel


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", TRANSPOSED)
def test_no_product_is_taken_row_by_row(name, count, monkeypatch):
    """Without the copies, several columns have a gradient of the weight for every row."""
    torch.manual_seed(0)
    model = TRANSPOSED[name]().eval()
    size = largest(model, count)
    plain = lambda func, args, kwargs: func(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(linearised, "as_in_training", plain)
    assert size <= largest(model, count) / (3 if count > 1 else 1)
    attention_maps = BATCH * 2 * LENGTH * LENGTH
    assert size <= count * max(sum(p.numel() for p in model.parameters()), attention_maps)
    monkeypatch.undo()
    if count == 1:
        check(TRANSPOSED[name](dtype=torch.float64), SEQUENCES.double())
