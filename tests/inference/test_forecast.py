"""How long a fit takes: a range before it, which is revised after every step."""

import json
import logging
import math
from pathlib import Path

import pytest
import torch
from tiny import tiny
from torch import nn

from torch_lla_em import Compute, LinearisedLaplace, session
from torch_lla_em.inference import Course, FitOptions, cheaper, controller, time_left, time_of
from torch_lla_em.inference.forecast import EACH
from torch_lla_em.inference.records import State, Statistics
from torch_lla_em.problem import Duration, Trial, prepare, tried
from torch_lla_em.runtime import Group

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "forecast.jsonl"
MOVING = Course(True, True, (1, 1), FitOptions())
# an example takes a millisecond in a product, and everything else is free
TRIAL = Trial(0.0, 1e-3, 0.0, 0.0, 0.0, 5, 5, 10**6, 32, 0.0)


@pytest.mark.parametrize(
    "low, high, words",
    [
        (0.1, 0.9, "about 1 s"),
        (0.1, 5.04, "up to 5 s"),
        (20.3, 70.0, "20 s to 1.2 min"),
        (100.0, 290.0, "1.7 to 4.8 min"),
        (7190.0, 7210.0, "about 2 h"),
        (86400.0, 200000.0, "1 to 2.3 days"),
    ],
)
def test_durations_are_shown_in_words(low, high, words):
    assert str(Duration(low, high)) == words


def test_a_forecast_grows_with_the_work():
    low, high = time_of(TRIAL, MOVING, 1000, math.inf)
    twice = time_of(TRIAL, MOVING, 2000, math.inf)
    assert twice.low == pytest.approx(2 * low) and 2 < high / low < 8
    read_again = time_of(TRIAL._replace(read=1e-3, kept_bytes=1.0), MOVING, 1000, 0.0)
    assert read_again.low > 2 * low
    # a span of all parameters needs few passes
    assert time_of(TRIAL._replace(weights=40), MOVING, 1000, math.inf).high < high / 3
    by_solves = MOVING._replace(by_span=False)
    assert time_of(TRIAL, by_solves, 1000, math.inf).high > 3 * high
    exact = MOVING._replace(options=FitOptions(tolerance=1e-6))
    assert time_of(TRIAL, exact, 1000, math.inf).low > 2 * low


def test_the_steps_of_H_are_those_of_the_controller():
    assert EACH == controller.EACH


def test_dense_outputs_are_forecast_by_the_sites_that_are_kept():
    pixels = TRIAL._replace(outputs=8 * 128**2, classes=8, weights=72, functions=1e-3, flop=1e-10)
    small = pixels._replace(outputs=8 * 32**2, functions=1e-3 / 16)
    assert (
        time_of(pixels, MOVING, 200, math.inf).high
        < 1.5 * time_of(small, MOVING, 200, math.inf).high
    )
    assert time_of(pixels, MOVING, 200, math.inf).high < 600


def reached(error, settled):
    one = torch.ones((), dtype=torch.float64)
    found = Statistics(one, None, one[None], one, 1.0, one[None], error, error)
    return State(one, None, found, 3, one, converged=settled), 10**6


def test_what_is_left_falls_with_the_error():
    left = [time_left(MOVING, [1.0, 1.0], *reached(e, False)) for e in (3.0, 0.3, 0.01)]
    assert left[0].low > left[1].low > left[2].low and left[0].high > left[1].high > left[2].high
    assert time_left(MOVING, [1.0, 1.0], *reached(0.01, True)).high <= 2
    growing = time_left(MOVING, [0.5, 1.0], *reached(3.0, False))
    assert growing.high > left[0].high and growing.low == left[0].low


@pytest.fixture
def wide():
    torch.manual_seed(0)
    layers = nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 3)
    la = LinearisedLaplace(nn.Sequential(*layers), "classification", num_samples=16)
    return la, torch.randn(30, 4), torch.arange(30) % 3


