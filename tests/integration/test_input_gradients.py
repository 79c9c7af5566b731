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
def test_predictions_have_right_gradients_on_request_only(classifier, kind):
    (la, x), call = classifier, PREDICTIONS[kind]
    assert torch.autograd.gradcheck(lambda x: call(la, x), x)
    assert not call(la, x.detach()).requires_grad
    with torch.no_grad():
        assert not call(la, x).requires_grad
    assert_close(call(la, x).detach(), call(la, x.detach()))
    (slope,) = torch.autograd.grad(call(la, x).square().sum(), x)
    assert all(p.grad is None for p in la.model.parameters()) and slope.abs().sum() > 0


def test_gradients_pass_a_subset_of_parameters_and_two_reverse_passes():
    for parameters in ("last_layer", ["0.*"]):
        la, x = fitted("regression", parameters=parameters)
        assert torch.autograd.gradcheck(lambda x: la(x)[1], x)
    torch.manual_seed(0)
    norm = nn.utils.parametrizations.weight_norm  # has no forward mode
    model = nn.Sequential(norm(nn.Linear(2, 3)), nn.Tanh(), nn.Linear(3, 3)).double()
    la, x = fitted("regression", model=model)
    assert torch.autograd.gradcheck(la.functional_samples, x)
