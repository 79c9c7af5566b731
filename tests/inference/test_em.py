"""EM over the prior precision: its acceleration, its one update, and the plain prior it may take."""

import pytest
import torch
from tiny import tiny
from torch import nn

from torch_lla_em import LinearisedLaplace
from torch_lla_em.inference.em import Found, State, em
from torch_lla_em.inference.mackay import Expectation, Hyperparameters, MStep, Step


class Halving:
    """An E-step whose λ halves until it is below 1, and which is exact two steps later."""

    def __init__(self):
        self.kept = []

    def advance(self, state, m_step, kept):
        self.kept.append(kept)
        hyper, step = state.hyper, state.step
        if not kept:
            hyper = Hyperparameters(hyper.precision / 2)
            log, settled = hyper.precision.log(), bool(hyper.precision < 1)
            number = 1 if step is None else step.number + 1
            step = Step(number, state.hyper, log, hyper, 1.0, settled)
        dims, one = torch.ones(2).double(), torch.ones(()).double()
        found = Expectation(hyper, dims, one, 1.0, dims, 0.0, 0.0)
        return Found(found, step, own=len(self.kept))

    def is_exact(self, state):
        return sum(self.kept) >= 2


def test_em_counts_steps_of_the_precision_and_goes_on_until_the_posterior_is_exact(caplog):
    m_step, start = MStep(tiny("bernoulli").problem(), None), torch.tensor(4.0).double()
    states = list(em(Halving(), m_step, State(Hyperparameters(start)), max_steps=9))
    assert [state.hyper.precision.item() for state in states] == [2, 1, 0.5, 0.5, 0.5]
    assert [state.fresh for state in states] == [True, True, True, False, False]
    assert [state.step.number for state in states] == [1, 2, 3, 3, 3]
    assert not caplog.text
    assert not list(em(Halving(), m_step, states[2]._replace(ended=True), max_steps=9))
    # from a state of an earlier run it takes the steps that are left
    rest = list(em(Halving(), m_step, states[0], max_steps=2))
    assert [state.hyper.precision.item() for state in rest] == [1, 1, 1]
    assert "has not converged after 2 EM steps" in caplog.text


@pytest.mark.parametrize("slope", [0.6, -0.6])
def test_a_secant_step_ends_a_geometric_approach_from_one_side_or_both(slope):
    def mapped(log_precision: float) -> Hyperparameters:
        there = torch.tensor(3 + slope * (log_precision - 3), dtype=torch.float64)
        return Hyperparameters(there.exp())

    start = Hyperparameters(torch.tensor(5.0, dtype=torch.float64).exp())
    first, second = mapped(5.0), mapped(mapped(5.0).precision.log().item())
    before = Step(1, start, first.precision.log(), first, 1.0, False)
    new = MStep(None, None).accelerated(before, first, second)
    assert new.precision.log().item() == pytest.approx(3.0)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_every_fit_moves_its_prior_precision_by_the_same_update(likelihood, monkeypatch):
    monkeypatch.setattr("torch_lla_em.inference.mackay._bounded", lambda proposed, here: here)
    torch.manual_seed(0)
    x, model = torch.randn(20, 2), nn.Linear(2, 3)
    y = torch.randint(3, (20,)) if likelihood == "classification" else torch.randn(20, 3)
    la = LinearisedLaplace(model, likelihood, num_samples=4)
    la.fit([(x, y)], em_steps=2, prior_precision=3.0, progress_bar=False)
    assert la.prior_precision.item() == pytest.approx(3.0)
