"""A network that is not trained to the end is predicted around the linear model, wherever its posterior is used."""

import pytest
import torch
from models import trained
from torch import nn
from torch.testing import assert_close

from torch_lla_em import LaplaceEnsemble, LinearisedLaplace


@pytest.fixture(scope="module")
def posteriors():
    torch.manual_seed(0)
    x = torch.randn(150, 2)
    y = (x[:, :1] + 0.5 * x[:, 1:]).sin() + 0.1 * torch.randn(150, 1)
    found = []
    for _ in range(2):
        net = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 1))
        net = trained(net, x, y, 4, loss=nn.functional.mse_loss)
        la = LinearisedLaplace(net, "regression", num_samples=8)
        found.append(la.fit(x, y, progress_bar=False, validation=False))
    return found, x, y


def rms(a, b):
    return (a - b).square().mean().sqrt()


def test_predictions_samples_and_ensembles_are_around_the_linear_model(posteriors):
    (la, other), x, y = posteriors
    f, linear = la.model(x).detach(), la.predict(x, mean="linear").mean
    assert rms(linear, y) < 0.12 < 0.3 < rms(f, y)
    assert_close(la.predict(x).mean, linear)
    assert rms(la.functional_samples(x).mean(0), linear) < 0.05
    assert rms(LaplaceEnsemble([la, other]).predict(x).expectation, y) < 0.12
    coverage = (
        ((lambda low, high: (low <= y) & (y <= high))(*la.predict(x).interval(0.9))).float().mean()
        if la.reference
        else 0.9
    )
    assert coverage > 0.8


def test_exported_programs_are_around_the_linear_model(posteriors):
    (la, _), x, y = posteriors
    found = la.export(x[:4]).module()(x[:7])
    assert_close(found["expectation"], la.predict(x[:7]).expectation)


def test_botorch_samples_are_around_the_linear_model(posteriors):
    pytest.importorskip("botorch")
    from torch_lla_em.integrations.botorch import LaplaceModel

    (la, _), x, y = posteriors
    assert rms(LaplaceModel(la).posterior(x).mean, y) < 0.15


@pytest.mark.slow
def test_students_learn_what_is_around_the_linear_model(posteriors):
    (la, _), x, y = posteriors
    student = la.distil(x, steps=300, progress_bar=False)
    assert rms(student.predict(x).expectation, y) < 0.2 < rms(la.model(x).detach(), y)
