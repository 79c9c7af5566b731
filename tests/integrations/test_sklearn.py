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


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [LaplaceClassifier, LaplaceRegressor])
@pytest.mark.filterwarnings("ignore")
def test_the_checks_of_scikit_learn_pass(estimator):
    options = {"epochs": 100, "hidden": 20, "num_samples": 4, "random_state": 0}
    # weights and repetitions give different batches in training
    allowed = {"check_sample_weight_equivalence_on_dense_data": "batches differ"}
    found = check_estimator(estimator(**options), expected_failed_checks=allowed, on_fail=None)
    failed = [(r["check_name"], r["exception"]) for r in found if r["status"] == "failed"]
    assert len(found) > 40 and not failed, failed


def test_a_classifier_of_a_mixed_frame():
    frame, labels, _ = mixed()
    whole = in_pipeline(LaplaceClassifier(**FAST, validation_fraction=0.3)).fit(frame, labels)
    assert list(whole.classes_) == ["no", "yes"]
    assert (whole.predict(frame) == labels).mean() > 0.9
    encoded, own = whole[:-1].transform(frame), whole[-1]
    la = own.laplace_
    assert la.num_data == 175 and la.calibration.num_rows == 75
    probs = own.predict_proba(encoded)
    np.testing.assert_allclose(probs, la(torch.tensor(encoded)).numpy())
    np.testing.assert_allclose(probs.sum(1), 1)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(own)).predict_proba(encoded), probs)
    sets = own.predict_set(encoded, 0.9)
    inside = sets[np.arange(250), (labels == "yes").astype(int)]
    assert sets.shape == (250, 2) and inside.mean() > 0.85
    assert own.is_ood(encoded * 40).mean() > 0.5 > 0.15 > own.is_ood(encoded).mean()
    assert cross_val_score(clone(whole), frame, labels, cv=2).mean() > 0.8


def test_a_regressor_of_a_mixed_frame():
    frame, _, y = mixed()
    whole = in_pipeline(LaplaceRegressor(linear, **FAST, validation_fraction=0.3)).fit(frame, y)
    encoded, own = whole[:-1].transform(frame), whole[-1]
    assert type(own.laplace_.model[1]) is nn.Linear
    mean, std = own.predict(encoded, return_std=True)
    assert mean.shape == std.shape == (250,) and abs(std.mean() / 5 - 1) < 0.3
    assert own.score(encoded, y) > 0.9
    lower, upper = own.predict_interval(encoded, 0.9)
    assert lower.shape == y.shape and 0.85 < ((lower <= y) & (y <= upper)).mean() < 0.98
    np.testing.assert_allclose((lower + upper) / 2, mean, atol=1)
    assert own.is_ood(encoded * 40).mean() > 0.5


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


@pytest.mark.parametrize(("epochs", "passes"), daily((7, 7), rest=[(None, 250)]))
def test_epochs_and_weight_decay_of_the_training(epochs, passes):
    """The default weight decay is 300 over the number of examples, 1 at most; 1,000 steps are the default."""
    calls = []

    class Counted(nn.Linear):
        def forward(self, x):
            if self.training:
                calls.append(len(x))
            return super().forward(x)

    def probs(decay, weight=1.0):
        x, y = rows(400)
        weights = np.full(400, weight)
        how = {**FAST, "epochs": epochs, "validation_fraction": 0.0, "weight_decay": decay}
        return LaplaceClassifier(Counted, **how).fit(x, y, weights).predict_proba(x)

    found = probs(None)
    assert calls == [100] * 4 * passes
    np.testing.assert_array_equal(found, probs(0.75))
    assert not np.array_equal(found, probs(1.0))
    np.testing.assert_array_equal(probs(None, 2.0), probs(0.375, 2.0))  # 400 that count twice


