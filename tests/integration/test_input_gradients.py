"""Predictions are differentiable in their inputs, where a gradient is requested."""

import pytest
import tiny
import torch
from torch import nn
from torch.testing import assert_close


def fitted(name, **options):
    case, la = tiny.fitted(name, em_steps=0, prior_precision=20.0, **{"num_samples": 2, **options})
    return la, case.x[:2].clone().requires_grad_()


@pytest.fixture(scope="module")
def classifier():
    return fitted("classification", num_samples=3)


PREDICTIONS = {
    "mc": lambda la, x: la(x),
    "probit": lambda la, x: la(x, link_approx="probit"),
    "samples": lambda la, x: la.functional_samples(x),
    "one sample": lambda la, x: la.function_sample(1)(x),
    "entropy": lambda la, x: la.predict(x, mean="linear").entropy,
    "epistemic": lambda la, x: la.predict(x).epistemic,
}


@pytest.mark.parametrize("kind", PREDICTIONS)
def test_predictions_have_right_gradients(classifier, kind):
    la, x = classifier
    assert torch.autograd.gradcheck(lambda x: PREDICTIONS[kind](la, x), x)


def test_gradients_are_computed_on_request_only(classifier):
    la, x = classifier
    assert not la(x.detach()).requires_grad
    with torch.no_grad():
        prediction = la.predict(x)
        assert not prediction.centre.requires_grad and not prediction.deviations.requires_grad
    assert_close(la(x).detach(), la(x.detach()))
    la(x).square().sum().backward()
    assert all(p.grad is None for p in la.model.parameters())
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize("parameters", ["last_layer", ["0.*"]], ids=["last layer", "first layer"])
def test_gradients_pass_a_subset_of_parameters(parameters):
    la, x = fitted("regression", parameters=parameters)
    assert torch.autograd.gradcheck(lambda x: la(x)[1], x)


def test_gradients_pass_two_reverse_passes():
    """weight_norm has no forward mode."""
    torch.manual_seed(0)
    norm = nn.utils.parametrizations.weight_norm
    model = nn.Sequential(norm(nn.Linear(2, 3)), nn.Tanh(), nn.Linear(3, 3)).double()
    la, x = fitted("regression", model=model)
    assert not la._linear_model.path.forward
    assert torch.autograd.gradcheck(la.functional_samples, x)
