"""Layers' own rules of forward mode give torch's numbers, in fewer passes over memory."""

import copy
import gc
import weakref

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
from torch.testing import assert_close

from torch_lla_em.jacobian import own_tangents
from torch_lla_em.jacobian.own_tangents import _RULES, OwnTangents

pytestmark = pytest.mark.usefixtures("own_tangents_at_any_size")


def images(*layers):
    """A small residual network around some layers that keep 4 channels of 5 x 5."""
    body = nn.Sequential(nn.Conv2d(2, 4, 3), *layers, nn.ReLU(inplace=True), nn.Flatten())
    return prepared(nn.Sequential(body, nn.Linear(100, 3)))


class Named(nn.Module):
    """Calls its layer by keyword."""

    def __init__(self, layer):
        super().__init__()
        self.norm = layer

    def forward(self, x):
        return self.norm(input=x)


PIXELS, TOKENS, ROWS = (2, 2, 7, 7), (2, 3, 4), (5, 4)
MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), ROWS),
    "linear, no bias": (
        lambda: nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, False)),
        ROWS,
    ),
    "linear of tokens": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)),
        TOKENS,
    ),
    "linear by keyword": (lambda: nn.Sequential(nn.Linear(4, 4), Named(nn.Linear(4, 2))), ROWS),
    "batch norm of rows": (
        lambda: nn.Sequential(nn.Linear(4, 4), Named(nn.BatchNorm1d(4)), nn.Linear(4, 2)),
        ROWS,
    ),
    "batch norm first": (lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)), ROWS),
    "batch norm of lengths": (
        lambda: nn.Sequential(
            nn.Conv1d(3, 3, 2), Named(nn.BatchNorm1d(3)), nn.Flatten(), nn.Linear(9, 2)
        ),
        TOKENS,
    ),
    "batch norm of pixels": (lambda: images(Named(nn.BatchNorm2d(4))), PIXELS),
    "batch norm, not affine": (lambda: images(nn.BatchNorm2d(4, affine=False)), PIXELS),
    "batch norm, no statistics": (
        lambda: images(nn.BatchNorm2d(4, track_running_stats=False)),
        PIXELS,
    ),
    "batch norm of voxels": (
        lambda: nn.Sequential(
            nn.Conv3d(1, 2, 2), nn.BatchNorm3d(2), nn.Flatten(), nn.Linear(16, 2)
        ),
        (2, 1, 3, 3, 3),
    ),
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(4, 4), Named(nn.LayerNorm(4)), nn.Linear(4, 2)),
        TOKENS,
    ),
    "layer norm first": (lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)), TOKENS),
    "layer norm, no bias": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, bias=False)),
        TOKENS,
    ),
    "layer norm, not affine": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, elementwise_affine=False)),
        TOKENS,
    ),
    "layer norm of pixels": (lambda: images(nn.LayerNorm([4, 5, 5])), PIXELS),
}


@pytest.mark.parametrize("name", MODELS)
def test_products_are_those_of_the_dense_jacobian(name):
    make, shape = MODELS[name]
    for names in choices(make()):
        report = check(prepared(make()), drawn(*shape), names)
        assert report.path.forward and not report.unbatched
        assert report.path.shared or report.last_layer


@pytest.mark.parametrize("name", MODELS)
def test_rules_are_used_unless_a_layer_has_no_statistics(name):
    make, shape = MODELS[name]
    linear = linear_model(prepared(make()), [n for n, _ in make().named_parameters()])
    assert "torch's derivatives" not in str(linear.probe(drawn(*shape)))
    kinds = {type(m) for m in make().modules() if getattr(m, "running_mean", 0) is not None}
    assert linear.network.own_tangents.used == kinds & _RULES.keys()
    assert linear.network.own_tangents.allowed


@pytest.fixture
def tokens():
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)
    return prepared(nn.Sequential(*layers)), drawn(*TOKENS)


@pytest.fixture
def pixels():
    return images(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)), drawn(*PIXELS)


@pytest.fixture(params=["tokens", "pixels"])
def network(request):
    return request.getfixturevalue(request.param)


def written(model, x, allowed):
    linear = linear_model(model)
    linear.network.own_tangents.allowed = allowed
    w = torch.randn(20, linear.layout.size).double()
    with linear.network.guarded(), Written() as seen:
        linear.jvp(x, w)
    return seen.numbers


def test_less_is_written(network):
    assert written(*network, True) < 0.8 * written(*network, False)


@pytest.mark.parametrize("kind", [nn.Linear, nn.LayerNorm])
@pytest.mark.parametrize("fault", ["wrong", "fails", "not batched"])
def test_torchs_rules_are_taken_where_ours_are_at_fault(kind, fault, tokens, monkeypatch):
    model, x = tokens
    rule = _RULES[kind]

    def tangent(layer, y, *duals):
        right = rule.tangent(layer, y, *duals)
        if fault == "fails" or (
            fault == "not batched"
            and torch._C._functorch.is_batchedtensor(
                torch._C._functorch.get_unwrapped(duals[1].tangent)
            )
        ):
            raise RuntimeError("no such rule")
        return 2 * right if fault == "wrong" else right

    monkeypatch.setitem(_RULES, kind, rule._replace(tangent=tangent))
    names = [name for name, _ in model.named_parameters()]
    report = check(model, x, names)
    assert report.path.forward and report.path.shared and not report.unbatched
    linear = linear_model(model, names)
    assert "torch's derivatives" in str(linear.probe(x))
    assert not linear.network.own_tangents.allowed


