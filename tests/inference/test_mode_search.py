"""The mode over a recycled subspace: the dense one, in few columns, whatever rows allow."""

import pytest
import torch
from tiny import LOG_PROBS, likelihood_of, tiny

from torch_lla_em.data import Data
from torch_lla_em.inference.linear_mode import optimise_MAP
from torch_lla_em.inference.mode_search import ModeSearch
from torch_lla_em.inference.stochastic_prior import get_sto_samples
from torch_lla_em.jacobian import LinearModel, Network, ParameterLayout, select_parameters
from torch_lla_em.problem.outputs import outputs, pull_back
from torch_lla_em.problem.problem import Problem
from torch_lla_em.solvers import Newton


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def setting(name, layerwise=False):
    problem = tiny(name).problem(7, 18)
    return problem, get_sto_samples(problem, 4, layerwise=layerwise)


def test_what_is_said_of_all_rows_is_the_dense_jacobian():
    case = tiny("classification")
    problem, _ = setting("classification")
    J, w = case.exact().J, torch.randn(2, problem.size).double()
    said = outputs(problem, w)
    torch.testing.assert_close(said.f, case.model(case.x).detach())
    torch.testing.assert_close(said.Jw, torch.einsum("ncp,kp->knc", J, w))
    assert torch.equal(said.targets, case.y)
    u = torch.randn(2, *said.f.shape).double()
    g, f = pull_back(problem, u)
    torch.testing.assert_close(g, torch.einsum("ncp,knc->kp", J, u))
    torch.testing.assert_close(f, said.f.flatten())


@pytest.mark.parametrize("name", list(LOG_PROBS))
@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("directions", [3, 1000])
def test_the_mode_is_the_dense_one_at_every_precision(name, layerwise, directions, monkeypatch):
    problem, noise = setting(name, layerwise)
    bytes_ = 8 * directions * (2 * problem.size + 3 * problem.data.num_outputs)
    monkeypatch.setattr("torch_lla_em.inference.mode_search.room", lambda _: 4 * bytes_)
    monkeypatch.setattr("torch_lla_em.inference.mode_search.optimise_MAP", None)
    search = ModeSearch(problem, noise.prior)
    exact = tiny(name).exact(noise.prior.scale)
    for precision in (3.0, 30.0):
        precision = number([precision, 2.0, 5.0, precision]) if layerwise else number(precision)
        mode = search.find(problem, precision, 1e-7)
        per_weight = noise.prior.layout.expand(precision) if layerwise else precision
        truth = exact.mode(per_weight)
        assert mode.converged and search._span.size <= directions
        torch.testing.assert_close(mode.w, truth, rtol=1e-4, atol=1e-5)
        assert mode.loss == pytest.approx(exact.loss(truth).item(), rel=1e-6)


def test_it_takes_fewer_columns_than_newtons_method():
    problem, noise = setting("classification")
    search, spent = ModeSearch(problem, noise.prior), []
    for precision in (100.0, 30.0, 10.0):
        found = search.find(problem, number(precision), 1e-2)
        newton = optimise_MAP(problem, noise.prior, number(precision), Newton(1e-2))
        spent.append([found.passes, newton.passes])
        assert found.loss == pytest.approx(newton.loss, rel=1e-2)
    ours, theirs = torch.tensor(spent).sum(0)
    assert ours < 0.5 * theirs
    columns = problem.cost.columns
    loss, square = search.objective(problem, number(20.0))
    assert problem.cost.columns == columns and loss > 0 and square > 0


def problem_of(model, name, loader):
    layout = ParameterLayout.of(model, select_parameters(model))
    linear = LinearModel(Network(model), layout)
    return Problem(linear, likelihood_of(name), Data(loader, torch.device("cpu")))


class Shuffled:
    """Another order of the rows at every pass, from a generator that is nobody's."""

    def __init__(self, case):
        self.case, self.pass_number = case, 0

    def __iter__(self):
        self.pass_number += 1
        generator = torch.Generator().manual_seed(self.pass_number)
        for rows in torch.randperm(30, generator=generator).split(8):
            yield self.case.x[rows], self.case.y[rows]


def test_rows_in_another_order_take_products_of_G():
    case = tiny("classification")
    problem = problem_of(case.model, "classification", Shuffled(case))
    problem.data.keep = False
    noise = get_sto_samples(problem, 4)
    mode = ModeSearch(problem, noise.prior).find(problem, number(5.0), 1e-6)
    truth = case.exact(noise.prior.scale).mode(number(5.0))
    torch.testing.assert_close(mode.w, truth, rtol=1e-3, atol=1e-4)


def test_rows_of_several_shapes_take_products_of_G():
    case = tiny("classification")
    x, y = case.x, case.y
    ragged = [(x[:8].view(4, 2, 2), y[:8].view(4, 2)), (x[8:12].view(4, 1, 2), y[8:12].view(4, 1))]
    problem = problem_of(case.model, "classification", ragged)
    noise = get_sto_samples(problem, 2)
    assert outputs(problem, problem.w_MAP[None]) is None
    assert ModeSearch(problem, noise.prior).find(problem, number(5.0), 1e-6).converged
