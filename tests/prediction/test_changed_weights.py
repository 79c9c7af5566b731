"""Predictions after the weights changed, of moved models, and of inputs of any form."""

import copy
import pickle

import pytest
import torch
from tiny import tiny
from torch import nn
from torch.testing import assert_close

from torch_lla_em import LinearisedLaplace, NotFittedError
from torch_lla_em.jacobian import NetworkState


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


def exchanged(model):
    for p in model.parameters():
        p.data = p.data + 0.1


def in_place_through_data(model):
    for p in model.parameters():
        p.data.add_(0.1)  # without a new version


def other_activation(model):
    model[1] = nn.ReLU()


def by_a_fused_optimiser(model):
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimiser.step()


def by_assignment(model):
    state = {name: 2 * value for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def by_vector_to_parameters(model):
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(2 * vector.detach(), model.parameters())


CHANGES = exchanged, in_place_through_data, nn.Module.float, other_activation
CHANGES = *CHANGES, by_a_fused_optimiser, by_assignment, by_vector_to_parameters


@pytest.mark.parametrize("change", CHANGES)
def test_changes_that_torch_does_not_count_are_noticed(change, fitted, tmp_path):
    case, la, model = fitted
    la(case.x)  # a copy is compared by a hash first, then by a quick look
    change(model)
    x = case.x.to(next(model.parameters()).dtype)
    for call in (lambda: la(x), la.state_dict, lambda: la.save(tmp_path / "la.pt")):
        with pytest.raises(NotFittedError, match="have changed"):
            call()
    with pytest.raises(NotFittedError, match="have changed"):
        la.calibrate([(x, case.y)])
    la.to(torch.float16)
    if change is nn.Module.float:  # both have been cast now
        assert la(case.x.half()).isfinite().all()
        return
    with pytest.raises(NotFittedError, match="have changed"):  # moving does not make it right
        la(case.x)


def test_a_change_of_any_single_number_is_noticed_before_the_next_prediction():
    """Also in float32, where a sum of numbers would round it away."""
    torch.manual_seed(0)
    layers = nn.Linear(3, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 3, bias=False)
    model, x, y = nn.Sequential(*layers), torch.randn(30, 3), torch.arange(30) % 3
    la = LinearisedLaplace(model, "classification", num_samples=3)
    la.fit([(x, y)], em_steps=0, prior_precision=5.0, progress_bar=False)
    la(x)
    for tensor in model.state_dict().values():  # parameters and statistics
        flat, middle = tensor.data.view(-1), tensor.numel() // 2
        if not tensor.is_floating_point():
            continue
        for place in {0, middle, len(flat) - 1}:
            before = flat[place].clone()
            flat[place] = torch.nextafter(before, before + 1)
            with pytest.raises(NotFittedError, match="have changed"):
                la(x)
            flat[place] = before
            la(x)


def test_unchanged_weights_are_not_looked_through(fitted, monkeypatch):
    case, la, model = fitted
    la(case.x)
    monkeypatch.setattr(NetworkState, "_look_through", None)
    la(case.x)


def test_the_same_weights_in_another_place_are_the_same(fitted):
    case, la, model = fitted
    expected = la(case.x)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert torch.equal(la(case.x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(la))(case.x), expected)


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
