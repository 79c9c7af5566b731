"""Directions of a last layer's span that solve the equations of a part of the examples, against dense solutions."""

import pytest
import torch
from steps import span_e_step, start_of, states_of_em
from tiny import draw, problem_of
from torch import nn
from torch.testing import assert_close

from torch_lla_em import Classification, Regression
from torch_lla_em.inference import part
from torch_lla_em.inference import span_e_step as fits
from torch_lla_em.inference.stochastic_prior import get_sto_samples
from torch_lla_em.solvers import BlockCG

LAST = ["2.*"]


def problem(rows, width=5, likelihood=None, sites=()):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3)).double()
    x = draw(rows, *sites, 4)
    y = model(x).detach() if likelihood else torch.randint(3, x.shape[:-1])
    batches = list(zip(x.split(rows // 2), y.split(rows // 2)))
    return problem_of(model, likelihood or Classification(), batches, LAST)


def dense_g(found, e_step, q, rows):
    """Return G of some examples in scaled weights, (P, P)."""
    P, outputs = found.size, e_step.span.of_all.of(rows)
    scale, layout = e_step.span.prior.scale, found.layout
    J = outputs.push_weights(torch.eye(P, dtype=torch.float64) * scale, layout)
    HJ = e_step.over.expected.product(q.curved.H, J, rows)
    return J.T @ HJ


@pytest.mark.parametrize("sites", [(), (2,)])
@pytest.mark.parametrize("likelihood", [None, Regression(0.3)])
@pytest.mark.parametrize("share", [1, 3])
def test_directions_are_solutions_of_a_part(share, likelihood, sites, monkeypatch):
    monkeypatch.setattr(part, "_FEWEST", 1)
    monkeypatch.setattr(part, "_SHARE", share)
    monkeypatch.setattr(part, "_SOLVER", BlockCG(tolerance=1e-10, max_passes=100))
    found = problem(6, likelihood=likelihood, sites=sites)
    e_step = span_e_step(found, get_sto_samples(found, 2), moves=likelihood is None)
    q = e_step.over.first(0.7)
    r = draw(3, found.size, seed=1)
    rows = torch.arange(6 // share) * share
    A = share * dense_g(found, e_step, q, rows) + 0.7 * torch.eye(found.size).double()
    z = 0.7 * torch.linalg.solve(A, r.T).T
    assert_close(part.ahead(e_step.over, q, r), z, rtol=1e-6, atol=1e-8)


def test_other_parameters_keep_the_residuals():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    found = problem_of(model, Classification(), [(draw(6, 4), torch.arange(6) % 3)], ["0.*"])
    e_step = span_e_step(found, get_sto_samples(found, 2), moves=True)
    r = draw(3, found.size, seed=1)
    assert part.ahead(e_step.over, e_step.over.first(1.0), r) is r


def test_residuals_remain_where_the_product_is_lost_to_rounding():
    found = problem(6)
    e_step = span_e_step(found, get_sto_samples(found, 2), moves=True)
    q, r = e_step.over.first(1.0), draw(3, found.size, seed=1)
    negative = q._replace(curved=q.curved._replace(H=-100 * q.curved.H))
    assert part.ahead(e_step.over, negative, r) is r


def test_the_error_falls_faster(monkeypatch):
    monkeypatch.setattr(part, "_FEWEST", 300)
    found = problem(900, width=40)
    noise = get_sto_samples(found, 4)

    def errors():
        e_step = span_e_step(found, noise, 1e-3, em_steps=0)
        states = states_of_em(e_step, start_of(found, 1.0), em_steps=0)
        return [state.statistics.sample_error for state, _ in zip(states, range(5))]

    by_part = errors()
    monkeypatch.setattr(fits, "ahead", lambda over, q, residuals: residuals)
    by_residuals = errors()
    assert by_part[0] == by_residuals[0]
    assert by_part[4] < 0.2 * by_residuals[4]