def test_the_last_layer_and_few_samples_are_cheaper(wide, monkeypatch):
    def proportional(problem, first, K):
        return TRIAL._replace(product=1e-6 * problem.size * K, weights=problem.size, num_samples=K)

    monkeypatch.setattr("torch_lla_em.inference.forecast.tried", proportional)
    la, x, y = wide
    problem = la._problem([(x, y)], Group())
    plan = prepare(problem, 16, la.compute)
    options, first = FitOptions(num_samples=16), problem.data.first()
    course = Course.of(problem, options, 3, plan.free)
    with torch.no_grad():
        with monkeypatch.context() as alone:
            alone.setattr(Group, "meet", None)  # only one rank asks for cheaper ways
            ways = cheaper(problem, first, course, 10**6)
        whole = time_of(proportional(problem, first, 16), course, 10**6, plan.factors)
    last, few = ways['parameters="last_layer"'], ways["num_samples=8"]
    assert last.high < whole.high / 5 and few.high < whole.high
    assert tried(problem, first, 16).weights == problem.size
    la = LinearisedLaplace(la.model, "classification", num_samples=8, parameters="last_layer")
    problem = la._problem([(x, y)], Group())
    prepare(problem, 8, la.compute)
    assert not cheaper(problem, first, course._replace(options=FitOptions(num_samples=8)), 10**6)


def test_a_long_fit_names_them(wide, monkeypatch, caplog):
    la, x, y = wide
    short = la.plan(x, y)
    assert short.time.high < 60 and not short.cheaper and "The fit will take " in str(short)
    for limit in ("_LONG", "_SMALL"):
        monkeypatch.setattr(f"torch_lla_em.session.{limit}", 0.0)
    monkeypatch.setattr("torch_lla_em.session.cheaper", lambda *_: {"fast": Duration(0.1, 0.2)})
    with caplog.at_level(logging.WARNING, "torch_lla_em"):
        la.fit(x, y, em_steps=0, prior_precision=1.0, progress_bar=False)
    assert "Cheaper: fast: about 1 s." in caplog.messages[0]
    assert not any("Cheaper" in words for words in la.messages)  # it is no warning of the result


def test_the_length_of_a_stream_is_not_known():
    case = tiny("classification")

    class Stream:
        def __iter__(self):
            return iter([(case.x, case.y)])

    plan = LinearisedLaplace(case.model, "classification").plan(Stream())
    assert plan.time is None and "does not state its length" in str(plan)


def test_what_is_left_is_more_than_nothing_if_it_takes_longer_than_forecast():
    assert Duration(10.0, 30.0).after(6.0) == (4.0, 24.0)
    assert Duration(10.0, 30.0).after(60.0) == (0.0, 20.0)


def test_the_bar_moves_within_steps_and_never_ends_before_the_fit(wide, monkeypatch):
    la, x, y = wide
    shown = []

    class Bar(session.tqdm):
        def update(self, n=1):
            super().update(n)
            shown.append((self.n, self.desc))

    monkeypatch.setattr("torch_lla_em.session.tqdm", Bar)
    la.compute = Compute(columns=6)
    la.fit([(x, y)], progress_bar=True)
    *shares, last = [share for share, _ in shown]
    assert shares == sorted(shares) and shares[-1] <= 0.99 and last == pytest.approx(1.0)
    passes, between = ([words.endswith("%)") == known for _, words in shown] for known in (1, 0))
    assert sum(passes) > 2 * len(la.history) and sum(between) > 3 * len(la.history)
    assert {"(35%)", "(71%)", "(100%)"} <= {
        words.split()[-1] for _, words in shown
    }  # of 17 columns


def test_nine_of_ten_recorded_fits_took_a_time_within_their_range():
    """``benchmarks/forecast.py`` has recorded the trial and the seconds of each fit."""
    lines = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    found = {}
    for line in lines:
        *course, tolerance, rows, kept = line["course"]
        options = FitOptions(tolerance=tolerance)
        low, high = time_of(Trial(**line["trial"]), Course(*course, options), rows, kept)
        found[line["problem"]] = low <= line["seconds"] <= high
        assert high < 45 * low + 1
    assert len(found) >= 20 and sum(found.values()) >= 0.9 * len(found), found
