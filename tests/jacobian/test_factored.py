"""Jacobians by factors against those of torch.func, in float64."""

import pytest
import torch
from jacobians import linear_model, prepared
from models import Centred
from tiny import draw
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.testing import assert_close

from torch_lla_em.jacobian import factors, recorded
from torch_lla_em.jacobian.factors import ByFactors
from torch_lla_em.jacobian.rows import ByAutodiff


def agree(model, x, selection=None, class_dim=-1, batches=()):
    """Compare products by factors with torch.func's; return the factors."""
    linear = linear_model(model, selection, class_dim=class_dim)
    assert linear.probe(x).names
    for example_bytes in (None, 1 << 40):  # backward passes of all outputs together, or of one
        linear._report = linear._report._replace(example_bytes=example_bytes)
        for batch in (x, *batches):
            with linear.network.guarded():
                by_func, rows = linear.by_autodiff(batch), linear.at(batch, 0, keep=True)
                assert isinstance(rows, ByFactors)
                w = draw(3, linear.layout.size)
                Jw, f = by_func.push(w), by_func.f
                u, totals = draw(*Jw.shape), torch.zeros(2, *w.shape).double()
                assert_close((f, Jw), (rows.f, rows.push(w)), rtol=1e-9, atol=1e-9)
                for total, way in zip(totals, (by_func, rows)):
                    way.pull(u, total)
                assert_close(totals[1], totals[0], rtol=1e-9, atol=1e-9)
                check_row_squares(linear, rows, batch, u)
                assert not (rows.f.requires_grad or rows.push(w).requires_grad)
    return rows


def check_row_squares(linear, rows, x, u):
    """Compare the squares of single rows' gradients with those pulled back row by row."""
    expected = torch.zeros(linear.layout.size).double()
    one_by_one, row = linear.by_autodiff(x), torch.zeros(len(u), len(expected)).double()
    for n in range(u.shape[1]):
        alone = torch.zeros_like(u)
        alone[:, n] = u[:, n]
        one_by_one.pull(alone, row.zero_())
        expected += row.square().sum(0)
    for numbers in (1, factors._NUMBERS["cpu"]):  # one row at a time, and many
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(factors._NUMBERS, "cpu", numbers)
            squares, found = rows.row_squares(u), torch.zeros_like(expected)
        linear.layout.add_(found, squares)
        known = torch.tensor([name in squares for name in linear.layout.names])
        assert set(squares) == set(linear.factored)
        assert_close(found, expected * linear.layout.expand(known), rtol=1e-9, atol=1e-9)


def net(*layers):
    return prepared(nn.Sequential(*layers))


CONVS = {
    "1d": (nn.Conv1d(2, 3, 3, stride=2, padding=1), (4, 2, 9)),
    "2d": (nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 0)), (4, 2, 7, 5)),
    "3d": (nn.Conv3d(2, 3, (3, 2, 1), dilation=(2, 1, 1)), (4, 2, 6, 3, 2)),
    "grouped": (nn.Conv2d(4, 6, 3, groups=2, bias=False), (4, 4, 5, 5)),
    "depthwise": (nn.Conv1d(3, 6, 3, groups=3), (4, 3, 5)),
    "dilated": (nn.Conv2d(2, 3, 3, dilation=2, padding=2), (4, 2, 6, 6)),
    "same": (nn.Conv2d(2, 3, (3, 5), dilation=(2, 1), padding="same"), (4, 2, 5, 4)),
    "valid": (nn.Conv1d(2, 3, 2, padding="valid"), (4, 2, 5)),
    "reflected": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (4, 2, 5, 5)),
    "one place": (nn.Conv2d(2, 30, 3), (4, 2, 3, 3)),
}


@pytest.mark.parametrize("kind", CONVS)
def test_convolutions(kind):
    layer, shape = CONVS[kind]
    x = draw(*shape)
    head = nn.Linear(layer(x.float()).flatten(1).shape[1], 2)
    agree(net(layer, nn.Tanh(), nn.Flatten(), head), x, batches=(x[:1], x[:3]))


def test_layers_in_a_row_with_changes_in_place():
    layers = nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Linear(5, 4, bias=False)
    factors = agree(net(*layers, nn.SELU(inplace=True), nn.Linear(4, 2)), draw(6, 3))
    assert factors.nbytes == sum(8 * 6 * n for n in (2, 3 + 2 * 5, 5 + 2 * 4, 4))


def test_kernels_at_many_places_are_kept_as_their_jacobian():
    model = net(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.AvgPool2d(6), nn.Flatten())
    factors = agree(model, draw(4, 1, 6, 6))
    (dense,) = factors.parts
    assert dense.J.shape == (4, 2, 20)


