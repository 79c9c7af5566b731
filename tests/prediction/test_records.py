"""Everything after a fit works on a record, also on one that was built by hand."""

import pytest
import torch
from tiny import draw
from torch import nn
from torch.testing import assert_close

from torch_lla_em import compare
from torch_lla_em.distil import distil
from torch_lla_em.inference import Estimate, FitResult
from torch_lla_em.jacobian import LinearModel, Network, NetworkState, ParameterLayout
from torch_lla_em.likelihoods import Regression
from torch_lla_em.prediction import NotFittedError, Posterior, Records, Setting

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
    found = Records(record).predict(x)
    assert_close(found.mean, J @ w_lin)
    assert_close(found.covariance, J.flatten(0, 1) @ covariance @ J.flatten(0, 1).T)
    assert_close(found.predictive_variance, found.variance + SIGMA**2)
    both = Records([record, record]).predict(x)
    assert_close(both.log_prob(y), found.log_prob(y))
    assert len(both.members) == 2


def test_a_record_is_calibrated_checked_compared_and_distilled(dense):
    record, _, _, _, x, y = dense
    one = Records(record)
    assert one.calibrate(draw(80, 3, seed=2), draw(80, 2, seed=3)) is one
    assert record.calibration is None and one.posteriors[0].calibration.applied
    prediction = one.predict(x)
    assert prediction.log_prob(y).mean() > Records(record).predict(x).log_prob(y).mean()
    lower, upper = prediction.interval(0.8)
    assert (lower < upper).all() and prediction.p_value.shape == (30,)
    assert one.check(x, y, level=0.8).groups[0].number == 30
    assert len(compare({"as fitted": Records(record), "calibrated": one}, x, y).records) == 2
    student = distil(one, x, steps=2, num_inputs=4, progress_bar=False)
    assert student(x)[0].shape == (30, 2)
    # from the record as fitted, whatever was calibrated before
    first = one.posteriors[0].result.mixture
    assert_close(
        one.calibrate(draw(80, 3, seed=2), draw(80, 2, seed=3)).posteriors[0].result.mixture, first
    )


def test_records_are_refused(dense):
    record, *_, x, y = dense
    with pytest.raises(ValueError, match="no posteriors"):
        Records([])
    with pytest.raises(ValueError, match="not calibrated together"):
        Records([record, record]).calibrate(x, y)
    record.setting.linear_model.network.module.bias.data += 1
    with pytest.raises(NotFittedError, match="changed"):
        Records(record).predict(x)
