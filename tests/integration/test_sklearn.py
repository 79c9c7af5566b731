"""The estimators for scikit-learn, and scikit-learn's own checks of them."""

import pickle

import numpy as np
import pytest
import torch
from daily import daily
from torch import nn

pytest.importorskip("sklearn")

from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from torch_lla_em.inference.over_span import OverSpan
from torch_lla_em.sklearn import LaplaceClassifier, LaplaceRegressor

FAST = {"epochs": 100, "num_samples": 4, "hidden": (8,), "random_state": 0}


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [LaplaceClassifier, LaplaceRegressor])
@pytest.mark.filterwarnings("ignore")
def test_the_checks_of_scikit_learn_pass(estimator):
    found = check_estimator(estimator(**{**FAST, "hidden": (20,)}), on_fail=None)
    # weights and repetitions give different batches in training
    allowed = "check_sample_weight_equivalence_on_dense_data"
    failed = [(r["check_name"], r["exception"]) for r in found if r["status"] == "failed"]
    failed = [(name, error) for name, error in failed if name != allowed]
    assert len(found) > 40 and not failed, failed


@pytest.mark.filterwarnings("ignore")
def test_repeated_examples_do_not_take_all_steps(monkeypatch):
    """Their targets are reproduced, so σ decreases to what rounding leaves, and moves with it."""
    calls, at = [], OverSpan.at
    monkeypatch.setattr(OverSpan, "at", lambda *args, **kw: calls.append(1) or at(*args, **kw))
    rng = np.random.RandomState(42)
    x, y, count = rng.rand(15, 30), rng.randint(0, 3, size=15), rng.randint(0, 5, size=15)
    LaplaceRegressor(**{**FAST, "hidden": (20,)}).fit(x.repeat(count, 0), y.repeat(count))
    assert len(calls) < 200


def rows(count=150):
    x = np.random.default_rng(0).normal(size=(count, 3))
    return x, np.where(x[:, 0] * x[:, 1] > 0, "same", "other")


def test_classifiers_in_pipelines_and_cross_validation():
    x, y = rows()
    pipeline = make_pipeline(StandardScaler(), LaplaceClassifier(**FAST))
    assert cross_val_score(pipeline, x, y, cv=2).mean() > 0.7
    own = clone(pipeline).fit(x, y)
    assert list(own.classes_) == ["other", "same"]
    probs = own.predict_proba(x)
    assert probs.shape == (150, 2) and np.allclose(probs.sum(1), 1)
    assert (own.predict(x) == y).mean() > 0.8
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(own)).predict_proba(x), probs)


def test_the_posterior_is_that_of_the_network():
    x, y = rows()
    with pytest.raises(NotFittedError):
        LaplaceClassifier().predict(x)
    before = torch.get_rng_state()
    fitted = LaplaceClassifier(**FAST, validation_fraction=0.2).fit(x, y)
    assert torch.equal(before, torch.get_rng_state())
    la = fitted.laplace_
    assert la.num_data == 120 and la.calibration.num_rows == 30
    np.testing.assert_allclose(fitted.predict_proba(x), la(x).numpy())
    again = LaplaceClassifier(**FAST, validation_fraction=0.2).fit(x, y)
    np.testing.assert_array_equal(again.predict_proba(x), fitted.predict_proba(x))
    assert fitted.predict_proba(x.astype("float32")).dtype == "float64"


def test_ensembles_hold_out_a_fold_at_a_time():
    x, y = rows()
    before = torch.get_rng_state()
    fitted = LaplaceClassifier(**{**FAST, "epochs": 20}, ensemble=2).fit(x, y)
    assert torch.equal(before, torch.get_rng_state())
    members = fitted.laplace_.members
    assert [la.num_data for la in members] == [75, 75]
    assert fitted.laplace_.calibration.num_rows == 150
    assert not torch.equal(*(la.model[0].mean for la in members))
    probs = fitted.predict_proba(x)
    np.testing.assert_allclose(probs, fitted.laplace_(torch.tensor(x)).numpy())
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(fitted)).predict_proba(x), probs)
    regressor = LaplaceRegressor(linear, **{**FAST, "epochs": 20}, ensemble=3).fit(
        x, x[:, 0] + (y == "same")
    )
    mean, std = regressor.predict(x, return_std=True)
    assert mean.shape == std.shape == (150,) and len(regressor.laplace_.members) == 3


def linear(features, outputs):
    return nn.Linear(features, outputs)