def test_batch_norm_and_channels_last():
    layers = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3)
    x = draw(4, 2, 6, 6).to(memory_format=torch.channels_last)
    model = net(*layers, nn.BatchNorm2d(3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    agree(model.to(memory_format=torch.channels_last), x)


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(3, 3), nn.Linear(3, 2)
        self.kernel = nn.Conv1d(3, 3, 3, padding=1)

    def forward(self, x):
        for _ in range(3):
            x = self.inner(x).tanh()
        x = self.kernel(self.kernel(x[..., None].expand(-1, -1, 4)).sin()).sum(-1)
        return self.head(x)


def test_modules_called_several_times():
    agree(prepared(Repeated()), draw(4, 3))


class Tied(nn.Module):
    def __init__(self, padding_idx=None):
        super().__init__()
        self.words = nn.Embedding(5, 3, padding_idx=padding_idx)
        self.inner = nn.Linear(3, 3)

    def forward(self, tokens):
        h = self.inner(self.words(tokens)).tanh().mean(1)
        return F.linear(h, self.words.weight)


@pytest.mark.parametrize("padding_idx", [None, 1])
def test_tied_weights_and_embeddings(padding_idx):
    tokens = torch.tensor([[0, 1, 2], [1, 1, 4], [3, 2, 2], [4, 0, 1]])
    agree(prepared(Tied(padding_idx)), tokens)
    table = nn.Embedding(5, 3, padding_idx=padding_idx)
    agree(net(table, nn.Flatten(), nn.Linear(6, 2)), tokens[:, 1:])


class Positioned(nn.Module):
    def __init__(self, flat):
        super().__init__()
        self.words, self.places, self.flat = nn.Embedding(5, 3), nn.Embedding(6, 3), flat
        self.out = nn.Linear(3, 2)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        places = self.places(places if self.flat else places[None])
        return self.out((self.words(tokens) + places).tanh().mean(1))


@pytest.mark.parametrize("flat, length", [(True, 3), (False, 4)])
def test_positions_looked_up_once_for_all_rows(flat, length):
    tokens = torch.tensor([[0, 1, 2, 0], [1, 1, 4, 2], [3, 2, 2, 2], [4, 0, 1, 3]])[:, :length]
    agree(prepared(Positioned(flat)), tokens, batches=[tokens[:3, :2], tokens[2:3]])


class Mixed(nn.Module):
    """Weights that act by a product, otherwise, and in both ways."""

    def __init__(self):
        super().__init__()
        self.inner, self.both = nn.Linear(3, 4), nn.Linear(4, 4)
        self.norm, self.head = nn.LayerNorm(4), parametrizations.weight_norm(nn.Linear(4, 2))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        x = self.both(self.inner(x).tanh() * self.scale) + self.both.weight.sum(0)
        return self.head(self.norm(x))


def test_a_weight_that_acts_otherwise_leaves_all_to_torch_func_but_not_one_without_influence():
    model = prepared(Mixed())
    without_factors(model, draw(4, 3), "all")
    agree(model, draw(4, 3), ["inner.*", "both.bias", "head.bias"])
    model.spare = nn.Linear(2, 2).double()
    agree(model, draw(4, 3), ["inner.*", "spare.*"])


def test_sequences_with_examples_on_the_second_axis_have_no_factors():
    class Swapped(nn.Sequential):
        def forward(self, x):
            return self[1](self[0](x.transpose(0, 1)).tanh().mean(0))

    without_factors(prepared(Swapped(nn.Linear(3, 4), nn.Linear(4, 2))), draw(4, 4, 3))


def test_parts_of_the_weights():
    for selection in (["0.bias"], ["2.weight"], ["2.*"], ["0.weight", "2.bias"]):
        agree(net(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), draw(4, 3), selection)
    factors = agree(net(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2)), draw(4, 3), "last_layer")
    assert factors.nbytes == 8 * 4 * (40 + 2)


def test_outputs_of_other_ranks():
    layers = nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 3, 1)
    agree(net(*layers), draw(3, 1, 3, 2), class_dim=1)
    agree(net(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), draw(3, 5, 3))


def test_hooks():
    model = net(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].register_forward_hook(lambda layer, args, output: output.sin() * args[0].sum(1, True))
    model[2].register_forward_pre_hook(lambda layer, args: (args[0] ** 2,))
    agree(model, draw(4, 3))


def refuse_recording(monkeypatch):
    def record(*args):
        raise AssertionError("the forward pass was recorded")

    monkeypatch.setattr(recorded, "recorded", record)


