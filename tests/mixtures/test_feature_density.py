"""Densities over a network's features: what they say, and what they leave alone."""

import copy

import pytest
import torch
from clusters import Batches
from torch import nn
from torch.distributions import MultivariateNormal

from torch_lla_em.mixtures import GaussianMixture
from torch_lla_em.mixtures.feature_density import FeatureDensity

torch.set_num_threads(1)


class Network(nn.Module):
    """A network that minds its mode, and writes to itself as it runs."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5))
        self.head = nn.Linear(6, 3)
        self.spare = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.seen = 0
        self.log = []
        self.fails = False

    def forward(self, x):
        self.calls += 1
        self.seen += 1
        self.log.append(len(x))
        self.last = x
        setattr(self, f"call_{self.seen}", True)
        if self.fails:
            raise ArithmeticError("the network failed")
        return self.head(self.body(x))


@pytest.fixture
def network():
    torch.manual_seed(0)
    network = Network()
    network(torch.randn(50, 2))
    return network.double()


LABELS = torch.arange(240) % 3
X = torch.tensor([[0.0, 2.0], [2.0, -1.0], [-2.0, -1.0]])[LABELS]
X = (X + 0.4 * torch.randn(240, 2, generator=torch.Generator().manual_seed(0))).double()


def loader_of(*tensors):
    return Batches(zip(*(tensor.split(32) for tensor in tensors)))


def scores(network, *data, **options):
    return FeatureDensity(network, "body", **options).fit(*data).score(X)


def features(network, x):
    """The features of ``body``, by hand."""
    still = copy.deepcopy(network).eval()
    with torch.no_grad():
        return still.body(x)


def test_a_gaussian_for_each_class(network):
    density = FeatureDensity(network, "body", GaussianMixture(1), by_label=True)
    density.fit(loader_of(X, LABELS))
    z, log_joint = features(network, X), []
    for label in range(3):
        own = z[label == LABELS]
        normal = MultivariateNormal(own.mean(0), own.T.cov(correction=0))
        log_joint.append(normal.log_prob(z) + torch.tensor(len(own) / len(z)).double().log())
    log_joint = torch.stack(log_joint, 1)
    torch.testing.assert_close(density.class_scores(X), log_joint)
    torch.testing.assert_close(density.score(X), log_joint.logsumexp(1))


@pytest.mark.parametrize("by_label", [False, True])
def test_unfamiliar_inputs_score_lower(network, by_label):
    density = FeatureDensity(network, "body", by_label=by_label).fit(loader_of(X, LABELS))
    familiar, far = density.score(X), density.score(X[:60].flip(1) * 3)
    assert far.max() < familiar.median()
    assert ((familiar[:, None] > far).double().mean()) > 0.95


def test_one_pass_for_each_step(network):
    mixture = GaussianMixture(2, sample_size=50, max_steps=500)
    loader = loader_of(X, LABELS)
    density = FeatureDensity(network, "body", mixture).fit(loader)
    assert loader.passes == 1 + len(mixture.history)
    z = features(network, X)
    torch.testing.assert_close(density.score(X), mixture.log_prob(z))
    held = loader_of(X, LABELS)
    FeatureDensity(network, "body", GaussianMixture(2, max_steps=500)).fit(held)
    assert held.passes == 1


def snapshot(network):
    """All that a module holds, as values that can be compared."""
    return {
        name: {
            key: value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)
            for key, value in vars(module).items()
        }
        for name, module in network.named_modules()
    }


def assert_same(before, network, state):
    after = snapshot(network)
    assert before.keys() == after.keys()
    for name in before:
        assert list(before[name]) == list(after[name])
        for key, value in before[name].items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(value, after[name][key], rtol=0, atol=0)
            elif key not in ("_parameters", "_buffers"):
                assert value == after[name][key], (name, key)
            else:
                pairs = zip(value.values(), after[name][key].values(), strict=True)
                assert all(a is b for a, b in pairs)
    for key, value in network.state_dict().items():
        torch.testing.assert_close(value, state[key], rtol=0, atol=0)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(network, fails, training):
    network.train(training)
    network.body[1].eval()
    network.fails = fails
    calls = []
    network.body.register_forward_hook(lambda module, args, out: calls.append(1))
    state, before = copy.deepcopy(network.state_dict()), snapshot(network)
    density = FeatureDensity(network, "body", by_label=True)
    if fails:
        with pytest.raises(ArithmeticError, match="the network failed"):
            density.fit(loader_of(X, LABELS))
    else:
        density.fit(loader_of(X, LABELS))
        score = density.score(X)
        assert calls and network.head.weight.grad is None
        evaluated = FeatureDensity(copy.deepcopy(network).eval(), "body", by_label=True)
        torch.testing.assert_close(evaluated.fit(X, LABELS).score(X), score)
    assert_same(before, network, state)
    assert "last" in vars(network) and len(network.last) == 50


@pytest.mark.parametrize("layer", ["", "head", "body.0"])
def test_any_layer_by_name_or_itself(network, layer):
    module = network.get_submodule(layer)
    still = copy.deepcopy(network).eval()
    expected = {"": still, "head": still, "body.0": still.body[0]}[layer](X).detach()
    for choice in (layer, module):
        torch.testing.assert_close(FeatureDensity(network, choice).features(X), expected)


class Echo(nn.Module):
    """Hands its input out as it came, whatever the shape."""

    def __init__(self, wrap=lambda x: x):
        super().__init__()
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(x)


@pytest.mark.parametrize(
    ("shape", "options", "expected"),
    [
        ((5,), {}, lambda x: x[:, None]),
        ((5, 4), {}, lambda x: x),
        ((5, 4, 3), {}, lambda x: x.mean(2)),
        ((5, 4, 3), {"feature_axis": -1}, lambda x: x.mean(1)),
        ((5, 4, 3, 2), {}, lambda x: x.mean((2, 3))),
        ((5, 4, 3, 2), {"feature_axis": -1}, lambda x: x.mean((1, 2))),
        ((5, 4, 3, 2, 2), {}, lambda x: x.mean((2, 3, 4))),
        ((5, 4, 3), {"pool": "flatten"}, lambda x: x.reshape(5, 12)),
        ((5, 4, 3), {"pool": lambda x: x[:, 0]}, lambda x: x[:, 0]),
    ],
)
def test_features_of_any_rank_become_rows(shape, options, expected):
    x = torch.arange(float(torch.tensor(shape).prod())).reshape(shape)
    torch.testing.assert_close(FeatureDensity(Echo(), "", **options).features(x), expected(x))


def test_features_inside_tuples_and_mappings():
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    for wrap in (lambda x: (x, None), lambda x: [(x,)], lambda x: {"hidden": x, "rest": 0}):
        torch.testing.assert_close(FeatureDensity(Echo(wrap), "").features(x), x)


def test_no_graph_is_built_and_features_are_no_alias_of_the_input():
    grads, x = [], torch.ones(3, 2, requires_grad=True)
    echo = Echo(lambda x: grads.append(torch.is_grad_enabled()) or x)
    FeatureDensity(echo, "").features(x).zero_()
    assert grads == [False] and x.sum() == 6


@pytest.mark.parametrize("by_label", [False, True])
def test_data_of_many_kinds(network, by_label):
    options = {"by_label": by_label, "mixture": GaussianMixture(1)}
    expected = scores(network, loader_of(X, LABELS), **options)
    dataset = torch.utils.data.TensorDataset(X, LABELS)
    for data in (dataset, {"x": X, "labels": LABELS}, (X.numpy(), LABELS.numpy()), [(X, LABELS)]):
        torch.testing.assert_close(scores(network, data, **options), expected)
    torch.testing.assert_close(scores(network, X, LABELS, **options), expected)
    for data in () if by_label else (X, X.split(80), [X[:120], X[120:]], X.numpy()):
        torch.testing.assert_close(scores(network, data, **options), expected)
    batches = [{"x": x, "labels": labels} for x, labels in loader_of(X, LABELS)]
    density = FeatureDensity(network, "body", **options).fit(batches)
    torch.testing.assert_close(density.score({"x": X}), expected)
    options["forward_fn"] = lambda model, inputs: model(inputs / 2)
    density = FeatureDensity(network, "body", **options).fit(loader_of(2 * X, LABELS))
    torch.testing.assert_close(density.score(2 * X), expected)


def test_examples_labelled_as_ignored_are_left_out_of_a_fit_by_label(network):
    ignored = torch.arange(len(X)) % 7 == 0
    ignored[32:64] = True
    density = FeatureDensity(network, "body", by_label=True)
    density.fit(loader_of(X, LABELS.masked_fill(ignored, -100)))
    expected = FeatureDensity(network, "body", by_label=True).fit(X[~ignored], LABELS[~ignored])
    assert density.mixture.classes.tolist() == [0, 1, 2]
    torch.testing.assert_close(density.class_scores(X), expected.class_scores(X))


def change_in_place(network):
    network.body[0].weight.data.mul_(-3)


def swap_two_weights(network):
    network.body[0].weight.data = network.body[0].weight.data.flip(0)


def take_a_training_step(network):
    network.train()(torch.randn(8, 2).double())


@pytest.mark.parametrize("change", [change_in_place, swap_two_weights, take_a_training_step])
def test_changed_weights_are_refused(network, change):
    density = FeatureDensity(network, "body", by_label=True).fit(X, LABELS)
    before = density.score(X)
    torch.testing.assert_close(copy.deepcopy(density).score(X), before)
    network.eval()(X)
    torch.testing.assert_close(density.score(X), before)
    change(network)
    for question in (density.score, density.class_scores):
        with pytest.raises(
            RuntimeError, match=r"weights changed after fit\(\).* Call fit\(\) again"
        ):
            question(X)
    assert torch.isfinite(density.fit(X, LABELS).score(X)).all()


def test_a_dataloader_of_single_precision(network):
    network.float()
    dataset = torch.utils.data.TensorDataset(X.float(), LABELS)
    loader = torch.utils.data.DataLoader(dataset, 50, shuffle=True, generator=torch.Generator())
    density = FeatureDensity(network, "body", by_label=True).fit(loader)
    assert density.score(X.float()).dtype == torch.float32
    assert torch.isfinite(density.score(X.float() * 1e3)).all()


def test_more_features_than_examples_stay_finite():
    x = torch.randn(30, 50, generator=torch.Generator().manual_seed(0))
    density = FeatureDensity(Echo(), "", by_label=True).fit(x, LABELS[:30])
    assert density.score(x * 10).max() < density.score(x).min() < torch.inf


@pytest.mark.parametrize(
    ("error", "message", "case"),
    [
        (ValueError, r"no layer 'tail'. It has: body, body.0", {"layer": "tail"}),
        (ValueError, "not a part of the model", {"layer": nn.Linear(2, 2)}),
        (ValueError, "pool must be 'mean', 'flatten' or a callable", {"pool": "max"}),
        (RuntimeError, "did not run in the forward pass", {"layer": "spare"}),
        (TypeError, "output is a torch.int64 tensor", {"pool": lambda z: z.argmax(1)}),
        (TypeError, "output is a str, not", {"pool": lambda z: "no"}),
        (TypeError, "needs batches", {"data": [X], "by_label": True}),
        (ValueError, "not inputs and one label each", {"data": X.split(120)}),
        (ValueError, "not inputs and one label each", {"data": (X, LABELS[:7])}),
        (
            ValueError,
            "are all labels -100, which",
            {"data": (X, 0 * LABELS - 100), "by_label": True},
        ),
        (TypeError, "are an iterator .list_iterator., which ends", {"data": iter([X])}),
        (ValueError, "NaN or infinity", {"data": X * float("nan")}),
    ],
)
def test_what_is_refused(network, error, message, case):
    batches, layer = case.pop("data", [(X, LABELS)]), case.pop("layer", "body")
    with pytest.raises(error, match=message):
        FeatureDensity(network, layer, **case).fit(batches)


def test_scores_need_a_fit(network):
    with pytest.raises(RuntimeError, match="Call fit"):
        FeatureDensity(network, "body").score(X)


@pytest.mark.cuda
@pytest.mark.parametrize("by_label", [False, True])
def test_on_cuda(network, by_label):
    here = FeatureDensity(network, "body", by_label=by_label).fit(loader_of(X, LABELS)).score(X)
    network.cuda()
    density = FeatureDensity(network, "body", by_label=by_label).fit(loader_of(X, LABELS))
    assert density.score(X).is_cuda and density.features(X).is_cuda
    torch.testing.assert_close(density.score(X).cpu(), here)
    if by_label:
        assert density.class_scores(X).is_cuda


def test_inputs_are_not_written_to():
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 4), nn.Tanh())
    x = torch.linspace(-1, 1, 90).view(30, 3)
    before = x.clone()
    FeatureDensity(model, "2").fit([(x, torch.arange(30) % 2)]).score(x)
    assert torch.equal(x, before)
