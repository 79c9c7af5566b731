"""Predictions after the weights changed, of moved models, and of inputs of any form."""

import copy
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny import tiny
from torch import nn
from torch.testing import assert_close

from torch_lla_em import LinearisedLaplace, Newton, NotFittedError
from torch_lla_em.inference import Estimate, Posterior
from torch_lla_em.inference.mackay import Hyperparameters
from torch_lla_em.solvers import BlockCG


@pytest.fixture(scope="module")
def original():
    case = tiny("classification")
    la = LinearisedLaplace(case.model, "classification", num_samples=3)
    return case, la.fit([(case.x, case.y)], em_steps=0, prior_precision=5.0, progress_bar=False)


@pytest.fixture
def fitted(original):
    case, la = original
    la = copy.deepcopy(la)
    return case, la, la.model


def fused(model):
    optimiser = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimiser.step()


def assigned(model):
    state = {name: tensor + 0.1 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def exchanged(model):
    for p in model.parameters():
        p.data = p.data + 0.1


def replaced(model):
    model[2] = nn.Linear(4, 3).double()


def from_vector(model):
    vector = nn.utils.parameters_to_vector(model.parameters()) + 0.1
    nn.utils.vector_to_parameters(vector, model.parameters())


def other_activation(model):
    model[1] = nn.ReLU()


CHANGES = [fused, assigned, exchanged, replaced, from_vector, nn.Module.float, other_activation]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_that_torch_does_not_count_are_noticed(change, fitted, tmp_path):
    case, la, model = fitted
    change(model)
    x = case.x.to(next(model.parameters()).dtype)
    for call in (lambda: la(x), la.state_dict, lambda: la.save(tmp_path / "la.pt")):
        with pytest.raises(NotFittedError, match="have changed"):
            call()
    with pytest.raises(NotFittedError, match="have changed"):
        la.calibrate([(x, case.y)])
    la.to(torch.float16)  # moving does not make it right
    with pytest.raises(NotFittedError, match="have changed"):
        la(case.x)


def test_a_change_of_a_single_weight_is_noticed(fitted, tmp_path):
    case, la, model = fitted
    wide = nn.Linear(1000, 3).double()
    la = LinearisedLaplace(wide, "classification", num_samples=2)
    x = torch.randn(5, 1000).double()
    la.fit([(x, torch.arange(5) % 3)], em_steps=0, prior_precision=5.0, progress_bar=False)
    wide.weight.data[1, 7] += 1e-9
    with pytest.raises(NotFittedError, match="have changed"):
        la.save(tmp_path / "la.pt")


def test_the_same_weights_in_another_place_are_the_same(fitted):
    case, la, model = fitted
    expected = la(case.x)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert torch.equal(la(case.x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(la))(case.x), expected)


def test_moved_posteriors_check_derivatives_again(fitted):
    case, la, _ = fitted
    la(case.x)
    la.float()
    assert la._linear_model.report is None
    la(case.x.float())
    assert la._linear_model.report is not None


def test_loaded_posteriors_check_derivatives_before_predicting(fitted):
    case, la, model = fitted
    other = LinearisedLaplace(model, "classification")
    other.load_state_dict(la.state_dict())
    other(case.x)
    assert other._linear_model.report is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_predictions_do_not_follow_autocast(fitted, dtype):
    case, la, _ = fitted
    la.float()
    x, y = case.x.float(), case.y
    la.calibrate([(x, (y + 1) % 3)])

    def answers():
        p = la.predict(x)
        several = [p.probs, p.log_probs, p.entropy, p.epistemic, p.covariance, p.mean, p.variance]
        return [la(x), *several, p.joint_log_prob(y), p.smoothed(), p.samples, p.standard_error]

    expected = answers()
    with torch.autocast("cpu", dtype):
        inside = answers()
    for a, b in zip(inside, expected):
        assert torch.equal(a, b)


def test_predictions_work_in_inference_mode(fitted):
    case, la, _ = fitted
    expected = la(case.x)
    with torch.inference_mode():
        assert torch.equal(la(case.x), expected)
        assert torch.equal(la(case.x.clone()), expected)
        la.calibrate([(case.x, case.y)])
    la(case.x)


def test_inputs_of_another_precision_are_named(fitted):
    case, la, _ = fitted
    with pytest.raises(TypeError, match=r"inputs are torch.float32, .* weights are torch.float64"):
        la(case.x.float())


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 3)

    def forward(self, tokens, mask=None):
        return self.head(tokens if mask is None else tokens * mask)


