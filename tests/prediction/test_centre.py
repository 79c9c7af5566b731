"""Regressions are predicted around the function whose residuals σ describes."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from torch_lla_em import LaplaceEnsemble, LinearisedLaplace
from torch_lla_em.prediction import functions


@pytest.fixture(scope="module")
def early():
    """A network that is far from trained, with outputs in two units; inputs and targets."""
    torch.manual_seed(0)
    x = (2 * torch.rand(500, 3) - 1).double()
    y = torch.cat([torch.sin(3 * x[:, :1]), 100 * x[:, 1:2] * x[:, 2:]], 1) + 5
    y += torch.tensor([0.05, 5.0]) * torch.randn(500, 2)
    model = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 2)).double()
    model[2].weight.data[1] *= 100
    return model, x[:150], y[:150], x[150:], y[150:]


@pytest.fixture(scope="module", params=["one σ", "a σ per output"])
def fitted(early, request):
    """Its posterior for the first output or for both, training data and test data."""
    model, x, y, x_test, y_test = early
    sigma = torch.tensor([0.1, 10.0])
    if request.param == "one σ":
        sigma, y, y_test = None, y[:, :1], y_test[:, :1]
        model = nn.Sequential(model[:2], nn.Linear(20, 1).double())
        model[1].weight.data, model[1].bias.data = early[0][2].weight.data[:1], torch.zeros(1)
        model[1].bias.data = model[1].bias.data.double()
    la = LinearisedLaplace(model, "regression", sigma_noise=sigma, num_samples=8)
    return la.fit(x, y, progress_bar=False), x, y, x_test, y_test


def test_predictions_are_around_the_linear_model_with_its_noise(fitted, tmp_path):
    la, _, _, x, y = fitted
    J_w = la.predict(x, mean="linear")
    mean, variance = la(x)
    assert la.mean == "linear"
    assert_close(mean, J_w.expectation)
    assert_close(la.functional_samples(x).mean(0) - mean, J_w.samples.mean(0) - mean)
    assert_close(la.function_sample(3)(x), la.functional_samples(x)[3])
    inside = ((y - mean).abs() < 1.645 * variance.sqrt()).double().mean().item()
    assert 0.84 < inside < 0.96
    # an ensemble, and the posterior from a file, have the same centre
    assert_close(LaplaceEnsemble([la, la])(x)[0], mean)
    la.save(tmp_path / "la.pt")
    again = LinearisedLaplace.load(tmp_path / "la.pt", la.model)
    assert_close(again(x), la(x))
    assert_close(again.predict(x, mean="network").log_prob(y), by_network(la, x).log_prob(y))


def by_network(la, x):
    return la.predict(x, mean="network")


def test_the_network_has_the_noise_of_its_own_residuals(fitted):
    la, x, y, x_test, _ = fitted
    residuals = (la.model(x) - y).square().mean(0).sqrt().detach()
    found = by_network(la, x_test)
    assert_close(found.mean, la.model(x_test).detach())
    assert_close(found.aleatoric.sqrt()[0], residuals)
    # also where it is what predictions are compared with
    data = la._at(x_test).network()
    assert_close(data.likelihood.sigma_noise.expand_as(residuals), residuals)


def test_a_noise_that_is_not_learnt_belongs_to_the_network(early):
    model, x, y, *_ = early
    la = LinearisedLaplace(model, "regression", num_samples=2)
    la.fit(x, y, em_steps=0, prior_precision=1.0, progress_bar=False)
    assert la.mean == "network"
    residual = (model(x) - y).square().mean().sqrt().item()
    assert la.sigma_noise.item() == pytest.approx(residual)
    weighted = LinearisedLaplace(model, "regression", sigma_noise=3.0, num_samples=2)
    weighted.fit(x, y, weights=torch.ones(150), progress_bar=False, em_steps=2)
    assert_close(weighted(x)[0], model(x).detach())
    assert weighted.predict(x, mean="network").aleatoric[0, 0].item() == pytest.approx(9)


def test_posteriors_of_earlier_files_predict_what_they_predicted(fitted):
    la, _, _, x, _ = fitted
    state = la.state_dict()
    del state["network_noise"]  # which they do not have, and are around the network
    state["mixture"] = torch.tensor([[1.0, 0.0, 1.0, 1.0]], dtype=torch.float64)
    old = LinearisedLaplace(la.model, "regression", sigma_noise=la.likelihood.sigma_noise)
    old.load_state_dict(state)
    mean, variance = old(x)
    assert_close(mean, la.model(x).detach())
    assert_close(variance, la.predict(x).variance + la.sigma_noise**2)


def test_functions_first_used_in_inference_mode_can_be_differentiated():
    functions._rotations.cache_clear()
    with torch.inference_mode():
        functions.functions_of(torch.randn(8, 3, 1).double())
    deviations = torch.randn(8, 3, 1).double().requires_grad_()
    functions.functions_of(deviations).square().sum().backward()
    assert deviations.grad is not None
