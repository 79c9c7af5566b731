import copy

import pytest
import torch
import torch.distributed as dist
from jacobians import Calls, X, check, linear_model, mlp, products
from tiny import draw
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from torch_lla_em import Compute, LinearisedLaplace
from torch_lla_em.jacobian.checks import called_last
from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.parameters import select_parameters


class Observer(nn.Module):
    """A network that records what it runs under, and can fail."""

    def __init__(self, *layers, fails=False):
        super().__init__()
        self.layers, self.fails = nn.ModuleList([nn.Linear(3, 2), *layers]), fails
        self.seen = {}

    def forward(self, x):
        self.seen |= state(self)
        self.last_output = self.layers[0](x)
        if self.fails:
            raise KeyError("inside")
        return self.last_output


def state(module):
    return {
        "training": [layer.training for layer in module.modules()],
        "fastpath": torch.backends.mha.get_fastpath_enabled(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "mkldnn": torch.backends.mkldnn.enabled,
        "cudnn": torch.backends.cudnn.enabled,
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
    }


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("outer", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_guard_restores_everything(fails, outer):
    model = Observer(nn.Dropout(), nn.LSTM(1, 1), fails=fails)
    model.layers[1].eval()
    seen, attributes = model.seen, set(vars(model))
    network = Network(model)
    with outer(), torch.autocast("cpu", dtype=torch.bfloat16):
        before = state(model)
        try:
            with network.guarded():
                model(torch.ones(1, 3))
        except KeyError:
            assert fails
        assert state(model) == before
    assert set(vars(model)) == attributes
    assert seen == {
        "training": [False] * 5,
        "fastpath": False,
        "flash": False,
        "math": True,
        "autocast": False,
        "mkldnn": False,
        "cudnn": False,
        "grad": False,
        "inference": False,
    }


def test_guards_nest():
    network = Network(Observer())
    with network.guarded():
        with torch.enable_grad(), network.guarded():
            assert not torch.is_grad_enabled()
        assert not network.module.training and not torch.backends.mha.get_fastpath_enabled()
    assert network.module.training and torch.backends.mha.get_fastpath_enabled()


class Shifted(nn.Module):
    """A layer and a buffer, with an attribute that the forward pass reads."""

    def __init__(self):
        super().__init__()
        self.layer, self.sign = nn.Linear(3, 2), 1.0
        self.register_buffer("shift", torch.zeros(2))

    def forward(self, x):
        return self.sign * self.layer(x) + self.shift


def by_data(model):
    model.layer.weight.data = model.layer.weight.data + 1


def in_place(model):
    with torch.no_grad():
        model.layer.weight.add_(1)


def with_another_layer(model):
    model.layer = nn.Sequential(nn.Linear(3, 2), nn.Tanh()).eval()


def with_a_hook(model):
    model.layer.register_forward_hook(lambda layer, given, z: 2 * z)


def with_another_buffer(model):
    model.shift = torch.ones(2)


def with_another_attribute(model):
    model.sign = -1.0


CHANGES = by_data, in_place, with_another_layer, with_a_hook, with_another_buffer
CHANGES = *CHANGES, with_another_attribute, nn.Module.double, nn.Module.train


@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_calls_are_seen(change):
    model, x = Shifted().eval(), torch.ones(4, 3)
    network = Network(model)
    for _ in range(2):
        with network.guarded():
            assert_close(network.outputs(x), model(x))
    change(model)
    x, mode = x.to(next(model.parameters()).dtype), model.training
    with network.guarded():
        names = tuple(dict(model.named_parameters()))
        found, weights = network.outputs(x), network.weights(names)
    assert_close(found, model(x).detach(), rtol=0, atol=0)
    assert all(torch.equal(weights[name], p) for name, p in model.named_parameters())
    assert model.training is mode and model.layer.training is mode


class Writing(list):
    """Batches, before the second of which a pass writes one number of a network, without a new version."""

    def __init__(self, model, number):
        super().__init__(zip(draw(12, 3).split(4), (torch.arange(12) % 2).split(4)))
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


def test_a_copy_is_of_its_own_module():
    network = Network(Shifted().eval())
    other, x = copy.deepcopy(network), torch.ones(4, 3)
    in_place(network.module)
    with other.guarded(), network.guarded():
        assert_close(other.outputs(x), other.module(x))
        assert not torch.equal(other.outputs(x), network.outputs(x))


def test_requires_grad_stays_also_of_frozen_random_weights():
    model = mlp()
    model[0].requires_grad_(False)
    check(model, X, ["0.*", "4.bias"])
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True, True, True]


@pytest.mark.parametrize("wrappers", ["DataParallel", "compile", "compile DataParallel compile"])
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
        w, u = torch.ones(2, linear.layout.size).double(), torch.ones(2, 5, 2).double()
        products(linear, X, w, u)


@pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is not built")
@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")
def test_distributed_data_parallel(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        check(nn.parallel.DistributedDataParallel(mlp()), X)
    finally:
        dist.destroy_process_group()


class TestRefused:
    """Each error names the module and the remedy."""

    def refuse(self, model, *words, x=X, error=Exception, **kwargs):
        with pytest.raises(error) as caught:
            linear_model(model, **kwargs).probe(x)
        for word in words:
            assert word in str(caught.value)

    def test_no_module(self):
        self.refuse(lambda x: x, "Pass an nn.Module", error=TypeError)

    @pytest.mark.filterwarnings("ignore:`torch.jit.:FutureWarning")
    def test_scripted(self):
        script = torch.jit.script(mlp())
        self.refuse(script, "scripted", "Pass the Python module", error=TypeError)
        model = nn.Sequential(script, nn.Linear(2, 2).double())
        self.refuse(model, "The module '0' is scripted", "leave '0.0.weight'", error=TypeError)
        check(nn.Sequential(mlp(), nn.Linear(2, 2).double()), X, ["1.*"])

    @pytest.mark.filterwarnings("ignore:`torch.jit.:FutureWarning")
    def test_scripted_trunk_is_fine(self):
        trunk, head = mlp(), nn.Linear(2, 2).double()
        w, u = torch.ones(2, 6).double(), torch.ones(2, 5, 2).double()
        linear = linear_model(nn.Sequential(torch.jit.script(trunk), head), ["1.*"])
        linear.probe(X)
        assert all(layer.training for layer in linear.network.module.modules())
        plain = linear_model(nn.Sequential(trunk, head), ["1.*"])
        assert_close(products(linear, X, w, u), products(plain, X, w, u))

    def test_scale_grad_by_freq(self):
        """Gradients are scaled in training only: J is the derivative."""
        torch.manual_seed(0)
        model, ids = (
            nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2)).double(),
            torch.tensor([[0, 0], [1, 2]]),
        )
        other = copy.deepcopy(model)
        other[0].scale_grad_by_freq = True
        w, u = torch.ones(1, 12).double(), torch.ones(1, 2, 2, 2).double()
        each = [linear_model(own) for own in (model, other)]
        assert [own.probe(ids) for own in each][1].names
        assert_close(*(products(own, ids, w, u) for own in each))
        assert other[0].scale_grad_by_freq

    def test_reentrant_checkpoint(self):
        layers = {"a": nn.Linear(3, 3).double(), "b": mlp()}
        model = Calls(lambda m, x: checkpoint(m.b, m.a(x), use_reentrant=True), **layers)
        self.refuse(model, "use_reentrant=True", "checkpoint")  # torch's own words

    def test_dropout_in_eval_mode(self):
        model = Calls(lambda m, x: m.a(F.dropout(x, 0.5)), a=mlp())
        self.refuse(model, "disagree", "training=self.training")

    def test_not_finite(self):
        model = mlp()
        with torch.no_grad():
            model[2].weight[0, 0] = torch.nan
        self.refuse(model, "not finite", "weights", error=ValueError)

    def test_integer_outputs(self):
        decide = lambda model, x: model(x).argmax(-1)  # noqa: E731
        self.refuse(mlp(), "not floating point", "logits", error=TypeError, forward_fn=decide)

    def test_class_dim_out_of_range(self):
        self.refuse(mlp(), "(5, 2)", "class_dim=2", "from -2 to 1", error=ValueError, class_dim=2)

    def test_embedding_bag(self):
        model = nn.Sequential(nn.Sequential(nn.EmbeddingBag(6, 3)), nn.Linear(3, 2))
        ids = torch.tensor([[0, 1, 2]])
        words = "embedding_bag", "forward mode:", "two reverse passes:", "last_layer"
        self.refuse(model, *words, x=ids, error=NotImplementedError)
        check(model.double(), ids, "last_layer")

    def test_nothing_depends_on_the_weights(self):
        model = Calls(lambda m, x: m.a(x).detach() + m.b(x), a=mlp(), b=mlp())
        words = "do not depend on the parameters in the posterior", "'a.0.weight'"
        self.refuse(model, *words, selection=["a.*"], error=NotImplementedError)

    def test_outputs_that_are_no_tensor(self):
        words = "returned dict", "Pass adapter=Adapter(lambda model, inputs"
        self.refuse(Calls(lambda m, x: {"out": m.a(x)}, a=mlp()), *words, error=TypeError)


def test_forward_fn_and_class_dim():
    torch.manual_seed(0)
    model = nn.Conv2d(1, 3, 2).double()
    x = torch.randn(2, 1, 3, 3).double()
    check(model, {"image": x}, forward_fn=lambda m, d: m(d["image"]), class_dim=1)
    network = Network(model, class_dim=1)
    with network.guarded():
        assert network.outputs(x).shape == (2, 2, 2, 3)


def test_last_layer_is_the_last_called():
    layers = {"head": nn.Linear(3, 2), "body": nn.Linear(3, 3), "norm": nn.LayerNorm(2)}
    model = Calls(lambda m, x: m.norm(m.head(m.body(x))), **layers).double()
    assert select_parameters(model, "last_layer") == ("body.weight", "body.bias")
    assert called_last(Network(model), X) == "head"
    assert select_parameters(model, "last_layer", "head") == ("head.weight", "head.bias")
    with pytest.raises(ValueError, match="no last layer"):
        called_last(Network(nn.Sequential(nn.PReLU()).double()), X)
