"""What is shown of a fit and of a prediction, what is warned about, and held-out evidence."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from daily import daily
from models import trained
from tiny import LOG_PROBS, draw, likelihood_of, tiny
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from torch_lla_em import BlockCG, LaplaceEnsemble, LinearisedLaplace, Prediction, compare
from torch_lla_em.inference import Estimate
from torch_lla_em.likelihoods import Bernoulli, Classification, Poisson, Regression
from torch_lla_em.prediction import Calibration, metrics, summary


def fitted(name, **fit):
    case = tiny(name)
    la = LinearisedLaplace(case.model, likelihood_of(name), num_samples=6)
    fit = {"em_steps": 0, "prior_precision": 5.0, "progress_bar": False, **fit}
    return case, la.fit([(case.x, case.y)], **fit)


@pytest.mark.parametrize("name", LOG_PROBS)
def test_fits_and_predictions_are_printed(name):
    case, la = fitted(name)
    assert "call la.fit" in repr(LinearisedLaplace(case.model, likelihood_of(name)))
    before, prediction = repr(la), repr(la.predict(case.x))
    assert "6 samples of all 27 parameters" in before and "validation NLL" not in before
    for word in ("λ", "γ", "τ", "span", "column", "factor"):  # of the method
        assert word not in before
    assert "effective dimension γ" in repr(la.details()) and "memory plan" in repr(la.details())
    assert ("Call la.calibrate" in before) == (not la.likelihood.is_quadratic)
    assert len(prediction.splitlines()) == 9 and "of 30" in prediction
    la.calibrate([(case.x, case.y)])
    shown = " ".join(repr(la).split())
    applied = la.calibration.applied
    per = "NLL per label" if la.calibration.labels > 1 else "NLL"
    words = f"calibrated on 30 examples: validation {per}" if applied else "calibration"
    assert shown.count(f"{words} {la.calibration}") == 1 and "Call la.calibrate" not in shown
    assert applied or "not applied, because it would not lower" in shown
    for html in (la._repr_html_(), la.predict(case.x)._repr_html_()):
        assert html.startswith("<table>") and html.count("<tr>") == html.count("</tr>") > 5


def test_calibrated_posteriors_are_compared_with_network_and_temperature_scaling():
    case, la = fitted("classification")
    found = la.calibrate(case.x, case.y).calibration
    f, loss = case.model(case.x).detach(), nn.functional.cross_entropy
    assert found.network == pytest.approx(loss(f, case.y).item())
    least = min(loss(t * f, case.y).item() for t in torch.linspace(0.01, 3, 300))
    assert least - 1e-3 < found.temperature < min(found.network, least + 0.02)
    shown = " ".join(repr(la).split())
    assert f"network alone {found.network:.4g}, with temperature scaling" in shown
    pixels = Calibration(10, 101.0, 89.0, 2.0, True, None, 120.0, 95.0, 100.0)
    rows = dict(summary.of_calibration(pixels))
    assert rows["good"].endswith("NLL per label 1.01 → 0.89 (improvement 0.12 ± 0.02)")
    assert rows["compared"].endswith("network alone 1.2, with temperature scaling 0.95")


@pytest.mark.parametrize("likelihood", [Classification(), Bernoulli(), Poisson(), Regression()])
def test_dense_predictions_are_printed_by_their_means_over_sites(likelihood):
    f, Jw = draw(8, 5, 4, 3), draw(7, 8, 5, 4, 3, seed=1)
    prediction = Prediction.of(likelihood, f, Jw)
    shown = repr(prediction)
    assert "outputs of shape (8, 5, 4, 3)" in shown and len(shown.splitlines()) == 9
    if likelihood.elementwise:
        assert f"{prediction.expectation[2].mean():.3g}" in shown.splitlines()[4]
    else:
        probs = prediction.probs[2]
        assert f"{probs.max(-1).values.mean():.3g}" in shown.splitlines()[4]
        assert f"{prediction.entropy[2].mean():.3g}" in shown.splitlines()[4]


def test_the_verdict_of_accuracy_is_that_of_the_fit():
    case, la = fitted("classification")
    found = la.accuracy
    gamma = la.effective_dim.sum().clamp_min(1).item()
    assert found.error == pytest.approx((la.certificate.square().mean() / gamma).sqrt().item())
    assert found.bound == la.certificate.max() and found.is_reached
    assert f"The samples are accurate: {found}." in " ".join(repr(la).split())
    case = tiny("classification")
    la = LinearisedLaplace(
        case.model, "classification", num_samples=6, solver=BlockCG(max_passes=1)
    )
    with pytest.warns(UserWarning, match="above the tolerance of 0.072"):
        la.fit(case.x, case.y, em_steps=0, prior_precision=0.01, progress_bar=False)
    assert not la.accuracy.is_reached and "are not accurate: " in " ".join(repr(la).split())


def test_calibrated_predictions_have_no_warnings_of_fitted_ones():
    case, la = fitted("regression")
    other, calibrate = "Something else.", f"σ is too small. {summary.CALL} to learn σ."
    la._posterior = replace(la._posterior, messages=("A plan.", calibrate, other))
    ensemble = LaplaceEnsemble([la, la])
    assert summary.CALL in repr(la) and "Members 0, 1 have warnings" in repr(ensemble)
    for found in (la, ensemble):
        found.calibrate(case.x, case.y)
    assert summary.CALL not in repr(la) and other in repr(la) and calibrate in la.messages
    la._posterior = replace(la._posterior, messages=("A plan.", calibrate))
    assert "have warnings" not in repr(ensemble)


def test_predictions_of_any_shape_are_shown():
    empty = Prediction.of(Classification(), torch.zeros(0, 3), torch.zeros(2, 0, 3))
    pixels = Prediction.of(Classification(), torch.zeros(2, 5, 5, 3), torch.zeros(2, 2, 5, 5, 3), 1)
    assert "(0, 3)" in repr(empty) and "(2, 3, 5, 5)" in repr(pixels)


def test_loaders_are_run_through():
    case, la = fitted("classification")
    for rows in (TensorDataset(case.x, case.y), TensorDataset(case.x)):
        assert_close(la.predict(DataLoader(rows, 7)).probs, la(case.x))
        assert_close(la.predict(rows).probs, la(case.x))


@pytest.mark.parametrize("name", ["classification", "regression", "poisson"])
def test_held_out_evidence_is_that_of_groups(name):
    case, la = fitted(name)
    x, y = case.x[:23], case.y[:23]
    groups = [slice(0, 8), slice(8, 16), slice(16, 23)]
    values = torch.stack([la.joint_log_prob(x[rows], y[rows]) for rows in groups])
    for size in (1, 5, 20, 23):  # of batches, which groups do not depend on
        total, error = evidence_of(la, list(zip(x.split(size), y.split(size))), 8)
        assert total == pytest.approx(values.sum().item())
        assert error == pytest.approx((3**0.5 * values.std()).item())
    assert math.isnan(evidence_of(la, [(x, y)], 23)[1])
    if name != "regression":  # whose outputs have errors in common
        alone = la.predict(x).log_prob(y).sum().item()
        assert evidence_of(la, [(x, y)], 1)[0] == pytest.approx(alone, rel=0.02)


def evidence_of(la, loader, together):
    (record,) = compare([la], loader, together=together).records.values()
    return record["held-out evidence"], record["evidence error"]


def test_outputs_of_different_units_are_noticed():
    case, units = tiny("regression"), torch.tensor([1e-3, 1.0, 1e3]).double()
    with torch.no_grad():
        case.model[2].weight *= units[:, None]
        case.model[2].bias *= units
    noticed = []
    for sigma_noise in (None, torch.ones(3)):
        la = LinearisedLaplace(case.model, "regression", num_samples=4, sigma_noise=sigma_noise)
        la.fit(case.x, units * case.y, progress_bar=False)
        noticed.append(["residuals of output 0" in "".join(la.messages), len(la.messages) > 1])
    assert noticed == [[True, True], [False, False]]


def warnings(prediction=None, y=None, **changed):
    """The warnings of a fit of which all is well but for what is changed."""
    if prediction is None:
        prediction, y = Prediction.of(Poisson(), torch.zeros(9, 3), torch.zeros(2, 9, 3)), None
    well = {"effective_dim": 20.0, "effective_dim_error": 1.0, "prior_precision": 1.0, "scale": 2.0}
    found = {name: torch.tensor(value) for name, value in (well | changed).items()}
    gamma = Estimate(found.pop("effective_dim"), found.pop("effective_dim_error"))
    result = SimpleNamespace(**found, effective_dim=gamma, w_samples=torch.zeros(32, 1))
    posterior = SimpleNamespace(result=result, num_data=200)
    given = list(metrics.warnings_of(posterior, prediction, y))
    assert all(len(words.split()) <= 40 for words in given)
    return given


@pytest.mark.parametrize(
    "changed, words",
    [
        ({}, None),
        ({"effective_dim": 0.1}, "is close to the prior. Try g_prior=False, a smaller"),
        ({"effective_dim": 0.1, "scale": 1.0}, "is close to the prior. Try a smaller"),
        ({"effective_dim": 10.0, "effective_dim_error": 6.0}, "is close to the prior"),
        ({"effective_dim": 3.0, "effective_dim_error": 0.5}, None),
        ({"prior_precision": 1e20}, "ended at a bound"),
        ({"prior_precision": [1.0, 1e-20]}, "ended at a bound"),
        ({"prior_precision": [1.0, 130.0]}, None),
    ],
)
def test_a_posterior_without_data_or_at_a_bound_is_noticed(changed, words):
    found = warnings(**changed)
    assert len(found) == (words is not None) and (words is None or words in found[0])


@pytest.mark.parametrize("spread, said", [(8.0, True), (0.1, False)])
def test_predictions_far_less_certain_than_right_are_noticed(spread, said):
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(200) % 5
    centre = 4.0 * torch.nn.functional.one_hot(y, 5)
    deviations = spread * torch.randn(16, 200, 5, generator=generator)
    assert bool(warnings(Prediction.of(Classification(), centre, deviations), y)) == said
    labels = Prediction.of(Bernoulli(), centre - 2, deviations)
    assert bool(warnings(labels, (centre > 0).float())) == said


def regression(width, num_data, steps, noise=0.3):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_data, 3, generator=generator)
    y = x[:, :1] + 0.5 * x[:, 1:2] ** 2 + noise * torch.randn(num_data, 1, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 1))
        trained(net, x, y, steps, 0.01, nn.functional.mse_loss)
    la = LinearisedLaplace(net, "regression", num_samples=8)
    return la.fit(x, y, progress_bar=False)


@pytest.mark.parametrize(
    "width, num_data, steps, overfitted",
    daily(
        *((10, 400, 300, 0), (100, 60, 2000, 1)),
        rest=[(5, 150, 300, 0), (20, 600, 400, 0), (200, 100, 1500, 1)],
    ),
)
def test_an_overfitted_regression_says_so_and_what_helps(width, num_data, steps, overfitted):
    shown = repr(regression(width, num_data, steps))
    assert ("The network has overfitted" in shown) == overfitted
    assert not overfitted or "la.calibrate(validation_loader)" in shown
