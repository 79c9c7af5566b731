"""What the probe must see, however many outputs there are, and what it must wait with."""

import copy
import pickle

import pytest
import torch
from jacobians import X, drawn, linear_model, mlp, prepared
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from torch_lla_em.jacobian.parameters import select_parameters
from torch_lla_em.jacobian.probe import block_errors


def test_blocks_are_compared_each_on_its_own_size():
    layout = linear_model(mlp()).layout
    truth = drawn(layout.size)
    truth[:12] *= 1e-6
    wrong = truth.clone()
    wrong[:6] = 0
    eps = torch.finfo(torch.float64).eps
    assert block_errors(layout, truth * (1 + eps), truth, eps).max() < eps**0.5
    assert block_errors(layout, wrong, truth, eps).argmax() == 0
    assert block_errors(layout, wrong, truth, eps)[0] > eps**0.5


class Dead(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False)

    def forward(self, x):
        return self.head(F.relu(self.layer(x)))


def test_a_first_batch_of_zeros_is_no_verdict():
    linear = linear_model(prepared(Dead()))
    assert linear.probe(torch.zeros(4, 2).double()) is None and linear.report is None
    assert linear.probe(drawn(4, 2)).path.forward and linear.report is not None


def test_it_is_asked_for_again_elsewhere_and_when_forgotten():
    linear = linear_model(mlp())
    linear.path = linear.path._replace(forward=False)
    assert linear.probe(X).path.forward is False
    linear.forget()
    assert linear.report is None and linear.path.forward
    linear.probe(X)
    assert linear.report is not None
    linear.network.module.float()
    assert linear.report is None and linear.probe(X.float()) is linear.report


def test_complex_parameters_are_refused_by_name():
    model = nn.Linear(2, 2)
    model.turn = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(TypeError, match="'turn' is complex"):
        select_parameters(model)
    assert select_parameters(model, ["weight", "bias"]) == ("weight", "bias")


def test_a_network_made_in_inference_mode_says_what_to_do():
    with torch.inference_mode():
        model = nn.Linear(3, 2).double()
    with pytest.raises(ValueError, match="inference_mode.*copy.deepcopy"):
        linear_model(model)
    linear_model(copy.deepcopy(model)).probe(X)


def test_copies_hold_no_data_and_are_probed_when_they_need_to_be():
    linear = linear_model(mlp())
    linear.probe(X, needs_path=False)
    assert linear.report.path is None and linear.factored is not None
    again = pickle.loads(pickle.dumps(linear))
    assert not any(X.shape == getattr(value, "shape", None) for value in vars(again).values())
    w = drawn(2, linear.layout.size)
    for model in (linear, again):
        with model.network.guarded():
            assert_close(model.by_autodiff(X).push(w), linear.at(X, 9).push(w))
        assert model.report.path.forward