def test_regressors_return_standard_deviations():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(400, 2)).astype("float32")
    y = 100 + 30 * x[:, 0] + generator.normal(size=400) * 5
    fitted = LaplaceRegressor(linear, **FAST).fit(x[:200], y[:200])
    assert type(fitted.laplace_.model[1]) is nn.Linear
    mean, std = fitted.predict(x[200:], return_std=True)
    assert mean.shape == std.shape == (200,) and mean.dtype == "float32"
    assert abs(std.mean() - 5) < 1
    inside = (np.abs(y[200:] - mean) < 1.645 * std).mean()
    assert abs(inside - 0.9) < 5 * (0.9 * 0.1 * (1 / 200 + 1 / 180)) ** 0.5
    both = LaplaceRegressor(**FAST, options={"curvature": "linear"}).fit(x, np.stack([y, -y], 1))
    assert both.predict(x).shape == (400, 2) and both.laplace_.curvature == "linear"
    assert both.score(x, np.stack([y, -y], 1)) > 0.9


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


def test_one_hidden_layer_is_a_number():
    x, y = rows()
    one, several = (LaplaceClassifier(**{**FAST, "hidden": h}).fit(x, y) for h in (5, (5,)))
    assert len(one.laplace_.model[1]) == 3
    np.testing.assert_array_equal(one.predict_proba(x), several.predict_proba(x))


@pytest.mark.parametrize("estimator", [LaplaceClassifier, LaplaceRegressor])
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("validation_fraction", [1.0, -0.1, float("nan")]),
        ("hidden", [0, (5, 0), (5.5,)]),
        ("epochs", [0, 2.5]),
        ("ensemble", [1, 0, 2.5]),
    ],
)
def test_hyperparameters_are_checked(estimator, name, values):
    x, _ = rows(30)
    for value in values:
        with pytest.raises(ValueError, match=f"{name} must be"):
            estimator(**{**FAST, name: value}).fit(x, np.arange(30) % 3)


@pytest.mark.parametrize("y", [np.ones(30), np.zeros((30, 2)), np.full(30, 1e9, dtype="float32")])
def test_constant_targets_raise(y):
    x, _ = rows(30)
    with pytest.raises(ValueError, match="All targets are equal"):
        LaplaceRegressor(**FAST).fit(x, y)


@pytest.mark.parametrize("dtype", [str, object])
def test_strings_are_no_targets_of_a_regression(dtype):
    x, _ = rows(30)
    with pytest.raises(ValueError, match="strings such as 'low'.* Use LaplaceClassifier"):
        LaplaceRegressor(**FAST).fit(x, np.array(["low", "high"] * 15, dtype=dtype))


def test_some_targets_may_be_constant():
    x, _ = rows(30)
    some = np.stack([x[:, 0], np.ones(30)], 1)
    assert LaplaceRegressor(**FAST).fit(x, some).predict(x)[:, 1] == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("scale", daily(1e-200, rest=[1e-27, 1e27, 1e200]))
