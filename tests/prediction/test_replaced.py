"""A posterior is replaced at once: a fit or a load that fails leaves the earlier one."""

import copy

import pytest
import tiny
import torch
from torch import nn
from torch.testing import assert_close

from torch_lla_em import LaplaceEnsemble, LinearisedLaplace, laplace, session
from torch_lla_em.inference import FitResult, result
from torch_lla_em.prediction import calibrates, posterior

POINTS = {
    "learn": (laplace, "learn"),
    "the end of the passes": (session.Session, "end"),
    "the largest variance": (posterior, "variances_without"),
    "the hash of the network": (laplace, "NetworkState"),
    "the checkpoint": (session.Session, "keep"),
    "the calibration": (laplace, "calibrated_on"),
}


CASE = tiny.tiny("classification")
FIRST = [(CASE.x[:20], CASE.y[:20])]


def failing(*args, **kwargs):
    raise RuntimeError("planted")


def same(la, before, x, probs):
    state = la.state_dict()
    assert state.keys() == before.keys()
    assert all(torch.equal(state[name], before[name]) for name in before)
    assert torch.equal(la(x), probs)


@pytest.mark.parametrize("point", POINTS)
def test_a_fit_that_fails_leaves_the_earlier_posterior(point, monkeypatch):
    case, la = tiny.fitted(g_prior=True)
    before, probs = la.state_dict(), la(case.x)
    x, y = case.x[:20], case.y[:20]
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="planted"):
        patched.setattr(*POINTS[point], failing)
        la.fit(x, y, validation=[(case.x, case.y)], progress_bar=False)
    same(la, before, case.x, probs)
    assert la.num_data == 30
    fresh = LinearisedLaplace(case.model, "classification", num_samples=4)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="planted"):
        patched.setattr(*POINTS[point], failing)
        fresh.fit(x, y, validation=[(case.x, case.y)], progress_bar=False)
    with pytest.raises(posterior.NotFittedError, match="not fitted yet"):
        fresh(case.x)


def test_a_load_that_fails_leaves_the_earlier_posterior():
    case, la = tiny.fitted(g_prior=True)
    _, other = tiny.fitted(g_prior=True, seed=1)
    before, probs, state = la.state_dict(), la(case.x), other.state_dict()
    state["scale"] = None
    with pytest.raises(AttributeError):
        la.load_state_dict(state)
    same(la, before, case.x, probs)


def test_outputs_with_too_many_numbers_are_predicted_without_training_examples(monkeypatch):
    monkeypatch.setattr(result, "NUMBERS", 4 * 5 * 5 * 3 - 1)
    torch.manual_seed(0)
    x, y = torch.randn(3, 1, 5, 5), torch.randint(3, (3, 5, 5))
    la = LinearisedLaplace(
        nn.Conv2d(1, 3, 3, padding=1), "classification", num_samples=4, class_dim=1
    )
    la.fit([(x, y)], progress_bar=False, em_steps=2)
    assert la.training_deviations is None and la.prior_precision > 0
    assert_close(la(x).sum(1), torch.ones(3, 5, 5))
    fresh = LinearisedLaplace(la.model, "classification", num_samples=4, class_dim=1)
    fresh.load_state_dict(la.state_dict())
    assert torch.equal(fresh(x), la(x))
    la.calibrate([(x, y)])
    assert la.predict(x).p_value.shape == (3,)


@pytest.mark.parametrize("name", ["classification", "regression"])
def test_a_posterior_contains_the_result_of_the_fit(name):
    """Nothing is stored twice; calibration replaces components and σ, and a file has the same tensors."""
    case, la = tiny.fitted(name)
    before = la._posterior.result
    assert not {*FitResult._fields} & {*posterior.Posterior.__dataclass_fields__}
    la.calibrate(case.x, case.y)
    found, state = la._posterior.result, la.state_dict()
    assert found.w_samples is before.w_samples and found.log_evidence is before.log_evidence
    assert found.mixture is la.mixture and found.sigma_noise is la.sigma_noise
    assert torch.equal(state["_log_evidence"], torch.stack(list(found.log_evidence)))
    assert torch.equal(state["effective_dim_error"], found.effective_dim.standard_error)
    assert la.log_marginal_likelihood() == found.log_evidence
    other = LinearisedLaplace(case.model, tiny.likelihood_of(name), num_samples=4)
    other.load_state_dict(state)
    assert_close(tuple(other._posterior.result)[:-1], tuple(found)[:-1])
    assert other._posterior.result.why == found.why == "accurate"
    moved = copy.copy(la).to(torch.float32)._posterior.result
    assert {t.dtype for t in moved if torch.is_tensor(t)} == {torch.float32}


def test_results_are_read_only_and_a_copy_has_its_own():
    case, la = tiny.fitted()
    before, probs = la.state_dict(), la(case.x)
    other = copy.copy(la).calibrate(case.x, case.y)
    same(la, before, case.x, probs)
    assert other.calibration is not None and la.calibration is None
    assert other.messages[: len(la.messages)] == la.messages
    la.messages.append("not stored")
    assert "not stored" not in la.messages
    for name in ("w_lin", "prior_precision", "calibration", "likelihood", "history", "messages"):
        with pytest.raises(AttributeError):
            setattr(la, name, None)


def test_a_calibration_that_fails_leaves_the_earlier_one(monkeypatch):
    case, la = tiny.fitted()
    for each in (la, LaplaceEnsemble([la])):
        each.calibrate(case.x, case.y)
        before, probs = each.state_dict(), each(case.x)
        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="planted"):
            patched.setattr(calibrates, "half_as_reference", failing)
            each.calibrate(case.x[:20], case.y[:20])
        with pytest.raises(ValueError, match="None of the validation examples has a label"):
            each.calibrate(case.x, torch.full_like(case.y, -100))
        same(each, before, case.x, probs)
