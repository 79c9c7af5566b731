"""Where λ stands after steps over a span, where a secant expects it to rest, and which steps count."""

import math
from types import SimpleNamespace

import pytest
import torch

from torch_lla_em.inference import controller
from torch_lla_em.inference.controller import Controller
from torch_lla_em.inference.options import FitOptions
from torch_lla_em.inference.q import Q
from torch_lla_em.inference.records import Ascent, Extent, State, Statistics
from torch_lla_em.inference.rounds import OF_H, course


def at(log_precision, fixed_point, slope):
    """Return q at a λ, where MacKay's update has this fixed point and slope in log λ."""
    gamma = torch.tensor(50.0, dtype=torch.float64)
    update = fixed_point + slope * (log_precision - fixed_point)
    mean = (gamma / math.exp(update)).sqrt().view(1)
    return SimpleNamespace(precision=math.exp(log_precision), effective_dims=gamma[None], mean=mean)


@pytest.mark.parametrize("slope", [-0.3, 0.0, 0.5, 0.85])
def test_a_secant_finds_the_fixed_point_of_a_straight_update(slope):
    first = course(at(0.5, 0.0, slope), math.exp(0.5), None)
    assert math.log(first.ahead) == pytest.approx(0.5 * slope)
    second = course(at(0.3, 0.0, slope), math.exp(0.5), first)
    assert math.log(second.ahead) == pytest.approx(0.0, abs=1e-9)
    # half of what the slope of the bound, ½ (γ - λ ‖m‖²), gains on a way to where it vanishes
    excess = 50 * (1 - math.exp(0.3 - 0.3 * slope))
    assert second.worth == pytest.approx(0.25 * abs(excess) * 0.3)


def test_the_way_of_a_step_is_limited():
    first = course(at(9.0, 0.0, 0.99), math.exp(9.0), None)
    second = course(at(8.9, 0.0, 0.99), math.exp(9.0), first)
    assert 8.9 - math.log(second.ahead) == pytest.approx(math.log(2))


def test_h_takes_shorter_steps_over_a_complete_span_where_lambda_turns():
    q = at(0.0, 0.4, 0.0)
    up = course(q, 1.0, None, complete=True)
    turned = course(at(0.5, 0.4, 0.0), 1.0, up, complete=True)
    assert up.share == OF_H and turned.share == OF_H / 2
    assert course(at(0.5, 0.4, 0.0), 1.0, up).share == OF_H


GAMMA = torch.tensor([49.0, 51.0], dtype=torch.float64)
EXTENT = Extent(size=66, grew=True, complete=False, full=False)
CONTROL = Controller(None, None, FitOptions(), moves=True)


def q_of(bound, error, log_precision=0.0):
    """Return q where MacKay's update leaves λ alone, and its bound with a standard error over two samples."""
    precision, bounds = math.exp(log_precision), torch.tensor([bound - error, bound + error])
    mean = (GAMMA.mean() / precision).sqrt().view(1)
    return Q(precision, 1.0, None, mean, None, 0.0, bounds, GAMMA, None, None)


def known_of(q, sample_error):
    """Return the statistics of q."""
    found = torch.tensor(q.precision), None, GAMMA, GAMMA.mean() / q.precision, 0.0, q.bounds
    return Statistics(*found, mode_error=0.01, sample_error=sample_error)


@pytest.mark.parametrize(
    ("error", "moved", "taken"), [(16.0, 0.0, True), (3.0, 0.0, False), (3.0, -2.0, True)]
)
def test_steps_may_lower_the_bound_by_as_much_as_it_may_be_wrong(error, moved, taken, monkeypatch):
    before, after, improved = q_of(-100.0, error), q_of(-108.0, error, moved), q_of(-99.0, error)
    monkeypatch.setattr(Controller, "_steps", lambda *_: after)
    monkeypatch.setattr(controller, "improve", lambda *_: improved)
    over = SimpleNamespace(hyper=lambda q: (torch.tensor(q.precision), None))
    ascent = CONTROL.ascend(over, before, State(torch.tensor(1.0)), EXTENT)
    assert ascent.q is (after if taken else improved)


@pytest.mark.parametrize(("error", "converged"), [(16.0, True), (3.0, False)])
def test_a_gain_that_is_small_beside_its_monte_carlo_error_ends_the_steps_of_lambda(
    error, converged
):
    q = q_of(-100.0, error, log_precision=0.2)
    ascent = Ascent(q, (torch.tensor(1.0), None), 1.0)
    state = CONTROL.judge(State(torch.tensor(1.0)), ascent, EXTENT, known_of(q, 0.1))
    assert state.converged == converged


@pytest.mark.parametrize(("before", "converged"), [(0.1, True), (0.5, False)])
def test_lambda_has_converged_if_the_samples_were_accurate_before_the_steps(before, converged):
    q = q_of(-100.0, 3.0)
    ascent = Ascent(q, (torch.tensor(1.0), None), 0.0)
    state = State(torch.tensor(1.0), statistics=known_of(q, before))
    found = known_of(q, 0.5)  # for a new η
    assert CONTROL.judge(state, ascent, EXTENT, found).converged == converged
