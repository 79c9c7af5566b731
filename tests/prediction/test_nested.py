"""Posteriors as submodules of another module."""

import copy
import pickle

import pytest
import tiny
import torch
from torch import nn
from torch.testing import assert_close

from torch_lla_em import LaplaceEnsemble, LinearisedLaplace
from torch_lla_em.prediction import NotFittedError


def unfitted(model):
    return LinearisedLaplace(model, "classification", num_samples=4)


class System(nn.Module):
    """A module with a posterior in front of its network and behind it."""

    def __init__(self, net, first, last):
        super().__init__()
        self.first, self.net, self.last = first, net, last
        self.threshold = nn.Parameter(torch.zeros(1))


def rebuilt(la, kind):
    """A system of a fitted posterior, and another one with other weights, as after a restart."""
    other = tiny.tiny("classification").model
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    fresh = [kind([unfitted(other), unfitted(other)]) for _ in range(2)]
    return System(la.model, kind([la, la]), kind([la, la])), System(other, *fresh)


def first(members):
    return members[0]


@pytest.mark.parametrize("kind", [first, LaplaceEnsemble])
def test_a_posterior_is_in_the_state_of_the_module_that_contains_it(kind, tmp_path):
    case, la = tiny.fitted()
    whole, fresh = rebuilt(la, kind)
    for each in (whole.first, whole.last):
        each.calibrate(case.x, case.y)
    torch.save(whole.state_dict(), tmp_path / "system.pt")
    fresh.load_state_dict(torch.load(tmp_path / "system.pt"))
    for loaded, known in ((fresh.first, whole.first), (fresh.last, whole.last)):
        ours, theirs = known.predict(case.x), loaded.predict(case.x)
        assert torch.equal(ours.probs, theirs.probs)
        assert torch.equal(ours.p_value, theirs.p_value)
        assert loaded.calibration == known.calibration


def test_a_module_with_a_posterior_that_is_not_fitted_is_saved_without_it():
    case, la = tiny.fitted()
    empty = System(case.model, unfitted(case.model), unfitted(case.model))
    assert not [name for name in empty.state_dict() if "first" in name]
    empty.load_state_dict(empty.state_dict())
    with pytest.raises(RuntimeError, match="Missing.*first.w_lin"):
        System(la.model, la, la).load_state_dict(empty.state_dict())


def test_a_posterior_of_other_weights_is_refused_when_it_is_used():
    case, la = tiny.fitted()
    state = {f"0.{name}": tensor for name, tensor in la.state_dict().items()}
    model = tiny.tiny("classification").model
    nn.Sequential(unfitted(model)).load_state_dict(state)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    outer = nn.Sequential(unfitted(model))
    outer.load_state_dict(state)
    with pytest.raises(NotFittedError, match="weights have changed"):
        outer(case.x)
    with pytest.warns(UserWarning, match="The state_dict has no posterior"):
        assert not outer.state_dict()
    other = nn.Sequential(LinearisedLaplace(model, "classification", parameters=["2.*"]))
    with pytest.raises(RuntimeError, match="pass the same `parameters`"):
        other.load_state_dict(state)


@pytest.mark.parametrize("kind", [first, LaplaceEnsemble])
@pytest.mark.parametrize("cast", [nn.Module.float, nn.Module.bfloat16, nn.Module.cpu])
def test_a_module_is_cast_with_the_posterior_in_front_of_its_network_and_behind_it(kind, cast):
    case, la = tiny.fitted()
    whole = System(la.model, kind([la, la]), kind([copy.deepcopy(la)]))
    whole = cast(pickle.loads(pickle.dumps(whole)))
    dtype = whole.net[0].weight.dtype
    for each in (whole.first, whole.last):
        room = 100 * torch.finfo(dtype).eps
        assert_close(each(case.x.to(dtype)).double(), la(case.x), rtol=room, atol=room)


def test_a_module_that_is_trained_and_then_cast_needs_another_fit():
    case, la = tiny.fitted()
    outer = nn.ModuleList([la.model, la])
    with torch.no_grad():
        la.model[0].weight.add_(0.1)
    outer.float()
    with pytest.raises(NotFittedError, match="weights have changed"):
        la(case.x.float())
