"""What is shown of a fit and of a prediction, what is warned about, and held-out evidence."""

import logging
import re
from math import isnan, log
from types import SimpleNamespace

import pytest
import torch
from tiny import LOG_PROBS, likelihood_of, tiny
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from torch_lla_em import LinearisedLaplace, Prediction
from torch_lla_em.data import Batch
from torch_lla_em.inference import Estimate
from torch_lla_em.likelihoods import Bernoulli, Classification, Regression
from torch_lla_em.prediction import metrics


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
    assert "27 of 27, 6 samples" in before and "validation NLL" not in before
    assert ("Call la.calibrate" in before) == (not la.likelihood.is_quadratic)
    assert len(prediction.splitlines()) == 9 and "of 30" in prediction
    la.calibrate([(case.x, case.y)])
    shown = " ".join(repr(la).split())
    kind = "good" if la.calibration.applied else "not applied"
    words = rf"validation NLL {re.escape(str(la.calibration))}, 30 examples"
    assert re.search(rf"{kind} {words}", shown) and "Call la.calibrate" not in shown
    assert ("coverage" in shown) == name.startswith("regression")
    for html in (la._repr_html_(), la.predict(case.x)._repr_html_()):
        assert html.startswith("<table>") and html.count("<tr>") == html.count("</tr>") > 5


def test_predictions_of_any_shape_are_shown():
    empty = Prediction(Classification(), torch.zeros(0, 3), torch.zeros(2, 0, 3))
    pixels = Prediction(Classification(), torch.zeros(2, 5, 5, 3), torch.zeros(2, 2, 5, 5, 3), 1)
    assert "(0, 3)" in repr(empty) and "(2, 3, 5, 5)" in repr(pixels)


def test_the_steps_of_em_are_shown():
    _, la = fitted("classification", em_steps=2)
    assert "EM" in repr(la) and "passes" in repr(la)


def test_loaders_are_run_through():
    case, la = fitted("classification")
    for rows in (TensorDataset(case.x, case.y), TensorDataset(case.x)):
        assert_close(la.predict(DataLoader(rows, 7)).probs, la(case.x))
        assert_close(la.predict(rows).probs, la(case.x))


def test_inputs_and_targets_are_data_too():
    case, la = fitted("classification")
    fit = {"em_steps": 0, "prior_precision": 5.0, "progress_bar": False}
    again = LinearisedLaplace(case.model, "classification", num_samples=6)
    assert_close(again.fit(case.x, case.y, **fit)(case.x), la(case.x))
    assert_close(again.calibrate(case.x, case.y)(case.x), la.calibrate([(case.x, case.y)])(case.x))


def test_fewer_samples_are_the_first_ones():
    case, la = fitted("regression")
    few = la.predict(case.x, num_samples=3)
    assert_close(few.samples, la.predict(case.x).samples[:3])
    assert_close(few.variance, (few.samples - few.mean).square().mean(0))


@pytest.mark.parametrize("name", ["classification", "regression", "poisson"])
def test_held_out_evidence_is_that_of_groups(name):
    case, la = fitted(name)
    x, y = case.x[:23], case.y[:23]
    groups = [slice(0, 8), slice(8, 16), slice(16, 23)]
    values = torch.stack([la.joint_log_prob(x[rows], y[rows]) for rows in groups])
    for size in (1, 5, 20, 23):  # of batches, which groups do not depend on
        found = la.held_out_evidence(list(zip(x.split(size), y.split(size))), together=8)
        assert_close(found.value, values.sum())
        assert_close(found.standard_error, 3**0.5 * values.std())
    assert la.held_out_evidence(x, y, together=23).standard_error.isnan()
    alone = la.held_out_evidence([(x, y)], together=1)
    assert_close(la.held_out_evidence(x, y), alone)
    if name != "regression":  # whose outputs have errors in common
        assert_close(alone.value, la.predict(x).log_prob(y).sum(), rtol=0.02, atol=0)
    with pytest.raises(ValueError, match="together"):
        la.held_out_evidence([(x, y)], together=0)