def test_weights_count_as_repetitions_and_0_as_an_absence():
    """In the network's loss, the standard deviation of the noise and the posterior."""
    x, labels = rows(90)
    weights = np.where(np.arange(90) % 3 == 0, 0.0, 1.0)
    options = FAST | {"validation_fraction": 0.0}
    for kind, y in ((LaplaceClassifier, labels), (LaplaceRegressor, x[:, 0] + (labels == "same"))):
        weighted = kind(**options).fit(x, y, weights)
        without = kind(**options).fit(x[weights > 0], y[weights > 0], sample_weight=np.ones(60))
        np.testing.assert_allclose(weighted.predict(x) == without.predict(x), True)
    same = kind(**options).fit(x, y, np.full(90, 3.0)).laplace_
    assert same.likelihood.sigma_noise > 0 and same.num_data == 90
    # a linear network in one batch, without weight decay, has the weighted least squares
    options |= {"epochs": 400, "weight_decay": 0.0, "learning_rate": 0.05}
    some, weights = x[:, :1], np.where(labels == "same", 4.0, 1.0)
    found = LaplaceRegressor(linear, **options).fit(some, y, weights)
    design, root = np.stack([np.ones(90), some[:, 0]], 1), np.sqrt(weights)
    due = np.linalg.lstsq(root[:, None] * design, root * y, rcond=None)[0]
    np.testing.assert_allclose(found.predict(some), design @ due, atol=0.02)
    sigma = np.sqrt(np.average((design @ due - y) ** 2, weights=weights)) / y.std()
    assert found.laplace_.likelihood.sigma_noise.item() == pytest.approx(sigma, rel=1e-3)
    (batch,), where = found.laplace_.trained_with  # of the posterior
    np.testing.assert_allclose((batch[1].mean(), batch[1].numpy().std()), (0, 1), 1e-5, 1e-5)
    assert where == "last" and sorted(batch[2].tolist()) == sorted(weights)
    for bad in (np.ones(89), np.zeros(90), np.ones((90, 1)), -weights):
        with pytest.raises(ValueError, match="sample_weight"):
            LaplaceRegressor(**FAST).fit(x, y, bad)


WRONG = {"validation_fraction": [1.0, float("nan")], "hidden": [(5, 0), (5.5,)], "epochs": [0, 2.5]}


def test_hyperparameters_and_targets_are_checked(caplog):
    x, labels = rows(30)
    for name, value in ((key, value) for key in WRONG for value in WRONG[key]):
        with pytest.raises((TypeError, ValueError), match=f"{name} must be"):
            LaplaceRegressor(**{**FAST, name: value}).fit(x, np.arange(30))
    ones, words = np.ones(30), np.sort(labels)[::-1]
    for kind, y, message in (
        (LaplaceClassifier, 0 * ones, "at least two classes"),
        (LaplaceRegressor, ones, "All targets are equal"),
        (LaplaceRegressor, np.full(30, 1e9, dtype="float32"), "All targets are equal"),
        (LaplaceRegressor, words, "could not convert string to float"),
        (LaplaceRegressor, words.astype(object), "could not convert string to float"),
    ):
        with pytest.raises(NotFittedError):
            kind().predict(x)
        with pytest.raises(ValueError, match=message):
            kind(**FAST).fit(x, y)
    some = np.stack([x[:, 0] + (labels == "same"), ones], 1)
    fitted = LaplaceRegressor(linear, **FAST | {"epochs": 100}, weight_decay=0.0).fit(x, some)
    mean, deviation = fitted.predict(x, return_std=True)
    assert mean.shape == deviation.shape == (30, 2) and mean[:, 1] == pytest.approx(1, abs=0.2)
    assert "not calibrated: validation_fraction=0.1 holds out fewer" in caplog.text
    with pytest.raises(ValueError, match="validation set.*calibrate"):
        fitted.predict_interval(x)


SCALES = daily(
    (1e-200, "float64"), rest=[(1e-27, "float32"), (1e27, "float32"), (1e200, "float64")]
)


@pytest.mark.parametrize(("scale", "dtype"), SCALES)
def test_units_do_not_matter_to_estimators_and_one_hidden_layer_is_a_number(scale, dtype):
    x, y = rows()
    x, near = x.astype(dtype), 1e-4 if dtype == "float64" else 1e-2
    scale = x.dtype.type(scale)
    one = LaplaceClassifier(**FAST | {"hidden": 5}).fit(x, y)
    other = LaplaceClassifier(**FAST | {"hidden": (5,)}).fit(scale * x, y)
    found = other.predict_proba(scale * x)
    np.testing.assert_allclose(found, one.predict_proba(x), near, near)
    assert len(one.laplace_.model[1]) == 3
    targets = x[:, 0] + x[:, 1] + 0.1 * x[:, 2] ** 2
    means = LaplaceRegressor(**FAST).fit(x, targets).predict(x, return_std=True)
    found = LaplaceRegressor(**FAST).fit(scale * x, scale * targets)
    for one, other in zip(found.predict(scale * x, return_std=True), means, strict=True):
        np.testing.assert_allclose(one / scale, other, near, near)
