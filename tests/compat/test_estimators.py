"""The posterior of trained estimators: exact conversion, and predictions in their own terms."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from torch_lla_em import LinearisedLaplace
from torch_lla_em.compat import AverageHeads, posterior

pytest.importorskip("sklearn")

rng = np.random.default_rng(0)
X = rng.normal(size=(120, 4))
LABELS = np.array(["low", "middle", "high"])[
    (X[:, 0] > -0.5).astype(int) + (X[:, 0] + X[:, 1] > 0.5)
]
Y = np.sin(X[:, :2]) + 0.2 * rng.normal(size=(120, 2))


def trained(name, y, **options):
    from sklearn import neural_network

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not converged
        estimator = getattr(neural_network, name)(
            hidden_layer_sizes=(6, 5),
            max_iter=60,
            learning_rate_init=0.02,
            random_state=0,
            **options,
        )
        return estimator.fit(X, y)


@pytest.mark.parametrize("activation", ["relu", "tanh", "logistic", "identity"])
def test_a_perceptron_is_converted_exactly(activation):
    classifier = trained("MLPClassifier", LABELS, activation=activation)
    module = posterior(classifier).laplace.model
    found = module(torch.tensor(X)).softmax(-1).detach().numpy()
    np.testing.assert_allclose(found, classifier.predict_proba(X), rtol=1e-10, atol=1e-12)
    regressor = trained("MLPRegressor", Y, activation=activation)
    found = posterior(regressor).laplace.model(torch.tensor(X)).detach().numpy()
    np.testing.assert_allclose(found, regressor.predict(X), rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_classes_have_the_labels_of_the_estimator():
    classifier = trained("MLPClassifier", LABELS)
    la = posterior(classifier, num_samples=8).fit(X, LABELS)
    held_out = X + 0.1  # with targets by the same rule
    la.calibrate(held_out, classifier.predict(held_out))
    probs = la.predict_proba(X)
    np.testing.assert_allclose(probs.sum(1), 1)
    assert (la.predict(X) == LABELS).mean() > 0.7
    # the column of a class is that of the estimator
    assert np.corrcoef(probs.ravel(), classifier.predict_proba(X).ravel())[0, 1] > 0.8
    assert la.distribution(X).epistemic.shape == (120,)
    with pytest.raises(ValueError, match="has not seen: \\['other'\\]"):
        la.fit(X[:1], ["other"])


def test_two_classes_have_one_logit():
    y = np.where(LABELS == "high", "yes", "no")
    classifier = trained("MLPClassifier", y)
    la = posterior(classifier, num_samples=8)
    logit = la.laplace.model(torch.tensor(X)).sigmoid().detach().numpy()
    np.testing.assert_allclose(logit[:, 0], classifier.predict_proba(X)[:, 1])
    probs = la.fit(X, y).predict_proba(X)
    assert probs.shape == (120, 2) and (la.predict(X) == y).mean() > 0.8
    likelihood = np.where(y == "yes", probs[:, 1], probs[:, 0])
    assert -np.log(likelihood).mean() < 0.6


def test_several_labels_are_predicted_as_indicators():
    y = np.stack([X[:, 0] > 0, X[:, 1] > 0], axis=1).astype(int)
    la = posterior(trained("MLPClassifier", y), num_samples=8).fit(X, y)
    assert la.predict_proba(X).shape == (120, 2) and (la.predict(X) == y).mean() > 0.8


def test_a_regressor_has_standard_deviations():
    la = posterior(trained("MLPRegressor", Y), num_samples=8).fit(X, Y)
    mean, deviation = la.predict(X, return_std=True)
    assert mean.shape == deviation.shape == (120, 2)
    assert np.square(mean - Y).mean() < 0.2 and (deviation >= la.laplace.sigma_noise.item()).all()
    one = posterior(trained("MLPRegressor", Y[:, 0]), num_samples=8).fit(X, Y[:, 0])
    assert one.predict(X).shape == (120,)


def skorch_net(name, module, y, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        skorch = pytest.importorskip("skorch")
        torch.manual_seed(0)
        net = getattr(skorch, name)(module, max_epochs=40, lr=0.1, verbose=0, **options)
        return net.fit(X.astype(np.float32), y)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loss", ["NLLLoss", "CrossEntropyLoss"])
def test_a_classifier_of_skorch(loss):
    layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)]
    module = nn.Sequential(*layers, *[nn.Softmax(-1)] * (loss == "NLLLoss"))
    labels = np.searchsorted(np.unique(LABELS), LABELS)
    net = skorch_net("NeuralNetClassifier", module, labels, criterion=getattr(nn, loss))
    x = X.astype(np.float32)
    la = posterior(net, num_samples=8)
    found = la.laplace.model(la.inputs(x)).softmax(-1).detach().numpy()
    np.testing.assert_allclose(found, net.predict_proba(x), rtol=1e-4, atol=1e-6)
    assert (la.fit(x, labels).predict(x) == labels).mean() > 0.6
    with pytest.raises(TypeError, match="must be one array"):
        la.fit({"x": x}, labels)


@pytest.mark.filterwarnings("ignore")
def test_a_binary_classifier_and_a_regressor_of_skorch():
    x, y = X.astype(np.float32), (X[:, 0] > 0).astype(np.float32)
    net = skorch_net("NeuralNetBinaryClassifier", nn.Linear(4, 1), y)
    la = posterior(net, num_samples=8)
    found = la.laplace.model(la.inputs(x)).sigmoid().detach().numpy()[:, 0]
    np.testing.assert_allclose(found, net.predict_proba(x)[:, 1], rtol=1e-4)
    assert (la.fit(x, y).predict(x) == y).mean() > 0.8
    targets = Y.astype(np.float32)
    net = skorch_net("NeuralNetRegressor", nn.Linear(4, 2), targets)
    la = posterior(net, num_samples=8)
    np.testing.assert_allclose(la.laplace.model(la.inputs(x)).detach(), net.predict(x), rtol=1e-4)
    mean, deviation = la.fit(x, targets).predict(x, return_std=True)
    assert np.square(mean - Y).mean() < 0.6 and deviation.shape == (120, 2)
    net = skorch_net("NeuralNetRegressor", nn.Linear(4, 2), targets, criterion=nn.L1Loss)
    with pytest.raises(TypeError, match="criterion L1Loss"):
        posterior(net)


def test_estimators_without_a_network_are_refused():
    from sklearn.linear_model import LogisticRegression
    from sklearn.neural_network import MLPClassifier

    with pytest.raises(TypeError, match="LogisticRegression has no network"):
        posterior(LogisticRegression())
    with pytest.raises(ValueError, match="not trained"):
        posterior(MLPClassifier())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        skorch = pytest.importorskip("skorch")
    with pytest.raises(ValueError, match="not trained"):
        posterior(skorch.NeuralNetClassifier(nn.Linear(1, 1)))


def test_heads_are_averaged_as_probabilities():
    heads = nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3)))
    x = torch.tensor(X).float()
    expected = heads(x).softmax(-1).mean(1)
    torch.testing.assert_close(AverageHeads(heads)(x).softmax(-1), expected)
    torch.testing.assert_close(AverageHeads(heads, classes=False)(x), heads(x).mean(1))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arch_type", ["tabm", "tabm-mini"])
def test_a_tabm_has_a_posterior(arch_type):
    tabm = pytest.importorskip("tabm")
    torch.manual_seed(0)
    model = tabm.TabM.make(
        n_num_features=4, d_out=3, k=4, n_blocks=1, d_block=8, dropout=0.1, arch_type=arch_type
    )
    x, y = torch.tensor(X).float(), torch.tensor(np.searchsorted(np.unique(LABELS), LABELS))
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(60):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x).flatten(0, 1), y.repeat_interleave(4)).backward()
        optimiser.step()
    network = AverageHeads(model.eval())
    la = LinearisedLaplace(network, "classification", num_samples=8)
    la.fit(x, y, progress_bar=False)
    before = network(x).log_softmax(-1).gather(1, y[:, None]).mean()
    after = la.predict(x).log_prob(y).mean()
    assert after > before - 0.2 and la.certificate.max() < 1
