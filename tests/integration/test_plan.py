"""What a plan says before a fit: its memory, the time of a pass, and how many passes fits take."""

import logging

import pytest
import torch
from tiny import tiny
from torch import nn

from torch_lla_em import LinearisedLaplace
from torch_lla_em.problem import duration


@pytest.fixture(scope="module")
def wide():
    torch.manual_seed(0)
    layers = nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 3)
    return nn.Sequential(*layers), torch.randn(30, 4), torch.arange(30) % 3


@pytest.mark.parametrize(
    "seconds, words",
    [(0.0321, "32 ms"), (1.04, "1 s"), (70.0, "1.2 min"), (7190.0, "2 h"), (2e5, "2.3 days")],
)
def test_durations_are_shown_in_words(seconds, words):
    assert duration(seconds) == words


def test_memory_and_time_grow_with_samples_and_examples(wide):
    model, x, y = wide
    plan, more = (
        LinearisedLaplace(model, "classification", num_samples=K).plan(x, y) for K in (4, 64)
    )
    assert plan.memory.expected < more.memory.expected <= more.memory.most
    long = LinearisedLaplace(model, "classification", num_samples=4).plan(
        x.repeat(100, 1), y.repeat(100)
    )
    assert long.pass_seconds > 2 * plan.pass_seconds and long.memory.expected > plan.memory.expected
    assert "A pass over the data takes about" in str(plan) and "most fits take 10 to 40" in str(
        plan
    )


def test_a_long_fit_names_the_last_layer_and_a_budget(wide, monkeypatch, caplog):
    model, x, y = wide
    la = LinearisedLaplace(model, "classification", num_samples=4)
    ways = 'use parameters="last_layer" or a `budget`'
    assert ways not in str(la.plan(x, y))
    monkeypatch.setattr("torch_lla_em.problem.plan._LONG", 0.0)
    assert ways in str(la.plan(x, y))
    with caplog.at_level(logging.WARNING, "torch_lla_em"):
        la.fit(x, y, em_steps=0, prior_precision=1.0, progress_bar=False)
    assert ways in caplog.messages[0]
    assert not any(ways in words for words in la.messages)  # it is no warning of the result


def test_the_length_of_a_stream_is_not_known():
    case = tiny("classification")

    class Stream:
        def __iter__(self):
            return iter([(case.x, case.y)])

    plan = LinearisedLaplace(case.model, "classification").plan(Stream())
    assert plan.pass_seconds is None and "does not state its length" in str(plan)
