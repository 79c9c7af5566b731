"""MAPIE's conformal classes on our scikit-learn estimators."""

import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("mapie")

from mapie.classification import SplitConformalClassifier
from mapie.regression import SplitConformalRegressor
from sklearn.datasets import make_classification, make_regression

from torch_lla_em.sklearn import LaplaceClassifier, LaplaceRegressor

SMALL = {"hidden": (8,), "epochs": 3, "num_samples": 4, "random_state": 0}


def test_sets_of_classes_are_those_of_the_posterior():
    X, y = make_classification(300, 6, n_informative=4, n_classes=3, random_state=0)
    y = np.array(["a", "b", "c"])[y]
    estimator = LaplaceClassifier(**SMALL).fit(X[:100], y[:100])
    conformal = SplitConformalClassifier(estimator, confidence_level=0.8, prefit=True)
    conformal.conformalize(X[100:200], y[100:200])
    labels, sets = conformal.predict_set(X[200:])
    assert (labels == estimator.predict(X[200:])).all()
    probs = estimator.predict_proba(X[100:200])
    doubts = [1 - p["abc".index(label)] for p, label in zip(probs, y[100:200])]
    bound = np.sort(doubts)[int(np.ceil(101 * 0.8)) - 1]
    expected = 1 - estimator.predict_proba(X[200:]) <= bound
    assert (sets[..., 0] == expected).mean() > 0.99  # ties at the bound


def test_intervals_are_around_the_mean_of_the_posterior():
    X, y = make_regression(300, 4, noise=5.0, random_state=0)
    estimator = LaplaceRegressor(**SMALL).fit(X[:100], y[:100])
    conformal = SplitConformalRegressor(estimator, confidence_level=0.8, prefit=True)
    conformal.conformalize(X[100:200], y[100:200])
    mean, intervals = conformal.predict_interval(X[200:])
    np.testing.assert_allclose(mean, estimator.predict(X[200:]), rtol=1e-6)
    residuals = np.sort(np.abs(y[100:200] - estimator.predict(X[100:200])))
    half = residuals[int(np.ceil(101 * 0.8)) - 1]
    np.testing.assert_allclose(intervals[:, 1, 0] - mean, half, rtol=1e-5)
