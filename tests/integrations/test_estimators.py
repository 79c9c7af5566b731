"""The posterior of trained estimators: exact conversion, and predictions in their own terms."""

import warnings

import numpy as np
import pytest
import torch

from torch_lla_em.integrations.estimators import posterior

pytest.importorskip("sklearn")

rng = np.random.default_rng(0)
X = rng.normal(size=(120, 4))
LABELS = np.array(["low", "middle", "high"])[
    (X[:, 0] > -0.5).astype(int) + (X[:, 0] + X[:, 1] > 0.5)
]
Y = np.sin(X[:, :2]) + 0.2 * rng.normal(size=(120, 2))


HOW = {"hidden_layer_sizes": (6, 5), "max_iter": 40, "learning_rate_init": 0.02, "random_state": 0}


def trained(name, y, x=X, **options):
    from sklearn import neural_network

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not converged
        return getattr(neural_network, name)(**HOW, **options).fit(x, y)


@pytest.mark.parametrize("activation", ["relu", "tanh", "logistic", "identity"])
def test_a_perceptron_is_converted_exactly(activation):
    regressor = trained("MLPRegressor", Y, activation=activation)
    found = posterior(regressor).laplace.model(torch.tensor(X)).detach().numpy()
    np.testing.assert_allclose(found, regressor.predict(X), rtol=1e-10, atol=1e-12)


def test_classes_have_the_labels_of_the_estimator():
    classifier = trained("MLPClassifier", LABELS)
    la = posterior(classifier, num_samples=8).fit(X, LABELS)
    logits = la.laplace.model(torch.tensor(X)).detach()
    np.testing.assert_allclose(logits.softmax(-1), classifier.predict_proba(X), rtol=1e-10)
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


def test_two_classes_have_one_logit_and_their_own_labels():
    y = np.where(LABELS == "high", "yes", "no")
    classifier = trained("MLPClassifier", y)
    la = posterior(classifier, num_samples=8)
    logit = la.laplace.model(torch.tensor(X)).sigmoid().detach().numpy()
    np.testing.assert_allclose(logit[:, 0], classifier.predict_proba(X)[:, 1])
    probs = la.fit(X, y.tolist()).predict_proba(X)
    assert probs.shape == (120, 2) and (la.predict(X) == y).mean() > 0.8
    likelihood = np.where(y == np.unique(y)[1], probs[:, 1], probs[:, 0])
    assert -np.log(likelihood).mean() < 0.6
    for other in (LABELS, y == "yes", np.full(120, 2)):
        with pytest.raises(ValueError, match="has not seen"):
            la.fit(X, other)


def test_columns_that_the_estimator_would_refuse_are_refused():
    pandas, y = pytest.importorskip("pandas"), LABELS == "high"
    frame = pandas.DataFrame(X, columns=list("abcd"))
    la = posterior(trained("MLPClassifier", y, frame), num_samples=8).fit(frame, y)
    with pytest.raises(ValueError, match="same order"):
        la.predict(frame[list("dcba")])
    with pytest.raises(ValueError, match="missing"):
        la.predict(frame[list("abc")])
    sparse = pytest.importorskip("scipy.sparse").csr_matrix(X)
    own = posterior(trained("MLPClassifier", y), num_samples=8).fit(sparse, y)
    np.testing.assert_allclose(own.predict_proba(sparse), own.predict_proba(X))


def test_several_labels_and_continuous_targets():
    y = np.stack([X[:, 0] > 0, X[:, 1] > 0], axis=1).astype(int)
    la = posterior(trained("MLPClassifier", y), num_samples=8).fit(X, y)
    assert la.predict_proba(X).shape == (120, 2) and (la.predict(X) == y).mean() > 0.8
    for values in (Y, Y[:, 0]):
        la = posterior(trained("MLPRegressor", values), num_samples=8).fit(X, values)
        mean, deviation = la.predict(X, return_std=True)
        assert mean.shape == deviation.shape == values.shape
        assert np.square(mean - values).mean() < 0.2
        assert (deviation >= la.laplace.sigma_noise.item()).all()


def test_estimators_without_a_network_are_refused():
    from sklearn.neural_network import MLPClassifier

    with pytest.raises(TypeError, match="object cannot be converted"):
        posterior(object())
    with pytest.raises(ValueError, match="not fitted yet"):
        posterior(MLPClassifier())
