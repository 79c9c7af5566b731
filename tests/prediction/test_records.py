"""Everything after a fit works on a record, also on one that was built by hand; regressions around their mean."""

from dataclasses import replace

import pytest
import torch
from tiny import draw, posterior_of
from torch import nn
from torch.testing import assert_close

from torch_lla_em import LaplaceEnsemble, LinearisedLaplace, NotFittedError, compare
from torch_lla_em.distil import distil
from torch_lla_em.inference import Estimate, FitResult
from torch_lla_em.jacobian import LinearModel, Network, NetworkState, ParameterLayout
from torch_lla_em.likelihoods import Regression
from torch_lla_em.prediction import Posterior, Posteriors, Setting, calibrate, check, predict
from torch_lla_em.prediction.prediction import network_of
from torch_lla_em.runtime import files

SIGMA = 0.3


@pytest.fixture
def dense():
    """A network that is linear, and the record of its dense posterior, whose samples are a root of it."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x, y = draw(30, 3), draw(30, 2, seed=1)
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    J = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(parameters)
    J = torch.cat([J[n].flatten(2) for n in parameters], 2)
    flat = J.flatten(0, 1)
    covariance = torch.linalg.inv(2 * torch.eye(8).double() + flat.T @ flat / SIGMA**2)
    w_lin = covariance @ flat.T @ y.flatten() / SIGMA**2
    samples = 8**0.5 * torch.linalg.cholesky(covariance).T
    network = Network(model)
    linear = LinearModel(network, ParameterLayout.of(model, list(parameters)))
    zero = torch.zeros(()).double()
    result = FitResult(
        *(torch.tensor(2.0).double(), torch.tensor(SIGMA).double(), w_lin, samples),
        *(torch.ones(8).double(), Estimate(zero + 8, zero), zero.expand(8), Estimate(zero, zero)),
        mixture=torch.tensor([[1.0, 1.0, 0.0, 1.0]]).double(),
    )
    record = Posterior(Setting(linear, NetworkState(network)), Regression(SIGMA), result)
    return record, J, covariance, w_lin, x, y


def test_predictions_of_a_record_are_those_of_the_dense_posterior(dense):
    record, J, covariance, w_lin, x, y = dense
    found = predict(record, x)
    assert_close(found.f_mean, J @ w_lin)
    assert_close(found.f_covariance, J.flatten(0, 1) @ covariance @ J.flatten(0, 1).T)
    assert_close(found.predictive_variance, found.f_variance + SIGMA**2)
    both = predict(Posteriors((record, record)), x)
    assert_close(both.log_prob(y), found.log_prob(y))
    assert len(both.members) == 2


@pytest.mark.parametrize("several", [False, True])
def test_a_record_is_calibrated_checked_compared_and_distilled(dense, several):
    record, *_, x, y = dense
    record = Posteriors((record, record)) if several else record
    unseen = (draw(80, 3, seed=2), draw(80, 2, seed=3))
    known = calibrate(record, *unseen)
    assert record.correction.reference is None and known.correction.reference is not None
    prediction = predict(known, x)
    assert prediction.log_prob(y).mean() > predict(record, x).log_prob(y).mean()
    lower, upper = prediction.interval(0.8)
    assert (lower < upper).all() and prediction.p_value.shape == (30,)
    assert check(known, x, y, level=0.8).groups[0].number == 30
    assert len(compare({"as fitted": record, "calibrated": known}, x, y).records) == 2
    student = distil(known, x, steps=2, num_inputs=4, progress_bar=False)
    assert student(x)[0].shape == (30, 2)
    again = calibrate(known, *unseen)  # from the record as fitted, whatever was before
    assert_close(torch.tensor(again.tables), torch.tensor(known.tables))


def test_records_of_changed_networks_and_members_are_refused(dense):
    record, *_, x, y = dense
    pair = calibrate(Posteriors((record, record)), draw(80, 3, seed=2), draw(80, 2, seed=3))
    moved = calibrate(record, x + 1, y)
    with pytest.raises(RuntimeError, match="A member was fitted or calibrated again"):
        predict(replace(pair, members=(record, moved)), x)
    with pytest.raises(TypeError, match="class Linear is not a posterior"):
        predict(record.setting.linear_model.network.module, x)
    record.setting.linear_model.network.module.bias.data += 1
    with pytest.raises(NotFittedError, match="changed"):
        predict(record, x)


def test_objects_take_records_of_their_kind(dense):
    record, *_, x, y = dense
    la = LinearisedLaplace(record.setting.linear_model.network.module, Regression(SIGMA))
    ensemble, pair = LaplaceEnsemble([la]), Posteriors((record,))
    for holder, wrong, kind in ((la, pair, "of a fit"), (ensemble, record, "of several fits")):
        with pytest.raises(TypeError, match=f"posterior must be the record {kind}"):
            holder.take(wrong)
    la.take(record)
    ensemble.take(calibrate(Posteriors((record,)), x + 1, y))
    assert la.posterior is record and ensemble.calibration is not None


@pytest.mark.parametrize("several", [False, True])
def test_a_pass_over_held_out_data_hashes_each_network_once(dense, several, monkeypatch):
    record, *_, x, y = dense
    record, hashed = Posteriors((record, record)) if several else record, []
    known, real = calibrate(record, x + 1, y), files.fingerprint
    monkeypatch.setattr(files, "fingerprint", lambda module: hashed.append(0) or real(module))
    for use in (calibrate, lambda _, *given: check(known, *given, level=0.5)):
        hashed.clear()
        use(record, x + 2, y)
        assert len(hashed) == len(record.members)
    hashed.clear()
    compare([known], x + 1, y)
    assert len(hashed) == len(record.members)


# regressions are predicted around the function whose residuals σ describes


@pytest.fixture(scope="module", params=[1, 2])
def early(request):
    """A network that is far from trained, with outputs in one unit or in two; training and test data."""
    outputs = request.param
    torch.manual_seed(0)
    x = (2 * torch.rand(500, 3) - 1).double()
    y = torch.cat([torch.sin(3 * x[:, :1]), 100 * x[:, 1:2] * x[:, 2:]], 1) + 5
    y = (y + torch.tensor([0.05, 5.0]) * torch.randn(500, 2))[:, :outputs]
    model = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, outputs)).double()
    model[2].weight.data[1:] *= 100
    sigma = None if outputs == 1 else torch.tensor([0.1, 10.0])
    la = LinearisedLaplace(model, Regression(sigma), num_samples=8)
    return la.fit(x[:150], y[:150], progress_bar=False), x[:150], y[:150], x[150:], y[150:]


def test_predictions_are_around_the_linear_model_with_its_noise(early):
    la, x, y, x_test, y_test = early
    linear, network = la.predict(x_test, mean="linear"), la.predict(x_test, mean="network")
    mean, variance = la(x_test)
    assert la.mean == "linear"
    assert_close(mean, linear.expectation)
    assert_close(la.functional_samples(x_test), linear.samples)
    inside = ((y_test - mean).abs() < 1.645 * variance.sqrt()).double().mean().item()
    assert 0.84 < inside < 0.96
    assert_close(LaplaceEnsemble([la, la])(x_test)[0], mean)
    # the network has the noise of its own residuals, also where predictions are compared with it
    residuals = (la.model(x) - y).square().mean(0).sqrt().detach()
    assert_close(network.f_mean, la.model(x_test).detach())
    assert_close(network.aleatoric.sqrt()[0], residuals)
    sigma = network_of(la.posterior.at(x_test)).likelihood.sigma_noise
    assert_close(sigma.expand_as(residuals), residuals)


def test_a_noise_that_is_not_learnt_belongs_to_the_network(early):
    model, x, y = early[0].model, *early[1:3]
    la = posterior_of(model, "regression", x, y, num_samples=2, at=1.0)
    assert la.mean == "network"
    assert la.sigma_noise.item() == pytest.approx((model(x) - y).square().mean().sqrt().item())
    weighted = LinearisedLaplace(model, Regression(3.0), num_samples=2)
    weighted.fit(x, y, weights=torch.ones(150), progress_bar=False, em_steps=2)
    assert_close(weighted(x)[0], model(x).detach())
    assert weighted.predict(x, mean="network").aleatoric[0, 0].item() == pytest.approx(9)
