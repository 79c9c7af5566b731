"""The estimators for scikit-learn, and scikit-learn's own checks of them."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from daily import daily
from torch import nn

pytest.importorskip("sklearn")

from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from torch_lla_em.integrations.sklearn import LaplaceClassifier, LaplaceRegressor

FAST = {"epochs": 10, "learning_rate": 0.05, "num_samples": 4, "hidden": (8,), "random_state": 0}
"""20 steps for 150 examples."""


def linear(features, outputs):
    return nn.Linear(features, outputs)


def rows(count=150):
    x = np.random.default_rng(0).normal(size=(count, 3))
    return x, np.where(x[:, 0] + x[:, 1] > 0, "same", "other")


def mixed(count=250):
    """A frame with numbers and strings, string classes, and a target in large units with noise of 5."""
    generator = np.random.default_rng(0)
    x, colour = generator.normal(size=count), generator.choice(["red", "blue"], count)
    frame = pytest.importorskip("pandas").DataFrame({"size": x, "colour": colour})
    signal = x + (colour == "red") + 0.1 * generator.normal(size=count)
    return frame, np.where(signal > 0.5, "yes", "no"), 1000 + 50 * signal


def in_pipeline(estimator):
    columns = (StandardScaler(), ["size"]), (OneHotEncoder(), ["colour"])
    return make_pipeline(make_column_transformer(*columns, sparse_threshold=0), estimator)


@pytest.fixture(scope="module")
def classifier():
    frame, labels, _ = mixed()
    return in_pipeline(LaplaceClassifier(**FAST, validation_fraction=0.3)).fit(frame, labels)


@pytest.fixture(scope="module")
def regressor():
    frame, _, y = mixed()
    return in_pipeline(LaplaceRegressor(linear, **FAST, validation_fraction=0.3)).fit(frame, y)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [LaplaceClassifier, LaplaceRegressor])
@pytest.mark.filterwarnings("ignore")
def test_the_checks_of_scikit_learn_pass(estimator):
    options = {"epochs": 100, "hidden": 20, "num_samples": 4, "random_state": 0}
    found = check_estimator(estimator(**options), on_fail=None)
    failed = [(r["check_name"], r["exception"]) for r in found if r["status"] == "failed"]
    assert len(found) > 40 and not failed, failed


def test_a_classifier_of_a_mixed_frame(classifier):
    frame, labels, _ = mixed()
    assert list(classifier.classes_) == ["no", "yes"]
    assert (classifier.predict(frame) == labels).mean() > 0.9
    encoded, own = classifier[:-1].transform(frame), classifier[-1]
    la = own.laplace_
    assert la.num_data == 175 and la.calibration.num_rows == 75
    probs = own.predict_proba(encoded)
    np.testing.assert_allclose(probs, la(torch.tensor(encoded)).numpy())
    np.testing.assert_allclose(probs.sum(1), 1)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(own)).predict_proba(encoded), probs)
    assert own.predict_proba(encoded.astype("float32")).dtype == "float64"
    sets = own.predict_set(encoded, 0.9)
    inside = sets[np.arange(250), (labels == "yes").astype(int)]
    assert sets.shape == (250, 2) and inside.mean() > 0.85
    far = encoded * 40
    assert own.is_ood(far).mean() > 0.5 > 0.15 > own.is_ood(encoded).mean()


def test_a_regressor_of_a_mixed_frame(regressor):
    frame, _, y = mixed()
    encoded, own = regressor[:-1].transform(frame), regressor[-1]
    assert type(own.laplace_.model[1]) is nn.Linear
    mean, std = own.predict(encoded, return_std=True)
    assert mean.shape == std.shape == (250,) and abs(std.mean() / 5 - 1) < 0.3
    assert own.score(encoded, y) > 0.9
    lower, upper = own.predict_interval(encoded, 0.9)
    assert lower.shape == y.shape and 0.85 < ((lower <= y) & (y <= upper)).mean() < 0.98
    np.testing.assert_allclose((lower + upper) / 2, mean, atol=1)
    assert own.is_ood(encoded * 40).mean() > 0.5


def test_estimators_in_pipelines_are_cloned_and_cross_validated():
    x, y = rows()
    pipeline = make_pipeline(StandardScaler(), LaplaceClassifier(linear, **FAST))
    assert cross_val_score(clone(pipeline), x, y, cv=2).mean() > 0.8


def dropping(features, outputs):
    return nn.Sequential(nn.Linear(features, 6), nn.Dropout(0.5), nn.Linear(6, outputs))


def test_a_seed_gives_the_same_results_in_threads_and_leaves_the_global_generator():
    """Initial weights and dropout are drawn from the generator that all threads share."""
    x, y = rows()
    before, parts = torch.get_rng_state(), [slice(0, 100), slice(50, 150)]

    def fitted(part):
        return LaplaceClassifier(dropping, **FAST).fit(x[part], y[part]).predict_proba(x)

    serial = [fitted(part) for part in parts]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(fitted, 2 * parts))
    np.testing.assert_allclose(found, 2 * serial, rtol=1e-6)
    assert torch.equal(before, torch.get_rng_state())


def test_several_targets():
    x, y = rows()
    both = np.stack([x[:, 0], -x[:, 1]], 1) + 0.1 * (y == "same")[:, None]
    regressor = LaplaceRegressor(linear, **FAST).fit(x, both)
    mean, std = regressor.predict(x, return_std=True)
    assert mean.shape == std.shape == (150, 2)


@pytest.mark.parametrize(("epochs", "passes"), daily((7, 7), rest=[(1, 1), (None, 500)]))
def test_networks_are_trained_for_the_number_of_epochs(epochs, passes):
    calls = []

    class Counted(nn.Linear):
        def forward(self, x):
            if self.training:
                calls.append(len(x))
            return super().forward(x)

    x, y = rows(256)
    options = {**FAST, "epochs": epochs, "validation_fraction": 0.0}
    LaplaceClassifier(Counted, **options).fit(x, y)
    assert calls == [128] * 2 * passes  # 1,000 gradient steps by default


def test_hyperparameters_and_targets_are_checked(caplog):
    x, labels = rows(30)
    good, ones = np.arange(30) % 3, np.ones(30)
    wrong = {
        "validation_fraction": [1.0, -0.1, float("nan")],
        "hidden": [0, (5, 0), (5.5,)],
        "epochs": [0, 2.5],
    }
    for estimator in (LaplaceClassifier, LaplaceRegressor):
        with pytest.raises(NotFittedError):
            estimator().predict(x)
        for name, value in ((key, value) for key in wrong for value in wrong[key]):
            with pytest.raises(ValueError, match=f"{name} must be"):
                estimator(**{**FAST, name: value}).fit(x, good)

    def refused(words, estimator, y):
        with pytest.raises(ValueError, match=words):
            estimator(**FAST).fit(x, y)

    refused("at least two classes", LaplaceClassifier, 0 * ones)
    for y in (ones, np.zeros((30, 2)), np.full(30, 1e9, dtype="float32")):
        refused("All targets are equal", LaplaceRegressor, y)
    for dtype in (str, object):
        y = np.sort(labels)[::-1].astype(dtype)
        refused("strings: use LaplaceClassifier", LaplaceRegressor, y)
    some = np.stack([x[:, 0] + (labels == "same"), ones], 1)
    fitted = LaplaceRegressor(linear, **FAST | {"epochs": 100}, weight_decay=0.0).fit(x, some)
    assert fitted.predict(x)[:, 1] == pytest.approx(1, abs=0.2)
    assert "not calibrated: validation_fraction=0.1 holds out fewer" in caplog.text
    with pytest.raises(ValueError, match="validation set.*calibrate"):
        fitted.predict_interval(x)


SCALES = daily(
    (1e-200, "float64"), rest=[(1e-27, "float32"), (1e27, "float32"), (1e200, "float64")]
)


@pytest.mark.parametrize(("scale", "dtype"), SCALES)
def test_units_do_not_matter_to_estimators_and_one_hidden_layer_is_a_number(scale, dtype):
    x, y = rows()
    x = x.astype(dtype)
    scale, near = x.dtype.type(scale), 1e-4 if dtype == "float64" else 1e-2
    one, other = (
        LaplaceClassifier(**FAST | {"hidden": 5}),
        LaplaceClassifier(**FAST | {"hidden": (5,)}),
    )
    expected = one.fit(x, y).predict_proba(x)
    np.testing.assert_allclose(
        other.fit(scale * x, y).predict_proba(scale * x), expected, near, near
    )
    assert len(one.laplace_.model[1]) == 3
    targets = x[:, 0] + x[:, 1] + 0.1 * x[:, 2] ** 2
    means = LaplaceRegressor(**FAST).fit(x, targets).predict(x, return_std=True)
    found = LaplaceRegressor(**FAST).fit(scale * x, scale * targets)
    for one, other in zip(found.predict(scale * x, return_std=True), means):
        np.testing.assert_allclose(one / scale, other, near, near)


def test_the_default_weight_decay_is_300_over_the_number_of_examples():
    x, y = rows(400)
    options = FAST | {"epochs": 2, "validation_fraction": 0.0}
    found = [
        LaplaceClassifier(linear, **options, weight_decay=decay).fit(x, y).predict_proba(x)
        for decay in (None, 0.75, 0.0)
    ]
    np.testing.assert_array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])
