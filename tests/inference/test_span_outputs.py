"""J V of a span, stored or by the features of a last layer, against J by reverse mode."""

from functools import partial

import pytest
import torch
from tiny import draw, problem_of
from torch import nn
from torch.testing import assert_close

from torch_lla_em import Classification
from torch_lla_em.data import Data
from torch_lla_em.inference.prior import Prior
from torch_lla_em.inference.span import Span
from torch_lla_em.jacobian import LinearModel, Network, ParameterLayout, select_parameters
from torch_lla_em.problem import Blocks, Problem

N = 6


def dense(sites=(), bias=True):
    """A network whose last layer is linear, with its inputs and the number of outputs."""
    layers = nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=bias)
    return nn.Sequential(*layers).double(), draw(N, *sites, 4), -1


def images(kernel):
    layers = nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, kernel, padding=kernel // 2)
    return nn.Sequential(*layers).double(), draw(N, 1, 4, 5), 1


HEADS = {
    "linear": dense,
    "no bias": partial(dense, bias=False),
    "tokens": partial(dense, (2,)),
    "pointwise": partial(images, 1),
    "convolution": partial(images, 3),
}


def span_of(name):
    """Return a span of the last layer's parameters, some directions, and J, (N ... C, P)."""
    torch.manual_seed(0)
    model, x, class_dim = HEADS[name]()
    f = model(x).movedim(class_dim, -1)
    y = torch.zeros(f.shape[:-1], dtype=torch.long)
    layout = ParameterLayout.of(model, select_parameters(model, ["2.*"]))
    linear = LinearModel(Network(model, None, class_dim), layout)
    data = Data([(x[:4], y[:4]), (x[4:], y[4:])], torch.device("cpu"))
    problem = Problem(linear, Classification(), data)
    problem.loss_and_gradient(problem.zeros(1)[0])  # the first pass checks the network
    scale = draw(problem.size).abs() + 0.5
    weights = [p for n, p in model.named_parameters() if n.startswith("2.")]
    J = [torch.autograd.grad(out, weights, retain_graph=True) for out in f.flatten()]
    J = torch.stack([torch.cat([g.flatten() for g in row]) for row in J])
    span = Span(problem, Prior(problem.layout, scale), draw(2, problem.size, seed=2), 1e9)
    assert span.widen(draw(3, problem.size, seed=3)) and span.widen(draw(2, problem.size, seed=4))
    return span, J, scale


@pytest.mark.parametrize("name", HEADS)
def test_products_are_those_of_the_jacobian(name):
    span, J, scale = span_of(name)
    V = span.scaled(torch.eye(5, dtype=torch.float64))
    JV = J @ (scale * V).T
    c, u = draw(2, 5, seed=5), draw(len(J), 2, seed=6)
    assert_close(span.push(c).flatten(0, -2), JV @ c.T)
    assert_close(span.pull(u), u.T @ JV)
    assert_close(span.pull(u, 4), u.T @ JV[:, 4:])
    assert_close(span.pull_weights(u), u.T @ J * scale)
    assert_close(torch.cat([part for _, part in span.parts()]), JV)
    H = Blocks(draw(*span.rows.f.shape, 3, seed=8) + 2 * torch.eye(3).double())
    H = H._replace(values=H.values @ H.values.mT)
    GGN = JV.T @ H.product(JV)
    assert_close(span.ggn(H, 0, JV.dtype), GGN)
    assert_close(span.ggn(H, 3, JV.dtype), GGN[:, 3:])
    passes = span._problem.data.num_passes
    turn = span.restart(draw(1, 5, seed=7))
    assert_close(span.push(torch.eye(3).double()).flatten(0, -2), JV @ turn)
    assert span._problem.data.num_passes == passes  # none is needed


def test_directions_that_nearly_lie_in_a_span_are_orthogonal_to_it_in_float32():
    batches = [(draw(N, 40).float(), torch.arange(N) % 3)]
    problem = problem_of(nn.Linear(40, 3), Classification(), batches)
    problem.loss_and_gradient(problem.zeros(1)[0])
    P, first = problem.size, draw(20, problem.size).float()
    span = Span(problem, Prior(problem.layout, torch.ones(P)), draw(2, P, seed=2).float(), 1e9)
    near = draw(4, 20, seed=3).float() @ first + 0.01 * draw(4, P, seed=4).float()
    assert span.widen(first) and span.widen(near) and span.size == 24
    V = torch.cat(span.blocks).double()
    assert (V @ V.T - torch.eye(24)).abs().max() < 3e-6


def test_g_of_a_complete_span_is_the_dense_one():
    C, x = 9, draw(N, 8)
    y = torch.arange(N) % C
    problem = problem_of(nn.Linear(8, C).double(), Classification(), [(x, y)])
    problem.loss_and_gradient(problem.zeros(1)[0])
    P = problem.size
    span = Span(problem, Prior(problem.layout, torch.ones(P).double()), draw(2, P, seed=2), 1e9)
    assert span.widen(draw(3, P, seed=3)) and span.widen(torch.eye(P).double()) and span.size == P
    H = Blocks(draw(N, C, C, seed=8))
    H = H._replace(values=H.values @ H.values.mT)
    JV = span.push(torch.eye(P).double()).flatten(0, -2)
    for start in (0, 3):
        assert_close(span.ggn(H, start, JV.dtype), (JV.T @ H.product(JV))[:, start:])


@pytest.mark.parametrize("tail", [nn.Softplus(), nn.Linear(3, 3)])
def test_other_parameters_have_no_features(tail):
    model = nn.Sequential(nn.Linear(4, 3), tail).double()
    problem = problem_of(model, Classification(), [(draw(N, 4), torch.arange(N) % 3)], ["0.*"])
    problem.loss_and_gradient(problem.zeros(1)[0])
    assert problem.features(lambda *kept: kept) is None
