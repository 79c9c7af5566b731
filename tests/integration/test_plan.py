"""What a plan says before a fit: its memory, the time of a pass, what is kept, and how many passes fits take."""

import logging

import pytest
import torch
from allocator import Allocator
from loaders import Loader, batches
from tiny import fitted, problem_of, tiny
from torch import nn
from torch.testing import assert_close

from torch_lla_em import BlockCG, Compute, LinearisedLaplace
from torch_lla_em.data import Data
from torch_lla_em.likelihoods import Classification
from torch_lla_em.problem import duration, prepare
from torch_lla_em.problem.problem import Problem
from torch_lla_em.runtime import Group

FREE = "torch_lla_em.problem.plan.free_memory"


def network(*widths):
    torch.manual_seed(0)
    layers = [(nn.Linear(a, b), nn.Tanh()) for a, b in zip(widths, widths[1:])]
    return nn.Sequential(*(layer for pair in layers for layer in pair)).append(
        nn.Linear(widths[-1], 3)
    )


@pytest.fixture(scope="module")
def wide():
    return network(4, 30, 30), torch.randn(30, 4), torch.arange(30) % 3


def test_memory_and_time_grow_with_samples_and_examples(wide):
    model, x, y = wide

    def plan(num_samples, times=1):
        la = LinearisedLaplace(model, "classification", num_samples=num_samples)
        return la.plan(x.repeat(times, 1), y.repeat(times))

    few, more, long = plan(4), plan(64), plan(4, 100)
    assert few.memory.expected < more.memory.expected <= more.memory.most
    assert long.pass_seconds > 5 * few.pass_seconds and long.memory.expected > few.memory.expected
    assert "A pass over the data takes about" in str(few) and "fits take 10 to 40" in str(few)


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
    for seconds, words in ((0.0321, "32 ms"), (1.04, "1 s"), (70.0, "1.2 min"), (2e5, "2.3 days")):
        assert duration(seconds) == words


def test_the_length_of_a_stream_is_not_known():
    plan = LinearisedLaplace(tiny("classification").model, "classification").plan(
        Loader(batches(tiny("classification")))
    )
    assert plan.pass_seconds is None and "does not state its length" in str(plan)


def test_data_that_fit_in_memory_are_read_a_few_times(monkeypatch):
    kept, read, small = (Loader(batches(tiny("classification"))) for _ in range(3))
    _, first = fitted(loader=kept)
    _, second = fitted(loader=read, compute=Compute(keep_data=False))
    # the first of two passes begins with the batches that were looked at
    assert kept.passes == 2 and read.passes >= second.history[-1]["data_passes"] > 5
    assert_close(first.w_samples, second.w_samples, rtol=1e-9, atol=1e-9)
    monkeypatch.setattr(FREE, lambda _: 100.0)
    _, la = fitted(loader=small)
    assert small.passes >= la.history[-1]["data_passes"] > 5


@pytest.mark.parametrize("keeps", [True, False])
def test_the_plan_decides_what_is_kept(keeps, monkeypatch):
    """Batches and factors of J together; what is free after the plan changes nothing."""
    problem, free = tiny("classification").problem(10, 20), 1e7
    data, kept = problem.data, problem.sweep.factors
    monkeypatch.setattr(FREE, lambda _: free)
    plan = prepare(problem, 4, Compute(keep_data=keeps))
    monkeypatch.setattr("torch_lla_em.data.loader.free_memory", lambda _: 0.0 if keeps else 1e12)
    assert (plan.batches > 0, plan.factors > 0) == (keeps, keeps)
    assert plan.vectors + plan.batches + plan.factors < free
    w = torch.randn(5, problem.size, dtype=torch.float64)
    for _ in range(3):
        problem.ggn_product(w)
    assert (data.cache is not None, bool(kept.known)) == (keeps, keeps)
    # also once factors are stored, so that forecasts know that they are
    assert (data.room, kept.room) == (plan.batches, plan.factors)


class Pair(Group):
    """Two processes on one device."""

    size = 2

    def meet(self, value, merge):
        return merge([value, value])


def test_ranks_share_a_device_and_keep_neither_batches_nor_factors(monkeypatch):
    monkeypatch.setattr(FREE, lambda _: 8e6)
    problem = tiny("classification").problem()
    data = Data(batches(tiny("classification")), torch.device("cpu"), group=Pair())
    alone = prepare(tiny("classification").problem(), 4, Compute())
    shared = prepare(Problem(problem.linear_model, problem.likelihood, data), 4, Compute())
    assert (alone.free, shared.free) == (8e6, 4e6)
    assert shared.batches == shared.factors == 0 < alone.batches


def test_the_plan_estimates_the_peak_memory():
    x, y, model = torch.randn(64, 20), torch.randint(0, 3, (64,)), network(20, 1500, 30)
    la = LinearisedLaplace(model, "classification", num_samples=8, solver=BlockCG())
    plan = prepare(problem_of(model, Classification(), [(x, y)]), 8, Compute())
    with Allocator() as allocator:
        la.fit([(x, y)], progress_bar=False, em_steps=3)
    assert 0.6 < allocator.peak / plan.vectors < 1.3
    kept = (20 + 1500 + 30 + 1500 + 30) * 4  # inputs of layers, and outputs of tanh
    assert kept / 2 < plan.example.activations <= kept
    assert not plan.tight and "8 samples of 76," in str(plan)


def test_the_plan_is_logged_before_anything_is_allocated(monkeypatch, caplog, capsys):
    logged, noise_features = [], Problem.noise_features

    def noted(self, *args, **options):
        logged.extend(caplog.messages)
        return noise_features(self, *args, **options)

    monkeypatch.setattr(Problem, "noise_features", noted)
    with caplog.at_level("INFO", "torch_lla_em"):
        _, la = fitted()
    assert any("4 samples of" in message for message in logged)
    assert "4 samples of" in repr(la.details()) and not capsys.readouterr().out
    monkeypatch.setattr(FREE, lambda _: 4000.0)
    plan = prepare(tiny("classification").problem(), 4, Compute())
    assert plan.tight and "may not fit" in str(plan)