def test_groups_are_of_examples_of_one_shape():
    torch.manual_seed(0)
    model = nn.Conv1d(2, 3, 3, padding=1).double()
    batches = [
        (torch.randn(2, 2, size).double(), torch.randint(3, (2, size))) for size in (4, 4, 6, 6)
    ]
    la = LinearisedLaplace(model, "classification", num_samples=4, class_dim=1)
    la.fit(batches, em_steps=0, prior_precision=5.0, progress_bar=False)
    found = la.held_out_evidence(batches, together=3)
    groups = []
    for x, y in (map(torch.cat, zip(*batches[:2])), map(torch.cat, zip(*batches[2:]))):
        groups += [(x[:3], y[:3]), (x[3:], y[3:])]
    assert_close(found.value, sum(la.joint_log_prob(*group) for group in groups))


def estimate(value, error=0.0):
    return Estimate(torch.tensor(value), torch.tensor(error))


def test_a_posterior_that_is_the_prior_is_noticed():
    assert any("the prior" in s for s in metrics.check_weights(estimate(0.1), 32))
    assert any("the prior" in s for s in metrics.check_weights(estimate(10.0, 6.0), 32))
    assert not list(metrics.check_weights(estimate(3.0, 0.5), 32))


def test_the_error_of_one_example_is_not_known():
    case = tiny("classification")
    la = LinearisedLaplace(case.model, "classification", num_samples=4)
    la.fit([(case.x, case.y)], progress_bar=False)
    assert la.held_out_evidence(case.x, case.y, together=1000).standard_error.isnan()
    la.calibrate(case.x[:1], case.y[:1])
    assert isnan(la.calibration.standard_error) and "nan" in str(la.calibration)


@pytest.mark.parametrize(
    "precision, said", [(1e20, True), ([1.0, 1e-20], True), (1.0, False), ([1.0, 130.0], False)]
)
def test_a_precision_at_a_bound_is_noticed(precision, said):
    assert bool(list(metrics.check_precision(torch.tensor(precision)))) == said


def test_evidence_of_guessing_is_noticed():
    y = torch.zeros(4, dtype=torch.long)
    p = Prediction(Classification(), torch.zeros(4, 3), torch.zeros(2, 4, 3))
    guess = -100 * log(3)
    assert list(metrics.check_evidence(estimate(guess - 1), p, y, 100))
    assert not list(metrics.check_evidence(estimate(guess + 1), p, y, 100))
    labels = Prediction(Bernoulli(), torch.zeros(4, 3), torch.zeros(2, 4, 3))
    guess = -300 * log(2)
    assert list(metrics.check_evidence(estimate(guess - 1), labels, torch.zeros(4, 3), 100))
    assert not list(metrics.check_evidence(estimate(guess + 1), labels, torch.zeros(4, 3), 100))


@pytest.mark.parametrize("spread, said", [(8.0, True), (0.1, False)])
def test_predictions_far_less_certain_than_right_are_noticed(spread, said):
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(200) % 5
    centre = 4.0 * torch.nn.functional.one_hot(y, 5)
    deviations = spread * torch.randn(16, 200, 5, generator=generator)
    p = Prediction(Classification(), centre, deviations)
    assert bool(list(metrics.check_certainty(p, y))) == said
    b = Prediction(Bernoulli(), centre - 2, deviations)
    assert bool(list(metrics.check_certainty(b, (centre > 0).float()))) == said
    r = Prediction(Regression(0.1), centre, deviations)
    assert bool(list(metrics.check_certainty(r, centre + 0.1))) == (spread == 8.0)


def test_a_collapsed_fit_logs_warnings(caplog):
    with caplog.at_level(logging.WARNING, logger="torch_lla_em"):
        fitted("classification", prior_precision=1e9)
    assert "next to none of the weights" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="torch_lla_em"):
        fitted("regression")
    assert "the prior" not in caplog.text


def test_examples_with_many_outputs_are_not_checked():
    batch = Batch(0, torch.arange(9), torch.zeros(9, 2), torch.zeros(9))
    data = SimpleNamespace(num_rows=9, num_outputs=9 * 10**6, first=lambda: batch)
    assert metrics.few_examples(data, 32) is None
    data.num_outputs = 9 * 2**15
    assert len(metrics.few_examples(data, 32).rows) == 4