def test_inputs_by_name():
    torch.manual_seed(0)
    x, mask = torch.randn(8, 2), torch.ones(8, 1)
    la = LinearisedLaplace(Named(), "classification", num_samples=2)
    batch = {"tokens": x, "mask": mask, "labels": torch.arange(8) % 3}
    la.fit([batch], em_steps=0, prior_precision=5.0, progress_bar=False)
    assert_close(la(tokens=x, mask=mask), la({"tokens": x, "mask": mask}))
    assert_close(la.predict(tokens=x, mask=mask).probs, la(tokens=x, mask=mask))
    with pytest.raises(TypeError, match="by name"):
        la(x, mask=mask)


@pytest.mark.parametrize("solver", [Newton(), BlockCG])
def test_invalid_solvers_raise_in_the_constructor(solver):
    with pytest.raises(TypeError, match="solver must be None, BlockKrylov"):
        LinearisedLaplace(tiny("regression").model, "regression", solver=solver)


def test_a_softmax_in_the_network_is_warned_of():
    case = tiny("classification")
    model = nn.Sequential(case.model, nn.Softmax(-1))
    la = LinearisedLaplace(model, "classification", num_samples=2)
    with pytest.warns(UserWarning, match="remove the softmax"):
        la.fit([(case.x, case.y)], em_steps=0, prior_precision=5.0, progress_bar=False)


def test_a_fit_may_choose_the_components_of_predictions(original):
    case, la = original
    third = torch.tensor([[1 / 3, 1, 0, 1], [1 / 3, 1, 0, 0], [1 / 3, 0, 1, 0]]).double()
    hyper = Hyperparameters(la.prior_precision, None)
    gamma = Estimate(la.effective_dim, la.effective_dim_error)
    found = Posterior(
        hyper, la.w_lin, la.w_samples, la.scale, gamma, la.certificate, gamma, 0.0, 0.0, 0.0, None,
        la._modes, mixture=third,
    )  # fmt: skip
    other = LinearisedLaplace(case.model, "classification", num_samples=3)
    other._store(found, [], 30)
    mode, posterior = la.predict(case.x, "linear").mean, la.predict(case.x, "linear").probs
    expected = (posterior + mode.softmax(-1) + case.model(case.x).detach().softmax(-1)) / 3
    assert_close(other(case.x), expected)


def test_predictions_copy_no_vectors(monkeypatch):
    case = tiny("classification")
    la = LinearisedLaplace(case.model, "classification", num_samples=3)
    la.fit([(case.x, case.y)], progress_bar=False)
    monkeypatch.setattr(LinearisedLaplace, "_columns", None)  # all vectors beside each other
    assert la.mean == "linear" and la(case.x).shape == (len(case.x), 3)


class Scaled(nn.Module):
    """A network with a weight that acts by no matrix product."""

    def __init__(self):
        super().__init__()
        self.first, self.scale, self.last = (
            nn.Linear(2, 8),
            nn.Parameter(torch.ones(8)),
            nn.Linear(8, 3),
        )

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)) * self.scale)


def test_threads_return_the_same_predictions():
    torch.manual_seed(0)
    model, x = Scaled(), torch.randn(20, 2)
    la = LinearisedLaplace(model, "classification", num_samples=3)
    la.fit([(x, torch.arange(20) % 3)], em_steps=0, prior_precision=5.0, progress_bar=False)
    model.train()
    expected, interval = la(x), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: la(x), range(40)))
    finally:
        sys.setswitchinterval(interval)
    assert all(torch.equal(answer, expected) for answer in answers)
    assert all(layer.training for layer in model.modules())
