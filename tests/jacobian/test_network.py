"""A network is run as a function, left as it was, and refused where that is not possible."""

import copy
import functools

import pytest
import torch
from jacobians import Calls, X, check, linear_model, mlp, prepared, products
from tiny import batched, draw
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from torch_lla_em import Compute, LinearisedLaplace
from torch_lla_em.jacobian.checks import last_layers
from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.parameters import select_parameters


def state(module):
    return {
        "training": [layer.training for layer in module.modules()],
        "fastpath": torch.backends.mha.get_fastpath_enabled(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "not math": not torch.backends.cuda.math_sdp_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "mkldnn": torch.backends.mkldnn.enabled,
        "cudnn": torch.backends.cudnn.enabled,
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
    }


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("outer", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_guard_restores_everything(fails, outer):
    seen = {}

    def forward(m, x):
        seen.update(state(m))
        m.last = m.a(x)
        return m.last if not fails else {}["inside"]

    model = Calls(forward, a=nn.Linear(3, 2), drop=nn.Dropout().eval(), rnn=nn.LSTM(1, 1))
    attributes, network = set(vars(model)), Network(model)
    with outer(), torch.autocast("cpu", dtype=torch.bfloat16):
        before = state(model)
        try:
            with network.guarded(), torch.enable_grad(), network.guarded():  # they nest
                network.outputs(torch.ones(1, 3))
        except KeyError:
            assert fails
        assert state(model) == before and set(vars(model)) == attributes
    assert seen == {"training": [False] * 4} | {name: False for name in before if name[0] != "t"}


class Shifted(nn.Module):
    """A layer and a buffer, with an attribute that the forward pass reads."""

    def __init__(self):
        super().__init__()
        self.layer, self.sign = nn.Linear(3, 2), 1.0
        self.register_buffer("shift", torch.zeros(2))

    def forward(self, x):
        return self.sign * self.layer(x) + self.shift


def in_place(model):
    with torch.no_grad():
        model.layer.weight.add_(1)


CHANGES = {
    "data": lambda m: setattr(m.layer.weight, "data", m.layer.weight.data + 1),
    "in place": in_place,
    "layer": lambda m: setattr(m, "layer", nn.Sequential(nn.Linear(3, 2), nn.Tanh()).eval()),
    "hook": lambda m: m.layer.register_forward_hook(lambda layer, given, z: 2 * z),
    "buffer": lambda m: setattr(m, "shift", torch.ones(2)),
    "attribute": lambda m: setattr(m, "sign", -1.0),
    "dtype": nn.Module.double,
    "mode": nn.Module.train,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_calls_are_seen(change):
    model, x = Shifted().eval(), torch.ones(4, 3)
    network = Network(model)
    other = copy.deepcopy(network)  # of its own module
    for _ in range(2):
        with network.guarded():
            assert_close(network.outputs(x), model(x))
    CHANGES[change](model)
    moved, mode = x.to(next(model.parameters()).dtype), model.training
    with network.guarded(), other.guarded():
        names = tuple(dict(model.named_parameters()))
        found, weights = network.outputs(moved), network.weights(names)
        assert_close(other.outputs(x), other.module(x))
    assert_close(found, model(moved).detach(), rtol=0, atol=0)
    assert all(torch.equal(weights[name], p) for name, p in model.named_parameters())
    assert model.training is mode and model.layer.training is mode


class Writing(list):
    """Batches, before the second of which a pass writes one number of a network, without a new version."""

    def __init__(self, model, number):
        super().__init__(batched(4, draw(12, 3), torch.arange(12) % 2))
        self.model, self.passes, self.number = model, 0, number

    def __iter__(self):
        self.passes += 1
        yield self[0]
        if self.passes == self.number:
            self.model[2].weight.data[1, 0] += 1e-9
        yield from self[1:]


@pytest.mark.parametrize("number, keep", [(2, True), (2, False), (4, False)])
def test_a_weight_that_a_loader_changes_during_a_fit_is_noticed(number, keep):
    model = mlp()
    loader = Writing(model, number)
    la = LinearisedLaplace(model, "classification", compute=Compute(keep_data=keep), num_samples=4)
    with pytest.raises(RuntimeError, match="network was changed during the fit"):
        la.fit(loader, progress_bar=False)
    assert loader.passes == number


@pytest.mark.parametrize("wrappers", ["DataParallel", "compile DataParallel compile"])
def test_wrapped(wrappers):
    model = mlp()
    for wrapper in wrappers.split():
        model = torch.compile(model) if wrapper == "compile" else nn.DataParallel(model)
    assert linear_model(model).layout.names == linear_model(mlp()).layout.names
    check(model, X)


def test_layers_compiled_in_place_or_inside_stay_eager():
    def compile_nothing(graph, inputs):
        raise AssertionError("compiled")

    in_place, inside = mlp(), torch.compile(mlp(), backend=compile_nothing)
    in_place.compile(backend=compile_nothing)
    for body in (in_place, inside):
        linear = linear_model(nn.Sequential(body, nn.Linear(2, 2).double()))
        linear.probe(X)
        products(linear, X, draw(2, linear.layout.size), draw(2, 5, 2))


def test_scaled_gradients_of_a_table_are_no_derivatives():
    ids = torch.tensor([[0, 0], [1, 2]])
    model = prepared(nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2)))
    other, w, u = copy.deepcopy(model), draw(1, 12), draw(1, 2, 2, 2)
    other[0].scale_grad_by_freq = True
    each = [linear_model(own) for own in (model, other)]
    assert [own.probe(ids) for own in each][1].names
    assert_close(*(products(own, ids, w, u) for own in each))
    assert other[0].scale_grad_by_freq


def of(forward, **options):
    return lambda: (Calls(forward, a=mlp(), b=mlp()), X, options)


def not_finite():
    model = mlp()
    model[2].weight.data[0, 0] = torch.nan
    return model, X, {}


def in_list():
    kept = []

    def forward(m, x):
        if not kept:
            kept.append(2 * m.a[0].weight)
        return m.b(x) + kept[0].sum()

    return forward


@functools.cache
def doubled(m):
    return 2 * m.a[0].weight


REFUSED = {
    "no module": (TypeError, "Pass an nn.Module", lambda: (len, X, {})),
    "a script": (TypeError, "scripted.* Pass the Python module", lambda: (torch.jit.script(mlp()), X, {})),
    "a part": (TypeError, "a part of it, is a scripted", lambda: (nn.Sequential(torch.jit.script(mlp())), X, {})),
    "list": (RuntimeError, "'a.0.weight' is used in the first forward pass only.*Clear", of(in_list())),
    "function": (RuntimeError, "'a.0.weight' is used in the first forward pass only", of(lambda m, x: m.b(x) + doubled(m).sum())),
    "reentrant checkpoint": (NotImplementedError, "reentrant.*'a.2.bias'.*use_reentrant=False", of(lambda m, x: checkpoint(m.b, m.a[0](x)[:, :3], use_reentrant=True))),
    "one of the first layers": (NotImplementedError, "reentrant.*'a.0.bias'.*use_reentrant=False", of(lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=True)[:, [0, 1, 1]]))),
    "dropout": (ValueError, "disagree.*training=self", of(lambda m, x: m.a(F.dropout(x, 0.5)))),
    "not finite": (FloatingPointError, "not finite.*weights", not_finite),
    "labels": (TypeError, "int64.*must be floating point.*logits", of(lambda m, x: m.a(x).argmax(-1))),
    "a number": (TypeError, r"shape \(\). They.*logits", of(lambda m, x: m.a(x).sum())),
    "class_dim": (IndexError, r"expected to be in range of \[-2, 1\], but got 2", lambda: (mlp(), X, {"class_dim": 2})),
    "bag": (NotImplementedError, "forward mode:.*embedding_bag.*two reverse passes:.*last_layer", lambda: (nn.Sequential(nn.EmbeddingBag(6, 3), nn.Linear(3, 2)), torch.tensor([[0, 1]]), {})),
    "no influence": (NotImplementedError, "do not depend on the parameters in the posterior.*'a.0.weight'", of(lambda m, x: m.a(x).detach() + m.b(x), selection=["a.*"])),
    "a dict": (TypeError, r"returned dict.*Pass adapter=Adapter\(lambda", of(lambda m, x: {"out": m.a(x)})),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.filterwarnings("ignore:`torch.jit.:FutureWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    """Each error names what is wrong and the remedy."""
    error, words, make = REFUSED[name]
    model, x, options = make()
    with pytest.raises(error, match=f"(?s){words}"):
        linear_model(model, **options).probe(x)
    if name == "bag":
        check(model.double(), x, "last_layer")


def test_forward_fn_and_class_dim():
    model, x = prepared(nn.Conv2d(1, 3, 2)), draw(2, 1, 3, 3)
    check(model, {"image": x}, forward_fn=lambda m, d: m(d["image"]), class_dim=1)
    network = Network(model, class_dim=1)
    with network.guarded():
        assert network.outputs(x).shape == (2, 2, 2, 3)


def test_networks_without_a_layer_have_no_last_layer():
    with pytest.raises(ValueError, match="no last layer"):
        last_layers(Network(nn.Sequential(nn.PReLU()).double()), X)


HEADS = {
    "two heads": (lambda m, x: torch.cat([m.b(h := m.a(x).tanh()), m.c(h)], 1), ("b", "c")),
    "a gate": (lambda m, x: m.b(x) * m.c(x).sigmoid(), ("b", "c")),
    "a skip connection": (lambda m, x: (h := m.a(x)) + m.b(h), ("b",)),
    "layer in the middle of a skip connection": (lambda m, x: m.a(x) + m.c(m.b(x)), ("a", "c")),
    "called twice": (lambda m, x: m.b(m.b(m.a(x))), ("b",)),
    "an unused head, called last": (lambda m, x: (m.b(h := m.a(x)), m.c(h))[0], ("b",)),
    "in place": (lambda m, x: m.b(m.a(x).relu_()).relu_(), ("b",)),
    "by keyword": (lambda m, x: m.b(input=m.a(input=x)), ("b",)),
    "attention": (lambda m, x: m.d(m.a(x)[None], m.a(x)[None], m.a(x)[None])[0][0], ("d",)),
    "vmap": (lambda m, x: torch.vmap(m.b)(m.a(x)), ("b",)),
    "no graph": (lambda m, x: torch.no_grad()(m.b)(m.a(x)), ("b",)),
    "a norm behind": (lambda m, x: m.norm(m.b(m.a(x))), ("b",)),
    "a class token": (lambda m, x: m.b(x + m.token), ("b",)),
}


@pytest.mark.parametrize("name", HEADS)
def test_last_layers_are_those_with_no_layer_behind_them(name):
    forward, expected = HEADS[name]
    others = {"d": nn.MultiheadAttention(3, 1), "norm": nn.LayerNorm(3)}
    model = Calls(forward, **{key: nn.Linear(3, 3) for key in "abc"}, **others)
    model.token = nn.Parameter(torch.ones(1, 3))
    assert last_layers(Network(model.double()), X) == expected
    names = select_parameters(model, "last_layer", expected)
    assert {name.split(".")[0] for name in names} == {*expected}
