"""RealMLP and TabM of pytabkit: the same outputs, and posteriors in the estimator's own terms."""

import logging
import warnings

import numpy as np
import pytest

from torch_lla_em.compat import posterior

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SMALL = {"device": "cpu", "random_state": 0, "n_threads": 1, "n_epochs": 3}
WIDTHS = {"RealMLP_TD": {"hidden_sizes": [8, 8]}, "TabM_D": {"tabm_k": 3, "d_block": 8}}
rng = np.random.default_rng(0)


@pytest.fixture(scope="module")
def pytabkit():
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("pytabkit")


def table(count):
    """Numbers, a constant, few and many categories, some missing; labels and numbers as targets."""
    import pandas as pd

    X = pd.DataFrame(rng.normal(size=(count, 3)), columns=list("abc"))
    X["constant"], X["few"] = 1.0, rng.choice(["x", "y", None], count)
    X["many"] = rng.choice(list("abcdefghijklmnop"), count)
    value = X["a"] + (X["few"] == "x") + 0.3 * rng.normal(size=count)
    return X, np.where(value > 0.3, "yes", "no"), 500 + 100 * value.to_numpy()


@pytest.mark.parametrize("name", WIDTHS)
def test_a_classifier_is_converted_with_its_encodings(pytabkit, name):
    (X, y, _), (new, *_) = table(120), table(50)
    new.loc[0, "many"] = "unseen"
    estimator = getattr(pytabkit, f"{name}_Classifier")(**SMALL, **WIDTHS[name]).fit(X, y)
    la = posterior(estimator, num_samples=8)
    found = la.laplace.model(la.inputs(new)).softmax(-1).detach().numpy()
    np.testing.assert_allclose(found, estimator.predict_proba(new), rtol=1e-4, atol=1e-6)
    la.fit(X, y)
    assert set(la.predict(new)) <= {"no", "yes"} and la.distribution(new).epistemic.min() > 0
    assert (la.predict(X) == y).mean() > 0.7
    with pytest.raises(ValueError, match="no missing numbers"):
        la.inputs(new.assign(a=np.nan))


@pytest.mark.parametrize("name", WIDTHS)
def test_a_regressor_predicts_in_the_units_of_its_targets(pytabkit, name):
    (X, _, y), (new, *_) = table(120), table(50)
    estimator = getattr(pytabkit, f"{name}_Regressor")(**SMALL, **WIDTHS[name]).fit(X, y)
    la = posterior(estimator, num_samples=8).fit(X, y)
    network = la.laplace.model(la.inputs(new)).detach().numpy()[:, 0]
    limited = network.clip(y.min(), y.max()) if name == "RealMLP_TD" else network
    np.testing.assert_allclose(limited, estimator.predict(new), rtol=1e-4)
    mean, deviation = la.predict(new, return_std=True)
    assert abs(mean.mean() - 500) < 150 and 10 < deviation.mean() < 300


def test_estimators_of_pytabkit_without_one_network_are_refused(pytabkit):
    X, y, _ = table(60)
    few = {**SMALL, **WIDTHS["RealMLP_TD"], "n_epochs": 1}
    several = pytabkit.RealMLP_TD_Classifier(**few, n_cv=2).fit(X, y)
    with pytest.raises(TypeError, match="has trained 2 networks"):
        posterior(several)
    few = {**SMALL, **WIDTHS["TabM_D"], "n_epochs": 1}
    several = pytabkit.TabM_D_Classifier(**few, n_cv=2).fit(X, y)
    with pytest.raises(TypeError, match="has trained 2 networks"):
        posterior(several)
    with pytest.raises(ValueError, match="not trained"):
        posterior(pytabkit.RealMLP_TD_Classifier())
    forest = pytabkit.RF_SKL_D_Classifier(n_threads=1).fit(X, y)
    with pytest.raises(TypeError, match="RealMLP and TabM have one"):
        posterior(forest)