CHAINS = {
    "two hidden layers": (nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)),
    "no bias": (nn.Linear(3, 4, bias=False), nn.GELU(), nn.Linear(4, 2, bias=False)),
    "linear layers alone": (nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)),
    "elementwise outputs": (nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 2), nn.Sigmoid()),
    "nested, with dropout": (
        nn.Flatten(),
        nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.LeakyReLU(0.1)),
        nn.Sequential(nn.Identity(), nn.Linear(4, 3)),
    ),
}


@pytest.mark.parametrize("kind", CHAINS)
@pytest.mark.parametrize("selection", [None, "last_layer"])
def test_linear_layers_in_a_row_need_no_recording(kind, selection, monkeypatch):
    model, x = net(*CHAINS[kind]), draw(4, 3)
    agree(model, x, selection, batches=(draw(1, 3),))
    linear = linear_model(model.train(), selection)
    linear.probe(x)
    with linear.network.guarded(), monkeypatch.context() as patch:
        patch.setattr(recorded, "factors_of_chain", lambda *args: None)
        by_recording = linear.at(x, 0, keep=True)
    refuse_recording(monkeypatch)
    with linear.network.guarded():
        rows = linear.at(x, 0, keep=True)
    held = {p.untyped_storage().data_ptr() for p in (x, *model.parameters())}
    mine = [t for part in rows.parts for t in part if isinstance(t, torch.Tensor)]
    assert not held & {tensor.untyped_storage().data_ptr() for tensor in mine}
    assert rows.multiplications == by_recording.multiplications
    assert rows.gradients == by_recording.gradients


def with_hook(model):
    model[1].register_forward_hook(lambda layer, args, output: 2 * output)


def with_other_forward(model):
    model[1].forward = lambda x: x.sin()


def with_tied_weights(model):
    model[2].weight = model[0].weight


def with_change_in_place(model):
    model[1].inplace = True


@pytest.mark.parametrize(
    "change", [with_hook, with_other_forward, with_tied_weights, with_change_in_place]
)
def test_layers_that_do_more_are_recorded(change, monkeypatch):
    model, x = net(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)), draw(4, 3)
    change(model)
    agree(model, x)
    linear = linear_model(model)
    linear.probe(x)
    refuse_recording(monkeypatch)
    with linear.network.guarded(), pytest.raises(AssertionError, match="recorded"):
        linear.at(x, 0, keep=True)


def without_factors(model, x, selection=None):
    linear = linear_model(model, selection)
    linear.probe(x)
    assert not linear.factored
    with linear.network.guarded():
        assert isinstance(linear.at(x, 0, keep=True), ByAutodiff)


def test_networks_without_factors():
    """Rows that depend on each other, outputs that are many or narrow, and a single row."""
    layers = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)
    without_factors(prepared(Centred(*layers)), draw(4, 3))
    without_factors(net(*layers), draw(1, 3))  # of which the axis of the rows is not known
    # gradients for every output take more arithmetic than the layer does; biases need its product
    narrow = nn.Linear(10, 40), nn.Softmax(-1), nn.Flatten()
    without_factors(net(*narrow), draw(4, 6, 10))
    assert linear_model(net(*narrow[:2]), ["0.bias"]).probe(draw(4, 10)).names
    without_factors(net(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1000)), draw(4, 3))
    agree(net(nn.Linear(3, 600)), draw(4, 3))


@pytest.mark.parametrize("kind", ["tokens", "pixels", "grouped pixels"])
def test_a_head_at_every_place_keeps_its_inputs_alone(kind):
    """As that of a language model: outputs at every token, of a large vocabulary."""
    if kind == "tokens":
        model, x, class_dim = net(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 200)), draw(4, 3, 3), -1
    else:
        head = nn.Conv2d(4, 200, 1, groups=2 if "grouped" in kind else 1)
        model, x, class_dim = net(nn.Conv2d(2, 4, 1), nn.Tanh(), head), draw(4, 2, 3, 1), 1
    rows = agree(model, x, "last_layer", class_dim=class_dim)
    assert rows.nbytes == 8 * 4 * 3 * (4 + 200)


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


def test_a_steady_model_takes_as_many_columns_for_any_batch(monkeypatch):
    monkeypatch.setattr(factors, "FETCHED_BYTES", 1 << 12)
    model = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, 2)).double()
    linear, x = linear_model(model), draw(40, 3)
    linear.probe(x)
    known = linear.report
    with linear.network.guarded():
        assert linear.at(x, 4).pushed < linear.at(x[:1], 4).pushed
        expected = linear.by_autodiff(x).pushed
        for by in (True, False):
            steady = linear.steady(x, by_factors=by)
            found = [steady.at(some, 4) for some in (x, x[:1])]
            assert {type(rows) for rows in found} == {ByFactors if by else ByAutodiff}
            assert {rows.pushed for rows in found} == {expected}
    assert known == linear.report