def test_units_do_not_matter_to_estimators(scale):
    x, y = rows()
    expected = LaplaceClassifier(**FAST).fit(x, y).predict_proba(x)
    found = LaplaceClassifier(**FAST).fit(scale * x, y).predict_proba(scale * x)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    small = 1e-27 * x.astype("float32")
    assert LaplaceClassifier(**FAST).fit(small, y).score(small, y) > 0.8
    means = LaplaceRegressor(**FAST).fit(x, x[:, 0] + x[:, 1]).predict(x, return_std=True)
    found = LaplaceRegressor(**FAST).fit(scale * x, scale * (x[:, 0] + x[:, 1]))
    for one, other in zip(found.predict(scale * x, return_std=True), means):
        np.testing.assert_allclose(one / scale, other, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("validation_fraction", [0.1, 0.0])
def test_few_digits_are_predicted_no_worse_than_by_the_network(validation_fraction):
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    train, test = order[:400], order[400:]
    options = {"validation_fraction": validation_fraction, "random_state": 0}
    fitted = LaplaceClassifier(**options).fit(x[train], y[train])
    with torch.no_grad():
        network = fitted.laplace_.model(torch.tensor(x[test])).softmax(-1).numpy()
    ours, alone = (
        -np.log(probs[np.arange(len(test)), y[test]])
        for probs in (fitted.predict_proba(x[test]), network)
    )
    gap = ours - alone
    assert gap.mean() < 2 * gap.std() / len(gap) ** 0.5
    assert ours.mean() < 0.25  # 0.34 with little weight decay


def mixed_frame(count=400):
    """A frame with numbers and strings, string classes, and a target in large units."""
    generator = np.random.default_rng(0)
    x, colour = generator.normal(size=count), generator.choice(["red", "blue"], count)
    frame = pytest.importorskip("pandas").DataFrame({"size": x, "colour": colour})
    signal = np.where(colour == "red", x, -x) + 0.1 * generator.normal(size=count)
    return frame, np.where(signal > 0, "yes", "no"), 1000 + 50 * signal


def in_pipeline(estimator):
    columns = (StandardScaler(), ["size"]), (OneHotEncoder(), ["colour"])
    return make_pipeline(make_column_transformer(*columns, sparse_threshold=0), estimator)


def test_classifiers_of_mixed_frames_return_sets_and_flags():
    frame, labels, _ = mixed_frame()
    own = in_pipeline(LaplaceClassifier(**FAST, validation_fraction=0.3)).fit(frame, labels)
    encoded, classifier = own[:-1].transform(frame), own[-1]
    assert list(own.classes_) == ["no", "yes"] and (own.predict(frame) == labels).mean() > 0.9
    sets = classifier.predict_set(encoded, 0.9)
    inside = sets[np.arange(400), (labels == "yes").astype(int)]
    assert sets.shape == (400, 2) and inside.mean() > 0.85
    far = encoded * 40
    assert classifier.is_ood(far).mean() > 0.9 > 0.15 > classifier.is_ood(encoded).mean()
    np.testing.assert_array_equal(classifier.is_ood(far), classifier.p_value(far) <= 0.05)


def test_intervals_are_in_the_units_of_the_targets(caplog):
    frame, _, y = mixed_frame()
    own = in_pipeline(LaplaceRegressor(**FAST, validation_fraction=0.3)).fit(frame, y)
    encoded, regressor = own[:-1].transform(frame), own[-1]
    lower, upper = regressor.predict_interval(encoded, 0.9)
    assert lower.shape == y.shape and 0.85 < ((lower <= y) & (y <= upper)).mean() < 0.98
    mean = regressor.predict(encoded)
    np.testing.assert_allclose((lower + upper) / 2, mean, atol=3)
    assert (upper - lower).mean() < 60 and regressor.is_ood(encoded * 40).mean() > 0.5
    with pytest.raises(ValueError, match="validation_fraction=0.1 holds out fewer than 20"):
        LaplaceRegressor(**FAST).fit(encoded[:50], y[:50]).predict_interval(encoded)
    assert "not calibrated: validation_fraction=0.1 holds out fewer" in caplog.text


def test_weights_count_as_repetitions():
    x, y = np.zeros((300, 1)), np.arange(300) % 3 == 0
    y = np.where(y, "a", "b")
    options = {**FAST, "validation_fraction": 0}
    with pytest.raises(ValueError, match="sample_weight is not supported with ensemble"):
        LaplaceClassifier(**FAST, ensemble=2).fit(x, y, np.ones(300))
    with pytest.raises(ValueError, match="[Nn]egative values"):
        LaplaceClassifier(**options).fit(x, y, -np.ones(300))
    fit = LaplaceClassifier(**options).fit(x, y, np.where(y == "a", 2.0, 1.0))
    np.testing.assert_allclose(fit.predict_proba(x[:1]), 0.5, atol=0.03)
    assert fit.laplace_.num_data == 300


@pytest.mark.parametrize("ensemble", daily(None, rest=[2]))
def test_a_student_predicts_for_the_estimator(ensemble):
    x, labels = rows()
    few = {"steps": 300, "num_inputs": 300}
    options = {**FAST, "validation_fraction": 0.2, "ensemble": ensemble, "distil": few}
    classifier = LaplaceClassifier(**options).fit(x, labels)
    student = classifier.student_
    expected = student(torch.tensor(x)).numpy()
    np.testing.assert_array_equal(classifier.predict_proba(x), expected)
    theirs = classifier.laplace_(torch.tensor(x)).numpy()
    assert 0.9 < np.corrcoef(expected[:, 0], theirs[:, 0])[0, 1] < 1
    assert (student.error.nll is None) == (student.reference_scores is None) == bool(ensemble)
    again = pickle.loads(pickle.dumps(classifier))
    np.testing.assert_array_equal(again.predict_proba(x), expected)
    classifier.set_params(distil=False).fit(x, labels)
    assert classifier.student_ is None


def test_a_student_learns_from_none_of_the_examples_that_it_is_calibrated_on(monkeypatch):
    x, labels = rows()
    given = []
    monkeypatch.setattr("torch_lla_em.sklearn.distilled", lambda *args, **_: given.extend(args))
    LaplaceClassifier(**FAST, validation_fraction=0.2).fit(x, labels)
    inputs, (held_out, _) = given[2:]
    assert (len(inputs), len(held_out)) == (120, 30)
    rest = torch.cat([inputs, held_out]).numpy()
    np.testing.assert_array_equal(rest[np.lexsort(rest.T)], x[np.lexsort(x.T)])


def test_a_student_predicts_standard_deviations():
    x, _ = rows()
    y = 3 + 10 * np.sin(x[:, 0])
    few = {"steps": 150, "num_inputs": 300}
    regressor = LaplaceRegressor(**FAST, distil=few).fit(x, y)
    mean, deviation = regressor.predict(x, return_std=True)
    by_student, variance = regressor.student_(torch.tensor(x))
    width = y.std()
    np.testing.assert_allclose(mean, y.mean() + width * by_student[:, 0].numpy())
    np.testing.assert_allclose(deviation, width * variance[:, 0].sqrt().numpy())
    with pytest.raises(ValueError, match="distil must be"):
        LaplaceRegressor(**FAST, distil="yes").fit(x, y)
