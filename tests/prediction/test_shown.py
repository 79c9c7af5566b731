"""What is shown of a fit and of a prediction, what is warned about, and tables of several posteriors."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from daily import daily
from loaders import InAnyOrder
from models import trained
from tiny import (
    LOG_PROBS,
    draw,
    fitted,
    known,
    label_log_prob,
    likelihood_of,
    posterior_of,
    prediction_of,
    tiny,
)
from torch import nn
from torch.nn.functional import mse_loss
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from torch_lla_em import BlockCG, LaplaceEnsemble, LinearisedLaplace, NotFittedError, compare
from torch_lla_em.inference.ends import tell
from torch_lla_em.inference.state import FitOptions, State
from torch_lla_em.likelihoods import Poisson, Regression
from torch_lla_em.prediction import predicted_data, scores
from torch_lla_em.prediction.compare import Comparison
from torch_lla_em.runtime import CALL, collected


def words_of(shown):
    return " ".join(repr(shown).split())


@pytest.mark.parametrize("name", LOG_PROBS)
def test_fits_and_predictions_are_printed(name):
    case, la = known(name)
    la = copy.copy(la)
    assert "call la.fit" in repr(LinearisedLaplace(case.model, likelihood_of(name)))
    before, prediction = repr(la), repr(la.predict(case.x))
    assert "6 samples of all 27 parameters" in before and "validation NLL" not in before
    of_the_method = "λ", "γ", "τ", "span", "column", "factor"
    assert not [word for word in of_the_method if word in before]
    assert "effective dimension γ" in repr(la.details()) and "memory plan" in repr(la.details())
    assert ("Call la.calibrate" in before) == (not la.likelihood.is_quadratic)
    assert len(prediction.splitlines()) == 9 and "of 30" in prediction
    la.calibrate([(case.x + 0.1, case.y)])
    shown, applied = words_of(la), la.calibration.applied
    per = "NLL per label" if la.calibration.labels > 1 else "NLL"
    words = f"calibrated on 30 examples: validation {per}" if applied else "calibration"
    assert shown.count(f"{words} {la.calibration}") == 1 and "Call la.calibrate" not in shown
    assert applied or "not applied, because it would not lower" in shown
    for html in (la._repr_html_(), la.predict(case.x)._repr_html_()):
        assert html.startswith("<table>") and html.count("<tr>") == html.count("</tr>") > 5


def test_the_verdict_of_accuracy_is_that_of_the_fit():
    case, la = known()
    assert "(0, 3)" in repr(la.predict(case.x[:0]))
    pixels = prediction_of(la.likelihood, draw(8, 5, 4, 3), draw(7, 8, 5, 4, 3, seed=1))
    assert "of shape (8, 5, 4, 3)" in repr(pixels)
    found, gamma = la.accuracy, la.effective_dim.sum().clamp_min(1)
    result, of_samples = la.posterior.result, (la.certificate.square().mean() / gamma).sqrt().item()
    assert found.error == pytest.approx(max(of_samples, result.mode_error))
    for error in (0.0, 1.0):  # the larger one of samples and mode
        other = copy.copy(la)
        other.take(replace(la.posterior, result=result._replace(mode_error=error)))
        assert other.accuracy.error == pytest.approx(max(of_samples, error))
        assert other.accuracy.is_reached == (error < 1)
    assert found.bound == la.certificate.max() and found.is_reached
    assert f"Samples and mode are accurate: {found}." in words_of(la)
    assert la.log_marginal_likelihood().value.isfinite()
    with pytest.warns(UserWarning, match="less accurate than their tolerance"):
        _, la = fitted(solver=BlockCG(max_passes=1), at=0.01)
    assert not la.accuracy.is_reached and "are not accurate: " in words_of(la)


def test_calibrated_predictions_have_no_warnings_of_fitted_ones():
    case, la = known("regression")
    la, calibrate = copy.copy(la), f"σ is too small. {CALL} to learn σ."
    la.take(replace(la.posterior, messages=("A plan.", calibrate, "Something else.")))
    ensemble = LaplaceEnsemble([la, la])
    assert CALL in repr(la) and "Members 0, 1 have warnings" in repr(ensemble)
    for each in (la, ensemble):
        each.calibrate(case.x + 0.1, case.y)
    assert CALL not in repr(la) and "Something else." in repr(la) and calibrate in la.messages
    la.take(replace(la.posterior, messages=("A plan.", calibrate)))
    assert "have warnings" not in repr(ensemble)


@pytest.mark.parametrize(
    "changed, words",
    [
        ({}, None),
        ({"gamma": 0.1}, 'is close to the prior. Try prior="isotropic", a smaller'),
        ({"gamma": 0.1, "scale": 1.0}, "is close to the prior. Try a smaller"),
        ({"gamma": 10.0, "error": 6.0}, "is close to the prior"),
        ({"gamma": 3.0, "error": 0.5}, None),
        ({"gamma": 0.1, "precision": 1e20}, None),  # the fit warns of that
        ({"precision": [1.0, 130.0]}, None),
        ({"gamma": 70.0, "likelihood": Regression(1.0)}, "is 35% of the number of targets"),
        ({"gamma": 50.0, "likelihood": Regression(1.0)}, None),
    ],
)
def test_fits_that_have_failed_are_noticed_by_their_effective_dimension(changed, words):
    well = {"gamma": 20.0, "error": 1.0, "precision": 1.0, "scale": 2.0, "likelihood": Poisson()}
    given = SimpleNamespace(**{**well, **changed})
    facts = SimpleNamespace(num_rows=220, num_labelled=200, num_targets=220)
    data, around = SimpleNamespace(facts=facts), torch.tensor([1.0, -1.0]).repeat(16)
    engine = SimpleNamespace(problem=SimpleNamespace(likelihood=given.likelihood, data=data))
    gamma = given.gamma + given.error * (31.0**0.5) * around
    q = State(torch.tensor(given.precision), gamma=gamma)
    noise, told = SimpleNamespace(prior=SimpleNamespace(scale=torch.tensor(given.scale))), []
    with collected(told):
        tell(engine, q, noise, FitOptions(em_steps=0))
    assert len(told) == (words is not None) and all(len(w.split()) <= 40 for w in told)
    assert words is None or words in told[0]


def test_outputs_of_different_units_are_noticed():
    case, units = tiny("regression"), torch.tensor([1e-3, 1.0, 1e3]).double()
    with torch.no_grad():
        case.model[2].weight *= units[:, None]
        case.model[2].bias *= units
    for sigma_noise, noticed in ((None, True), (torch.ones(3), False)):
        la = posterior_of(case.model, Regression(sigma_noise), case.x, units * case.y)
        assert ("residuals of output 0" in "".join(la.messages)) == noticed
        assert (len(la.messages) > 1) == noticed


@pytest.mark.parametrize("name", ["classification", "bernoulli", "regression"])
@pytest.mark.parametrize("scale, said", [(0.0, 1), (-1.0, 1), (1.0, 0)])
def test_networks_that_are_not_trained_are_named(name, scale, said):
    model = tiny(name).model
    with torch.no_grad():
        model[-1].weight *= scale
        model[-1].bias *= scale
    _, la = fitted(name, model=model, likelihood=name, em_steps=2, curvature="network")
    assert sum("train it before fit" in words for words in la.messages) == said


@pytest.mark.parametrize(
    "width, num_data, steps, overfitted",
    daily(
        *((10, 400, 300, False), (100, 60, 2000, True)),
        rest=[(5, 150, 300, False), (20, 600, 400, False), (200, 100, 1500, True)],
    ),
)
def test_an_overfitted_regression_says_so_and_what_helps(width, num_data, steps, overfitted):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_data, 3, generator=generator)
    y = x[:, :1] + 0.5 * x[:, 1:2] ** 2 + 0.3 * torch.randn(num_data, 1, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 1))
        trained(net, x, y, steps, 0.01, mse_loss)
    shown = repr(LinearisedLaplace(net, "regression", num_samples=8).fit(x, y, progress_bar=False))
    assert ("The network has overfitted" in shown) == overfitted
    assert not overfitted or "la.calibrate(validation_loader)" in shown


# scores and tables


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # where torchmetrics is imported first
@pytest.mark.parametrize("name", ["classification", "bernoulli", "regression", "poisson"])
def test_scores_are_those_of_torchmetrics(name):
    tm = pytest.importorskip("torchmetrics").functional
    (case, la), c = known(name), tm.classification
    prediction, y = la.predict(case.x), case.y
    found, due = scores(prediction, y), {"NLL": -label_log_prob(prediction, y).mean()}
    if name == "classification":
        due["accuracy"] = c.multiclass_accuracy(prediction.probs, y, 3, "micro")
        due["ECE"] = c.multiclass_calibration_error(prediction.probs, y, 3, n_bins=15)
    elif name == "bernoulli":
        each = prediction.probs.flatten(), y.flatten().long()
        due |= {"accuracy": c.binary_accuracy(*each), "AUROC": c.binary_auroc(*each)}
    else:
        mean = prediction.expectation
        due["RMSE"] = tm.mean_squared_error(mean.flatten(), y.flatten(), squared=False)
        due["MAE"] = tm.mean_absolute_error(mean.flatten(), y.flatten())
        due["R²"] = tm.r2_score(mean, y)
    if name == "regression":
        lower, upper = prediction.credible_interval(0.9)
        due["90 % coverage"] = ((y > lower) & (y < upper)).double().mean()
    for score, value in due.items():
        assert found[score] == pytest.approx(value.item(), rel=1e-5), score


@pytest.mark.parametrize("name", LOG_PROBS)
def test_the_table_shows_the_scores_of_each_posterior(name):
    (case, la), (_, other) = known(name), known(name, em_steps=0, prior_precision=500.0)
    y = case.y[:23].clone()
    if name == "classification":
        y[:5] = -100  # no examples
    loader = DataLoader(TensorDataset(case.x[:23], y), 20)
    table = compare({"wide": la, "narrow": other}, loader)
    for key, each in (("wide", la), ("narrow", other)):
        record, rows = table.records[key], predicted_data(each, loader)
        labelled = la.likelihood.labelled(y)
        assert_close(table.log_probs[key], label_log_prob(rows.posterior, y).double()[labelled])
        assert record["NLL"] == pytest.approx(-table.log_probs[key].mean().item())
        alone = -label_log_prob(rows.network, y)[labelled].mean().item()
        assert record["network NLL"] == pytest.approx(alone) and record["parameters"] == 27
        assert f"{record['NLL']:.4f}" in repr(table)
    assert "network NLL" in table._repr_html_()
    assert ("temperature scaling NLL" in repr(table)) == la.likelihood.gives_probabilities


def test_differences_are_paired_where_the_loader_shuffles():
    (case, la), (_, other) = known(), known(em_steps=0, prior_precision=1e4)
    loader = DataLoader(TensorDataset(case.x, case.y), 7, shuffle=True)
    table = compare([la, copy.copy(la), other], loader)
    assert set(table.records) == {"0: Sequential", "1: Sequential", "2: Sequential"}
    assert_close(table.log_probs["0: Sequential"], table.log_probs["1: Sequential"])
    worst = table.ranking[-1]
    gap, error = table.behind(worst)
    gaps = table.log_probs[table.ranking[0]] - table.log_probs[worst]
    assert gap == pytest.approx(gaps.mean().item()) and gap > 0
    assert error == pytest.approx(gaps.std().item() / 30**0.5)
    assert "no measurable difference" in repr(table)  # of two that are the same


def test_posteriors_that_are_worse_than_their_networks_are_named():
    log_probs = {"a": torch.full((4,), -0.5), "b": torch.full((4,), -0.25)}
    gains = {"a": torch.tensor([-0.25, -0.25, -0.25, 0.0]), "b": torch.ones(4)}
    records = {name: {"NLL": -p.mean().item()} for name, p in log_probs.items()}
    best, _, worse = Comparison(records, log_probs, gains).findings
    assert best == "'b' has the lowest NLL."
    assert "'a' is worse than its network alone, by 0.19 ± 0.06: call calibrate" in worse
    of_temperature = {"b": torch.tensor([-0.25, -0.25, -0.25, 0.0])}
    worse = Comparison(records, log_probs, {"b": torch.ones(4)}, of_temperature).findings[-1]
    assert "'b' is worse than its network with temperature scaling, by 0.19" in worse


def test_temperature_scaling_is_fitted_to_the_other_half():
    """By a grid search on each half; a network that is too sure gains by it."""
    case, la = known()
    rows = predicted_data(la, [(case.x, case.y)])
    f, y = rows.network._f, case.y
    temperatures = torch.logspace(-2, 1, 3001, dtype=torch.float64)
    due = torch.empty(len(y)).double()
    for start in (0, 1):
        own, other = slice(start, None, 2), slice(1 - start, None, 2)
        logits = temperatures[:, None, None] * f[other]
        losses = -logits.log_softmax(-1).gather(2, y[other].expand(3001, -1)[..., None]).sum((1, 2))
        losses += 0.5 * temperatures.log().square()
        best = temperatures[losses.argmin()]
        due[own] = (best * f[own]).log_softmax(-1).gather(1, y[own][:, None])[:, 0]
    found = compare([la], case.x, case.y).records["0: Sequential"]["temperature scaling NLL"]
    assert found == pytest.approx(-due.mean().item(), rel=1e-4)
    assert rows.every()["temperature scaling"].probs.shape == (len(y), 3)
    case, la = known("regression")
    assert [*predicted_data(la, [(case.x, case.y)]).every()] == ["network", "posterior"]


def test_what_cannot_be_compared_raises():
    (case, la), (_, real) = known(), known("regression")
    x, y, unfitted = case.x, case.y, LinearisedLaplace(case.model, "classification")
    classes = "class Sequential is not a posterior"
    for error, words, call in (
        (ValueError, "one posterior or more", lambda: compare([], x, y)),
        (ValueError, "not on one scale", lambda: compare([la, real], x, y)),
        (TypeError, classes, lambda: compare({"net": la.model}, x, y)),
        (TypeError, classes, lambda: compare([la, la.model], x, y)),
        (NotFittedError, "fit", lambda: compare([la, unfitted], x, y)),
        (ValueError, "pass a list of batches", lambda: compare([la, la], InAnyOrder(case))),
        (
            ValueError,
            "pass a list of",
            lambda: LaplaceEnsemble([la, la]).calibrate(InAnyOrder(case)),
        ),
    ):
        with pytest.raises(error, match=words):
            call()