@pytest.mark.parametrize("derivative", ["jvp", "grad", "jacrev", "jacfwd"])
def test_a_network_may_take_derivatives_itself(derivative, tokens):
    """As those do that solve a differential equation."""
    model, x = tokens

    def forward(module, x):
        f = lambda x: module(x).square().sum()  # noqa: E731
        if derivative == "jvp":
            return torch.func.jvp(module, (x,), (torch.ones_like(x),))[1]
        return getattr(torch.func, derivative)(f)(x)

    names, found = [name for name, _ in model.named_parameters()], []
    for allowed in (True, False):
        linear = linear_model(model, names, forward)
        linear.network.own_tangents.allowed = allowed
        assert linear.probe(x).path.forward and linear.network.own_tangents.allowed == allowed
        with linear.network.guarded():
            found.append([linear.jvp(x, drawn(count, linear.layout.size))[1] for count in (1, 3)])
    assert_close(*found)


def test_layers_that_train_in_a_forward_pass_take_torchs():
    def forward(module, x):
        module.train()
        return module(x)

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    linear, x, products = linear_model(prepared(model), forward_fn=forward), drawn(*ROWS), []
    with linear.network.guarded():
        for linear.network.own_tangents.allowed in (True, False):
            products.append(linear.jvp(x, torch.ones(2, linear.layout.size).double())[1])
    assert_close(*products)


def test_what_is_differentiated_in_x_takes_torchs(network):
    model, x = network
    linear, gradients = linear_model(model), []
    linear.probe(x)
    linear.network.own_tangents.used.clear()
    for allowed in (True, False):
        linear.network.own_tangents.allowed = allowed
        w = torch.randn(3, linear.layout.size, generator=torch.Generator().manual_seed(0)).double()
        inputs = x.clone().requires_grad_()
        with linear.network.guarded(), torch.enable_grad():
            linear.jvp(inputs, w)[1].square().sum().backward()
        gradients.append(inputs.grad)
    assert not linear.network.own_tangents.used and gradients[0].any()
    assert_close(*gradients)


def test_tangents_of_a_shared_pass_are_in_no_graph(tokens):
    f, tangent, _ = shared_pass(tokens[0][:3], tokens[1])
    assert f.requires_grad and not tangent.requires_grad


def steps(node):
    """The names of all steps of a graph."""
    return {type(node).__name__}.union(*(steps(below) for below, _ in node.next_functions if below))


def test_changes_in_place_of_a_shared_pass_copy_no_slices():
    """As they do of the dual numbers that torch makes, which are views."""
    layers = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.BatchNorm1d(4), nn.ReLU(inplace=True)
    f, _, network = shared_pass(prepared(nn.Sequential(*layers)), drawn(*ROWS))
    assert network.own_tangents.used == {nn.Linear, nn.BatchNorm1d}
    assert "ReluBackward0" in steps(f.grad_fn) and "CopySlices" not in steps(f.grad_fn)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("rows_inside", [False, True])
def test_inputs_may_have_columns_too(rows_inside, tokens):
    """As where a network maps over rows itself."""
    model, x = tokens
    linear = linear_model(model, [name for name, _ in model.named_parameters()])
    w, network, names = drawn(3, linear.layout.size), linear.network, linear.layout.names
    weights, tangents = linear.weights_and_tangents(w)

    def push(row, tangent):
        return torch.func.jvp(network.function(row[None], names), (weights,), (tangent,))[1][0]

    dims = [(0, None), (None, 0)]
    with network.guarded():
        _, expected = linear.jvp(x, w)
        inner, outer = dims[::-1] if not rows_inside else dims
        mapped = torch.vmap(torch.vmap(push, inner), outer)(x, tangents)
    assert network.own_tangents.used
    assert_close(mapped if rows_inside else mapped.transpose(0, 1), expected)


def test_bfloat16_products_are_near(network):
    """Torch's own fail beside a batch norm."""
    check_bfloat16(copy.deepcopy(network[0]).float(), network[1].float())


def test_small_linear_layers_take_torchs(monkeypatch):
    """Whatever the batch, so that the probe has seen what follows."""
    monkeypatch.setattr(own_tangents, "_LEAST", 12)
    assert OwnTangents().forward_of(nn.Linear(4, 3)) and not OwnTangents().forward_of(
        nn.Linear(11, 1)
    )
    assert OwnTangents().forward_of(nn.LayerNorm(2)) and OwnTangents().forward_of(nn.BatchNorm2d(2))


def test_a_network_is_freed_at_once(network):
    linear = linear_model(copy.deepcopy(network[0]))
    linear.probe(network[1])
    alive = weakref.ref(linear.network.module)
    gc.disable()
    try:
        del linear
        assert alive() is None
    finally:
        gc.enable()


def test_a_forward_of_the_users_stays():
    layer = nn.Linear(2, 2)
    assert OwnTangents().forward_of(layer)
    layer.forward = lambda x: x
    assert OwnTangents().forward_of(layer) is None

    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    assert OwnTangents().forward_of(Scaled(2, 2)) is None


def test_layers_have_their_own_forward_again(network):
    model, x = network
    linear = linear_model(model)
    with linear.network.guarded():
        assert any("forward" in vars(layer) for layer in model.modules())
    assert not any("forward" in vars(layer) for layer in model.modules())
