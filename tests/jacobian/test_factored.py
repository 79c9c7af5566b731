"""What factors of J keep, when they are not used, and what squares of single rows they give."""

import pytest
import torch
from jacobians import Calls, check, linear_model, prepared
from tiny import draw
from torch import nn

from torch_lla_em.jacobian import factors
from torch_lla_em.jacobian.factors import ByFactors
from torch_lla_em.jacobian.rows import ByAutodiff


def net(*layers):
    return prepared(nn.Sequential(*layers))


def kept(model, x, selection=None, class_dim=-1):
    return check(model, x, selection, class_dim=class_dim)[1]


def test_what_is_kept():
    """The inputs of layers, and the derivatives of outputs; J itself of kernels at many places."""
    layers = nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Linear(5, 4, bias=False)
    rows = kept(net(*layers, nn.SELU(inplace=True), nn.Linear(4, 2)), draw(6, 3))
    assert rows.nbytes == sum(8 * 6 * n for n in (2, 3 + 2 * 5, 5 + 2 * 4, 4))
    rows = kept(net(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2)), draw(4, 3), "last_layer")
    assert rows.nbytes == 8 * 4 * (40 + 2)
    maps = nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.AvgPool2d(6), nn.Flatten()
    (dense,) = kept(net(*maps), draw(4, 1, 6, 6)).parts
    assert dense.J.shape == (4, 2, 20)
    head = net(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 200))  # as that of a language model
    assert kept(head, draw(2, 3, 3), "last_layer").nbytes == 8 * 2 * 3 * (4 + 200)


def test_what_is_kept_holds_no_other_memory():
    """The inputs of a head are often a part of a larger tensor, as of the first token."""
    model = prepared(
        Calls(lambda m, x: m.head(m.body(x)[:, 0]), body=nn.Linear(3, 4), head=nn.Linear(4, 2))
    )
    rows = kept(model, draw(4, 5, 3), "last_layer")
    held = [t for part in rows.parts for t in part if isinstance(t, torch.Tensor)]
    assert held and all(t.untyped_storage().nbytes() == t.nbytes for t in held)


@pytest.mark.parametrize("kind", ["rows", "kernel"])
def test_squares_of_single_rows_in_pieces(kind, monkeypatch):
    """The same with the gradients of one row at a time."""
    monkeypatch.setattr(factors, "_NUMBERS", 1)
    layer = nn.Linear(3, 2) if kind == "rows" else nn.Conv1d(3, 30, 3)
    x = draw(4, 2, 3) if kind == "rows" else draw(4, 3, 3)
    assert kept(net(layer, nn.Tanh(), nn.Flatten()), x)


def test_a_weight_that_acts_otherwise_later_is_left_to_torch_func():
    class Net(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + (self[0].weight.sum() if x.sum() > 0 else 0)

    model = prepared(Net(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    linear, x = linear_model(model), -draw(4, 3).abs()
    linear.probe(x)
    with linear.network.guarded():
        assert isinstance(linear.at(x, 0, keep=True), ByFactors)
        assert isinstance(linear.at(-x, 0, keep=True), ByAutodiff)
    linear, x = linear_model(net(nn.Linear(3, 2))), draw(4, 3).requires_grad_()
    linear.probe(x.detach())
    with linear.network.guarded(), torch.enable_grad():
        assert isinstance(linear.at(x, 0, keep=True), ByAutodiff)


def test_a_steady_model_takes_all_columns_for_any_batch():
    model = nn.Sequential(nn.Linear(3, 3000), nn.Tanh(), nn.Linear(3000, 2)).double()
    linear, x = linear_model(model), draw(400, 3)
    linear.probe(x)
    with linear.network.guarded():
        known = linear.by_autodiff(x), linear.report
        assert known[0].columns < linear.by_autodiff(x[:1]).columns
        assert linear.at(x, 4).columns < linear.at(x[:1], 4).columns
        for some in (x, x[:1]):
            rows = linear.steady(x).at(some, 4)
            assert type(rows) is ByAutodiff and rows.columns is None
    assert linear.report == known[1]
