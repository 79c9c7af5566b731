"""What the probe must see, however many outputs there are, and what it must wait with."""

import copy
import threading

import pytest
import torch
from jacobians import X, drawn, linear_model, mlp, prepared, products
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from torch_lla_em.jacobian.parameters import select_parameters
from torch_lla_em.jacobian.probe import worst_block


class Gate(nn.Module):
    """Its gate is trained by nothing: forward mode goes through it all the same."""

    def __init__(self, outputs):
        super().__init__()
        self.layer, self.gate = nn.Linear(2, outputs), nn.Linear(2, outputs)

    def forward(self, x):
        with torch.no_grad():
            gate = self.gate(x).sigmoid() + self.layer(x).sigmoid()
        return self.layer(x) * gate


@pytest.mark.parametrize("outputs", [10, 1000])
def test_a_gate_without_gradients(outputs):
    linear = linear_model(Gate(outputs), ["layer.*"])
    report = linear.probe(torch.randn(64, 2))
    assert not report.path.forward and "disagrees" in report.forward


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, u):
        return 2 * u * ctx.saved_tensors[0]


class PartlyOnce(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.a, self.b = nn.Linear(3, outputs), nn.Linear(3, outputs)

    def forward(self, x):
        return self.a(x) + Once.apply(self.b(x))


@pytest.mark.parametrize("rows, outputs", [(4, 2), (512, 5), (64, 1000)])
def test_a_missing_part_of_the_jacobian(rows, outputs):
    with pytest.raises(NotImplementedError, match="disagrees"):
        linear_model(PartlyOnce(outputs)).probe(torch.randn(rows, 3))


def test_a_parameter_in_a_list_with_a_small_gradient():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.small = nn.Linear(3, 2), nn.Parameter(torch.ones(2))
            self.kept = [self.small]

        def forward(self, x):
            return self.layer(x) * 1e3 + 0.3 * self.kept[0]

    with pytest.raises(RuntimeError, match="'small' is used in a place"):
        linear_model(Hidden()).probe(torch.randn(8, 3))


def test_blocks_are_compared_each_on_its_own_size():
    layout = linear_model(mlp()).layout
    truth = drawn(layout.size)
    truth[:12] *= 1e-6
    wrong = truth.clone()
    wrong[:6] = 0
    eps = torch.finfo(torch.float64).eps
    assert worst_block(layout, truth * (1 + eps), truth, eps) is None
    assert worst_block(layout, wrong, truth, eps) == layout.names[0]


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


@pytest.mark.parametrize("factored", [True, False])
def test_products_from_many_threads(factored):
    linear = linear_model(mlp(nn.Dropout(0.5), nn.BatchNorm1d(2).double()).train())
    linear.probe(X)
    if not factored:
        linear.leave_factors()
    flags = torch.backends.mha.get_fastpath_enabled(), torch.backends.cuda.math_sdp_enabled()
    w, u = drawn(3, linear.layout.size), drawn(3, 5, 2)
    expected, faults = products(linear, X, w, u), []

    def work():
        for _ in range(25):
            try:
                assert_close(products(linear, X, w, u), expected)
            except BaseException as error:
                faults.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults[0]
    assert all(layer.training for layer in linear.network.module.modules())
    now = torch.backends.mha.get_fastpath_enabled(), torch.backends.cuda.math_sdp_enabled()
    assert now == flags
