"""Densities over a network's features: what they say, and what they leave alone."""

import copy

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal

from torch_lla_em.mixtures import GaussianMixture
from torch_lla_em.mixtures.feature_density import FeatureDensity


class Network(nn.Module):
    """A network that minds its mode, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5))
        self.head = nn.Linear(6, 3)
        self.spare = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return self.head(self.body(x))


@pytest.fixture
def network():
    torch.manual_seed(0)
    network = Network()
    network(torch.randn(50, 2))
    return network.double()


def data(n=240):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(n) % 3
    centres = torch.tensor([[0.0, 2.0], [2.0, -1.0], [-2.0, -1.0]])
    x = centres[labels] + 0.4 * torch.randn(n, 2, generator=generator)
    return x.double(), labels


def loader(*tensors):
    return list(zip(*(tensor.split(32) for tensor in tensors), strict=True))


def features(network, x):
    """The features of ``body``, by hand."""
    still = copy.deepcopy(network).eval()
    with torch.no_grad():
        return still.body(x)


@pytest.mark.parametrize("training", [True, False])
def test_a_gaussian_for_each_class(network, training):
    x, labels = data()
    network.train(training)
    density = FeatureDensity(network, "body", GaussianMixture(1), by_label=True)
    density.fit(loader(x, labels))
    assert network.training == training and not network.body._forward_hooks and network.calls == 1
    z, log_joint = features(network, x), []
    for label in range(3):
        own = z[labels == label]
        normal = MultivariateNormal(own.mean(0), own.T.cov(correction=0))
        log_joint.append(normal.log_prob(z) + torch.tensor(len(own) / len(z)).double().log())
    log_joint = torch.stack(log_joint, 1)
    torch.testing.assert_close(density.class_scores(x), log_joint)
    torch.testing.assert_close(density.score(x), log_joint.logsumexp(1))


def test_a_network_without_weights_has_a_density_too():
    x = torch.randn(50, 3)
    density = FeatureDensity(nn.Sequential(nn.Flatten()), "0", GaussianMixture(1)).fit([x])
    assert density.score(x).shape == (50,)


@pytest.mark.parametrize("layer", ["", "head", "body.0"])
def test_any_layer_by_name_or_itself(network, layer):
    x, labels = data()
    module = network.get_submodule(layer)
    still = copy.deepcopy(network).eval()
    expected = {"": still, "head": still, "body.0": still.body[0]}[layer](x).detach()
    for choice in (layer, module):
        torch.testing.assert_close(FeatureDensity(network, choice).features(x), expected)


class Echo(nn.Module):
    """Hands its input out as it came, whatever the shape."""

    def __init__(self, wrap=lambda x: x):
        super().__init__()
        self.wrap, self.weight = wrap, nn.Parameter(torch.zeros(()))

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


def test_dicts_and_forward_fn(network):
    x, labels = data()
    expected = FeatureDensity(network, "body", by_label=True).fit(loader(x, labels)).score(x)
    batches = [{"x": a, "labels": b} for a, b in zip(x.split(32), labels.split(32), strict=True)]
    density = FeatureDensity(network, "body", by_label=True).fit(batches)
    torch.testing.assert_close(density.score({"x": x}), expected)
    density = FeatureDensity(network, "body", by_label=True).fit({"x": x, "labels": labels})
    torch.testing.assert_close(density.score({"x": x}), expected)
    scaled = FeatureDensity(
        network, "body", by_label=True, forward_fn=lambda model, inputs: model(inputs / 2)
    )
    torch.testing.assert_close(scaled.fit(loader(2 * x, labels)).score(2 * x), expected)


@pytest.mark.parametrize("by_label", [False, True])
def test_tensors_arrays_and_datasets_are_data_too(network, by_label):
    x, labels = data(300)

    def score(*args):
        density = FeatureDensity(network, "body", GaussianMixture(1), by_label=by_label)
        return density.fit(*args).score(x)

    expected = score(loader(x, labels))
    dataset = torch.utils.data.TensorDataset(x, labels)
    for args in ((x, labels), ([(x, labels)],), (x.numpy(), labels.numpy()), (dataset,)):
        torch.testing.assert_close(score(*args), expected)
    if by_label:
        torch.testing.assert_close(score((x, labels)), expected)
    else:
        for data_alone in (x, x.split(100), x.split(150), [x[:150], x[150:]]):
            torch.testing.assert_close(score(data_alone), expected)


def test_ignored_labels_are_left_out(network):
    x, labels = data()
    ignored = torch.arange(len(x)) % 7 == 0
    ignored[32:64] = True
    density = FeatureDensity(network, "body", by_label=True)
    density.fit(loader(x, labels.masked_fill(ignored, -100)))
    expected = FeatureDensity(network, "body", by_label=True).fit(x[~ignored], labels[~ignored])
    assert density.mixture.classes.tolist() == [0, 1, 2]
    torch.testing.assert_close(density.class_scores(x), expected.class_scores(x))


def test_changed_weights_raise(network):
    x, labels = data()
    density = FeatureDensity(network, "body", by_label=True).fit(x, labels)
    before = density.score(x)
    torch.testing.assert_close(copy.deepcopy(density).score(x), before)
    network.eval()(x)
    torch.testing.assert_close(density.score(x), before)
    network.body[0].weight.data = network.body[0].weight.data.flip(0)
    for question in (density.score, density.class_scores):
        with pytest.raises(
            RuntimeError, match=r"weights changed after fit\(\).* Call fit\(\) again"
        ):
            question(x)
    assert torch.isfinite(density.fit(x, labels).score(x)).all()


def test_more_features_than_examples():
    x = torch.randn(30, 50, generator=torch.Generator().manual_seed(0))
    density = FeatureDensity(Echo(), "", by_label=True).fit([(x, torch.arange(30) % 3)])
    assert torch.isfinite(density.score(x)).all()
    assert density.score(x).min() > density.score(x * 10).max()


def of_body(network, by_label=False):
    return FeatureDensity(network, "body", by_label=by_label)


UNSUITABLE = [
    (AttributeError, "has no attribute `tail`", lambda net, x, y: FeatureDensity(net, "tail")),
    (ValueError, "not a part", lambda net, x, y: FeatureDensity(net, nn.Linear(2, 2))),
    (ValueError, "pool must be", lambda net, x, y: FeatureDensity(net, "body", pool="max")),
    (RuntimeError, "did not run", lambda net, x, y: FeatureDensity(net, "spare").fit([x])),
    (TypeError, "a torch.int64 tensor", lambda net, x, y: FeatureDensity(Echo(), "").features(y)),
    (TypeError, "a str, not", lambda net, x, y: FeatureDensity(Echo(str), "").features(x)),
    (TypeError, "No targets found", lambda net, x, y: of_body(net, True).fit([x])),
    (ValueError, "one integer per example", lambda net, x, y: of_body(net, True).fit(x, y[:7])),
    (ValueError, "all labels -100", lambda net, x, y: of_body(net, True).fit(x, 0 * y - 100)),
    (ValueError, "exhausted after one", lambda net, x, y: of_body(net).fit(iter(x.split(32)))),
    (RuntimeError, "Call fit", lambda net, x, y: of_body(net).score(x)),
    (ValueError, "NaN or infinity", lambda net, x, y: of_body(net).fit([x * torch.nan])),
]


@pytest.mark.parametrize(("error", "message", "call"), UNSUITABLE)
def test_unsuitable_layers_and_data_raise(network, error, message, call):
    with pytest.raises(error, match=message):
        call(network, *data())


@pytest.mark.cuda
@pytest.mark.parametrize("by_label", [False, True])
def test_a_gpu_agrees_with_the_cpu(network, by_label):
    x, labels = data()
    here = FeatureDensity(network, "body", by_label=by_label).fit(loader(x, labels)).score(x)
    network.cuda()
    density = FeatureDensity(network, "body", by_label=by_label).fit(loader(x, labels))
    assert density.score(x).is_cuda and density.features(x).is_cuda
    torch.testing.assert_close(density.score(x).cpu(), here)
    if by_label:
        assert density.class_scores(x).is_cuda
