"""A fit with a budget of seconds ends in time with a posterior, and its checkpoint continues."""

import time

import pytest
import torch
from tiny import fitted
from torch import nn
from torch.testing import assert_close

from torch_lla_em import BlockCG, LinearisedLaplace
from torch_lla_em.inference.em import State
from torch_lla_em.inference.over_span import OverSpan
from torch_lla_em.inference.trend import ErrorTrend
from torch_lla_em.runtime import Budget, Group

KINDS = {
    "variational": ("classification", {}),
    "fixed": ("classification", {"curvature": "network"}),
    "noise": ("regression", {}),
    "solves": ("classification", {"solver": BlockCG()}),
    "linear": ("classification", {"curvature": "linear"}),
}
SPENT = "The budget is spent after 1 step"


@pytest.mark.parametrize("name", KINDS)
def test_a_fit_that_is_cut_short_continues_to_the_same_posterior(name, monkeypatch, tmp_path):
    likelihood, options = KINDS[name]
    case, whole = fitted(likelihood, **options)
    ends = iter([True, True])  # of the probes, after which a step is taken, and of that step
    with monkeypatch.context() as patched:
        patched.setattr(Budget, "ends", lambda _: next(ends))
        _, la = fitted(likelihood, budget=9.0, checkpoint=tmp_path, **options)
    assert len(la.history) == 1 < len(whole.history)
    shown = " ".join(str(la).split())
    assert SPENT in la.messages[-1] and SPENT in shown
    if not la.accuracy.is_reached:
        assert "call fit with a larger budget" in shown and "max_passes" not in shown
    variance = la.predict(case.x).variance
    assert variance.isfinite().all() and (variance > 0).all()
    _, la = fitted(likelihood, budget=1e6, checkpoint=tmp_path, **options)
    assert torch.equal(la.w_samples, whole.w_samples) and torch.equal(la.w_lin, whole.w_lin)
    assert len(la.history) == len(whole.history)


def test_a_fit_ends_in_time():
    torch.manual_seed(0)
    x = torch.randn(1000, 20)
    y = (x[:, 0] + torch.randn(1000)).gt(0).long()
    model = nn.Sequential(nn.Linear(20, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh())
    model.append(nn.Linear(200, 2))
    la, began = LinearisedLaplace(model, "classification"), time.monotonic()
    la.fit(x, y, progress_bar=False, budget=0.4)
    steps = [0.0, *(record["seconds"] for record in la.history)]
    longest = max(b - a for a, b in zip(steps, steps[1:]))
    assert time.monotonic() - began < 0.4 + longest + 0.5
    assert any("budget" in words for words in la.messages)
    assert "(ended by: budget)" in str(la)


def test_steps_over_a_complete_span_end_in_time(monkeypatch, tmp_path):
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(60, 4)
    y = (2 * model(x) + torch.randn(60, 3)).argmax(1)

    def fit(**options):
        la = LinearisedLaplace(model, "classification", num_samples=8)
        return la.fit(x, y, progress_bar=False, **options)

    whole = fit()
    late, after, curved = [], [], OverSpan.curved

    def counted(self, *arguments, **more):
        if self.span.is_complete and not more:  # a step of H
            after.append(bool(late))
            late.append(True)  # the time is over with the first of them
        return curved(self, *arguments, **more)

    with monkeypatch.context() as patched:
        patched.setattr(OverSpan, "curved", counted)
        patched.setattr(Budget, "left", lambda _: -1.0 if late else 1.0)
        patched.setattr(Budget, "ends", lambda _: bool(late))
        la = fit(budget=9.0, checkpoint=tmp_path)
    assert late and sum(after) <= 2 and "budget is spent" in la.messages[-1]
    assert la.predict(x).variance.isfinite().all()
    la = fit(budget=1e6, checkpoint=tmp_path)
    assert_close(la.prior_precision, whole.prior_precision, rtol=0.05, atol=0)


def test_all_ranks_end_where_the_slowest_one_does(monkeypatch):
    class Slower(Group):
        def meet(self, value, merge):
            return merge([value, value - 5])

    now = iter([0.0, 0.0, 2.0, 2.0, 3.0, 3.0])
    monkeypatch.setattr("torch_lla_em.runtime.budget.time.monotonic", lambda: next(now))
    alone, slower = Budget(8.0), Budget(8.0, Slower())
    assert not alone.ends() and slower.ends()


def state(error, number):
    return State(torch.tensor(2.0), errors=(error, error / 2), converged=number > 2)


def test_the_time_left_follows_the_error(monkeypatch):
    now = iter([0.0, 10.0, 20.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    trend = ErrorTrend(0.01)
    for number, error in enumerate((4.0, 2.0), 1):
        trend.note(state(error, number))
    words = str(trend)
    assert (
        "At least 76 s more are needed" in words and len(words.split()) <= 40
    )  # log₂(2 / .01) steps
    assert "precision has not converged" in words
    trend.note(state(0.001, 3))
    assert trend.is_exact and trend.seconds_left() == 0
    assert "converged" not in str(trend) and "more" not in str(trend)


def test_a_budget_is_a_number_of_seconds():
    with pytest.raises(ValueError, match="budget must be None, or a number of seconds above 0"):
        fitted(budget=0)
