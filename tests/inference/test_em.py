"""EM over the prior precision: its acceleration, its one update, and the plain prior it may take."""

import pytest
import torch
from tiny import tiny
from torch import nn

from torch_lla_em import LinearisedLaplace
from torch_lla_em.inference.controller import Controller
from torch_lla_em.inference.em import em
from torch_lla_em.inference.options import FitOptions
from torch_lla_em.inference.records import State, Statistics


class Halving:
    """An E-step whose λ halves until it is below 1, and which is exact two steps later."""

    def __init__(self):
        self.fixed = []

    def advance(self, state, controller):
        self.fixed.append(controller.is_fixed(state))
        if not self.fixed[-1]:
            half = state.precision / 2
            new = {"precision": half, "before": state.precision, "converged": bool(half < 1)}
            state = state._replace(number=state.number + 1, **new)
        dims, one = torch.ones(2).double(), torch.ones(()).double()
        found = Statistics(state.precision, None, dims, one, 1.0, dims, 0.0, 0.0)
        return state._replace(statistics=found, own=len(self.fixed))

    def is_exact(self, state):
        return sum(self.fixed) >= 2


def controller(em_steps):
    return Controller(tiny("bernoulli").problem(), None, FitOptions(em_steps=em_steps))


def test_em_counts_steps_of_the_precision_and_goes_on_until_the_posterior_is_exact(caplog):
    start = State(torch.tensor(4.0).double())
    states = list(em(Halving(), controller(9), start))
    assert [state.precision.item() for state in states] == [2, 1, 0.5, 0.5, 0.5]
    assert [state.fresh for state in states] == [True, True, True, False, False]
    assert [state.number for state in states] == [1, 2, 3, 3, 3]
    assert not caplog.text
    assert not list(em(Halving(), controller(9), states[2]._replace(ended=True)))
    # from a state of an earlier run it takes the steps that are left
    rest = list(em(Halving(), controller(2), states[0]))
    assert [state.precision.item() for state in rest] == [1, 1, 1]
    assert "has not converged after 2 EM steps" in caplog.text


@pytest.mark.parametrize("slope", [0.6, -0.6])
def test_a_secant_step_ends_a_geometric_approach_from_one_side_or_both(slope):
    def mapped(precision):
        return (3 + slope * (precision.log() - 3)).exp()

    start = torch.tensor(5.0, dtype=torch.float64).exp()
    first, second = mapped(start), mapped(mapped(start))
    state = State(first, before=start, plain=first.log())
    assert controller(9).accelerated(first, second, state).log().item() == pytest.approx(3.0)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_every_fit_moves_its_prior_precision_by_the_same_update(likelihood, monkeypatch):
    monkeypatch.setattr("torch_lla_em.inference.mackay._bounded", lambda proposed, here: here)
    torch.manual_seed(0)
    x, model = torch.randn(20, 2), nn.Linear(2, 3)
    y = torch.randint(3, (20,)) if likelihood == "classification" else torch.randn(20, 3)
    la = LinearisedLaplace(model, likelihood, num_samples=4)
    la.fit([(x, y)], em_steps=2, prior_precision=3.0, progress_bar=False)
    assert la.prior_precision.item() == pytest.approx(3.0)


def test_every_block_has_to_converge_by_its_own_changes():
    """The last change of one block says nothing of the first of another."""
    one = torch.ones(2, dtype=torch.float64)
    # the first block moves by .9, .8 of what is allowed and by 3.2 more; the second begins to move
    allowed = one.mul(16).rsqrt()
    moves = torch.tensor([[0.9, 0.1], [0.8, 0.95]], dtype=torch.float64) * allowed
    state = State(one, number=2)
    for move in moves:
        precision = (state.precision.log() - move).exp()
        found = Statistics(state.precision, None, one.expand(16, 2), 1 / precision, 0.0, one, 0, 0)
        state = controller(9).update(found, state)
        torch.testing.assert_close(state.precision, precision)
    assert state.number == 4 and not state.converged
