"""Validation sets of training examples are refused, and OOD flags without a validation set are explained."""

import sys

import pytest
import torch
from torch import nn

from torch_lla_em import LaplaceEnsemble, LinearisedLaplace
from torch_lla_em.data.identity import Identity, distinct


@pytest.fixture(scope="module")
def fit():
    torch.manual_seed(0)
    x = torch.randn(400, 3)
    y = (x[:, 0] > 0).long()
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    la = LinearisedLaplace(net, "classification", num_samples=4)
    return la.fit(x[:200], y[:200], em_steps=0, prior_precision=1.0, progress_bar=False), x, y


@pytest.mark.parametrize("rows", [slice(0, 200), slice(0, 100), slice(100, 260), slice(0, 400)])
def test_training_examples_are_refused(fit, rows, tmp_path):
    la, x, y = fit
    la.save(tmp_path / "posterior.pt")
    again = LinearisedLaplace.load(tmp_path / "posterior.pt", la.model)
    for posterior in (la, again, LaplaceEnsemble([la])):
        with pytest.raises(ValueError, match="validation examples are training examples"):
            posterior.calibrate(list(zip(x[rows].split(30), y[rows].split(30))))
    assert la.calibration is None


@pytest.mark.parametrize("weights", ["last", "by class"])
def test_training_examples_with_weights_are_refused_too(fit, weights):
    la, x, y = fit
    w = torch.rand(200)
    batches = list(zip(x[:200].split(50), y[:200].split(50), w.split(50)))
    if weights == "by class":
        batches, weights = [batch[:2] for batch in batches], lambda y: 1.0 + y
    again = LinearisedLaplace(la.model, "classification", num_samples=4)
    fixed = {"em_steps": 0, "prior_precision": 1.0, "progress_bar": False}
    again.fit(batches, weights=weights, **fixed)
    with pytest.raises(ValueError, match="100% of the 200 validation examples"):
        again.calibrate(x[:200], y[:200])
    again.calibrate(x[200:], y[200:])


def test_a_fit_with_training_examples_for_validation_ends_after_its_first_pass(fit, monkeypatch):
    la, x, y = fit
    again = LinearisedLaplace(la.model, "classification", num_samples=4)
    train = [(x[:200], y[:200])]

    def no_second(*arguments):
        raise AssertionError("an E-step was begun")

    monkeypatch.setattr(sys.modules["torch_lla_em.inference.fit"], "over_span", no_second)
    for unseen in (train, list(zip(x[:200].split(30), y[:200].split(30)))):
        with pytest.raises(ValueError, match="validation examples are training examples"):
            again.fit(train, validation=unseen, progress_bar=False)
    with pytest.raises(AssertionError):
        again.fit(train, validation=[(x[200:], y[200:])], progress_bar=False)


def test_other_examples_are_accepted(fit):
    la, x, y = fit
    again = LinearisedLaplace(la.model, "classification", num_samples=4)
    again.load_state_dict(la.state_dict())
    again.calibrate(x[140:400], y[140:400])  # a few are known
    assert again.is_ood(x[200:]).float().mean() < 0.2
    with pytest.warns(UserWarning, match="calibrate has not been called"):
        la.is_ood(x)


def test_equal_training_examples_are_no_sign(fit):
    la, _, _ = fit
    x = torch.randint(2, (200, 3)).float()
    again = LinearisedLaplace(la.model, "classification", num_samples=4)
    again.fit(x, x[:, 0].long(), em_steps=0, prior_precision=1.0, progress_bar=False)
    again.calibrate(x, x[:, 0].long())


def test_a_sample_of_many_examples_estimates_what_is_shared():
    torch.manual_seed(0)
    x, y = torch.randn(20_000, 1), torch.zeros(20_000)

    def of(*rows):
        parts = []
        for some in rows:
            parts.append(Identity())
            parts[-1].add((y[some], x[some]))
        return Identity.of(parts)

    train, half = of(slice(0, 4_000), slice(4_000, 10_000)), of(slice(5_000, 15_000))
    share, number = half.shared_with(train.least)
    assert abs(share - 0.5) < 5 * (0.25 / number) ** 0.5 and number > 400
    assert of(slice(10_000, 20_000)).shared_with(train.least)[0] == 0
    assert distinct(train.least, 10_000) > 0.85 and distinct(train.least, 100_000) < 0.2
    assert Identity.from_state(train.state()).least == train.least
