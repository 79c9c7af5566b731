"""Densities over a network's features: what they say, and what they leave alone."""

import copy

import pytest
import torch
from tiny import batched
from torch import nn
from torch.distributions import MultivariateNormal
from torch.testing import assert_close

from torch_lla_em import Adapter
from torch_lla_em.mixtures import GaussianMixture
from torch_lla_em.mixtures.feature_density import FeatureDensity


class Network(nn.Module):
    """A network that minds its mode, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5))
        self.head, self.spare = nn.Linear(6, 3), nn.Linear(2, 2)
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
    labels, generator = torch.arange(n) % 3, torch.Generator().manual_seed(0)
    centres = torch.tensor([[0.0, 2.0], [2.0, -1.0], [-2.0, -1.0]])
    return (centres[labels] + 0.4 * torch.randn(n, 2, generator=generator)).double(), labels


def loader(*tensors):
    return batched(32, *tensors)


def of_body(network, by_label=False, mixture=None, **options):
    mixture = mixture or GaussianMixture(1)
    return FeatureDensity(network, "body", mixture, by_label=by_label, **options)


def test_a_gaussian_for_each_class(network):
    x, labels = data()
    network.train()
    density = of_body(network, True).fit(loader(x, labels))
    assert network.training and not network.body._forward_hooks and network.calls == 1
    with torch.no_grad():
        z = copy.deepcopy(network).eval().body(x)
    weights, means, covariances = density.mixture.parameters
    own = torch.stack([z[labels == label].mean(0) for label in range(3)])
    assert_close(means, own, atol=0.01, rtol=0)  # the prior is a hundredth of an example
    log_joint = MultivariateNormal(means, covariances).log_prob(z[:, None]) + weights.log()
    assert_close(density.class_scores(x), log_joint)
    assert_close(density.score(x), log_joint.logsumexp(1))


class Echo(nn.Module):
    """Hands its input out as it came, whatever the shape."""

    def __init__(self, wrap=lambda x: x):
        super().__init__()
        self.wrap, self.weight = wrap, nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.wrap(x)


def test_features_of_any_rank_become_rows():
    for shape, pool, expected in (
        ((5,), None, lambda x: x[:, None]),
        ((5, 4), None, lambda x: x),
        ((5, 4, 3, 2), None, lambda x: x.mean((2, 3))),
        ((5, 4, 3), lambda x: x.mean(1), lambda x: x.mean(1)),
    ):
        x = torch.arange(float(torch.tensor(shape).prod())).reshape(shape)
        assert_close(FeatureDensity(Echo(), "", pool=pool).features(x), expected(x))


def test_features_are_of_any_layer_inside_tuples_and_without_weights(network):
    x = data()[0]
    for wrap in (lambda x: [(x, None)], lambda x: {"hidden": x, "rest": 0}):
        assert_close(FeatureDensity(Echo(wrap), "").features(x), x)
    still = copy.deepcopy(network).eval()
    for layer, expected in (("", still(x)), (network.head, still(x)), ("body.0", still.body[0](x))):
        assert_close(FeatureDensity(network, layer).features(x), expected.detach())
    x = torch.randn(30, 50, generator=torch.Generator().manual_seed(0))  # more features than rows
    plain = FeatureDensity(nn.Sequential(nn.Flatten()), "0", by_label=True)
    plain.fit([(x, torch.arange(30) % 3)])
    assert plain.score(x).min() > plain.score(x * 10).max()


@pytest.mark.parametrize("by_label", [False, True])
def test_data_of_any_form_are_the_same(network, by_label):
    x, labels = data(300)

    def score(*args, inputs=x, **options):
        return of_body(network, by_label, **options).fit(*args).score(inputs)

    expected = score(loader(x, labels))
    dataset = torch.utils.data.TensorDataset(x, labels)
    named = [{"x": a, "labels": b} for a, b in loader(x, labels)]
    for args in ((x, labels), ([(x, labels)],), (dataset,)):
        assert_close(score(*args), expected)
    for args in (named, [{"x": x, "labels": labels}]) if by_label else ():
        assert_close(score(args, inputs={"x": x}), expected)
    named = [{"x": 2 * a, "kind": b} for a, b in loader(x, labels)]
    halved = Adapter(lambda model, inputs: model(inputs["x"] / 2), lambda batch: batch["kind"])
    assert_close(score(named, inputs={"x": 2 * x}, adapter=halved), expected)
    with pytest.raises(TypeError, match=r"pass adapter=Adapter\(outputs"):
        of_body(network, forward_fn=halved.outputs)
    if by_label:
        assert_close(score((x, labels)), expected)
    for alone in () if by_label else (x, x.split(100), [x[:150], x[150:]]):
        assert_close(score(alone), expected)


def test_ignored_labels_are_left_out_and_changed_weights_raise(network):
    x, labels = data()
    ignored = torch.arange(len(x)) % 7 == 0
    ignored[32:64] = True
    density = of_body(network, True).fit(loader(x, labels.masked_fill(ignored, -100)))
    expected = of_body(network, True).fit(x[~ignored], labels[~ignored])
    assert density.mixture.classes.tolist() == [0, 1, 2]
    assert_close(copy.deepcopy(density).class_scores(x), expected.class_scores(x))
    network.eval()(x)
    assert_close(density.class_scores(x), expected.class_scores(x))
    network.body[0].weight.data = network.body[0].weight.data.flip(0)
    words = r"weights changed after fit\(\): call fit\(\) again"
    for question in (density.score, density.class_scores):
        with pytest.raises(RuntimeError, match=words):
            question(x)
    assert torch.isfinite(density.fit(x, labels).score(x)).all()


UNSUITABLE = [
    (AttributeError, "has no attribute `tail`", lambda net, x, y: FeatureDensity(net, "tail")),
    (RuntimeError, "did not run", lambda net, x, y: FeatureDensity(net, "spare").fit([x])),
    (TypeError, "a torch.int64 tensor", lambda net, x, y: FeatureDensity(Echo(), "").features(y)),
    (TypeError, "No targets found", lambda net, x, y: of_body(net, True).fit([x])),
    (ValueError, "all labels -100", lambda net, x, y: of_body(net, True).fit(x, 0 * y - 100)),
    (ValueError, "exhausted after one", lambda net, x, y: of_body(net).fit(iter(x.split(32)))),
    (RuntimeError, "Call fit", lambda net, x, y: of_body(net).score(x)),
]


@pytest.mark.parametrize(("error", "message", "call"), UNSUITABLE)
def test_unsuitable_layers_and_data_raise(network, error, message, call):
    with pytest.raises(error, match=message):
        call(network, *data())


@pytest.mark.cuda
@pytest.mark.parametrize("by_label", [False, True])
def test_a_gpu_agrees_with_the_cpu(network, by_label):
    x, labels = data()
    here = of_body(network, by_label).fit(loader(x, labels)).score(x)
    network.cuda()
    density = of_body(network, by_label).fit(loader(x, labels))
    assert density.score(x).is_cuda and density.features(x).is_cuda
    assert_close(density.score(x).cpu(), here)
    assert not by_label or density.class_scores(x).is_cuda
