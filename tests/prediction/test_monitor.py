"""Monitors: the evidence against its definition and its guarantee, states, threads, groups, and what is refused."""

import json
from copy import deepcopy
from itertools import pairwise
from math import e, inf, log
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from tiny import draw, fitted, known
from torch.testing import assert_close

from torch_lla_em import LaplaceEnsemble, NotFittedError
from torch_lla_em.prediction.conformal import Compared
from torch_lla_em.prediction.monitor import _POWERS, Monitor, clopper_pearson

GROUPS = torch.arange(200) % 2


class Scored:
    """A calibrated object whose inputs are their scores, (B, S)."""

    def __init__(self, reference):
        self.reference = SimpleNamespace(unusual=reference)

    def predict(self, x):
        found = Compared(x.double(), torch.zeros_like(x), self.reference.unusual)
        return SimpleNamespace(compared=lambda: found, p_value=torch.ones(len(x)))


def inputs(count, shift=0.0, seed=7):
    return draw(count, 1, seed=seed) + shift


def cells(reference, scores):
    """The numbers of ranks up to the end of each cell, and the cell of each score, one by one."""
    n = len(reference)
    ends = [n + 1]
    while ends[0] > 1:
        ends.insert(0, (ends[0] + 1) // 2)
    ranks = [
        1 + sum(r > s for r in reference.flatten().tolist()) for s in scores.flatten().tolist()
    ]
    return ends, [next(k for k, end in enumerate(ends) if rank <= end) for rank in ranks]


def by_definition(ends, found):
    """The evidence after each input, from all times of a change and all powers."""
    n, sizes = ends[-1] - 1, [end - start for start, end in pairwise([0, *ends])]
    ratios = []
    for t, cell in enumerate(found):
        urn = (sizes[cell] + found[:t].count(cell)) / (n + 1 + t)
        start = ends[cell - 1] if cell else 0
        ratios.append(
            [((ends[cell] / (n + 1)) ** k - (start / (n + 1)) ** k) / urn for k in _POWERS]
        )
    left = [1 / log(t + e) for t in range(len(found) + 1)]
    values = []
    for t in range(1, len(found) + 1):
        products = [
            (left[s] - left[s + 1])
            * torch.tensor(ratios[s:t], dtype=torch.double).prod(0).mean().item()
            for s in range(t)
        ]
        values.append(left[t] + sum(products))
    return values


def test_the_evidence_is_that_of_its_definition():
    reference, x = draw(30, 1), inputs(40, 0.5)
    one = Monitor(Scored(reference), 0.2)
    for part in x.split([1, 9, 30]):
        one.update(part)
    values = by_definition(*cells(reference, x))
    seen, evidence = zip(*one.state["history"], strict=True)
    assert seen == (0, 1, 10, 40)
    expected = torch.tensor([1.0, *(values[n - 1] for n in seen[1:])]).double().log()
    assert_close(torch.tensor(evidence).double(), expected)
    above = [n for n, value in enumerate(values, 1) if value >= 5]
    assert one.state["since"] == above[0] and one.alarm
    # of several scores it is the mean
    both = torch.cat([reference, -reference], 1), torch.cat([x, -x], 1)
    two = Monitor(Scored(both[0]))
    two.update(both[1])
    other = by_definition(*cells(-reference, -x))
    assert_close(two.state["evidence"], log(0.5 * (values[-1] + other[-1])))


def test_its_expectation_does_not_grow():
    """Given all earlier inputs the ranks of the next one have the probabilities of an urn."""
    reference = torch.arange(1.0, 12)[:, None]
    one = Monitor(Scored(reference), 1e-3)
    one.update(torch.tensor([[11.5], [3.5], [10.5], [11.5]]))
    before, between = one.state, torch.arange(0.5, 12)[:, None]
    ends, found = cells(
        reference, torch.cat([between, torch.tensor([[11.5], [3.5], [10.5], [11.5]])])
    )
    expected = 0.0
    for x, cell in zip(between, found, strict=False):
        size = ends[cell] - (ends[cell - 1] if cell else 0)
        after = Monitor(Scored(reference), 1e-3)
        after.load_state_dict(one.state_dict())
        after.update(x[None])
        share = (size + found[12:].count(cell)) / 16 / size
        expected += share * torch.tensor(after.state["evidence"]).exp().item()
    assert_close(log(expected), before["evidence"])


@pytest.mark.slow
@pytest.mark.parametrize("ties", [False, True])
def test_false_alarms_are_as_rare_as_stated(ties):
    """Validation sets of 60 examples; scores that are often equal, too."""
    generator, count, rate, alarms = torch.Generator().manual_seed(0), 2000, 0.2, 0
    for seed in range(count):
        scores = torch.randn(460, 2, generator=generator).double()
        scores = (2 * scores).round() if ties else scores
        alarms += Monitor(Scored(scores[:60]), rate, seed=seed).update(scores[60:])
    assert alarms / count <= rate + 5 * (rate * (1 - rate) / count) ** 0.5


def test_equal_scores_have_a_random_order():
    """The cells of scores that all are equal are as probable as their numbers of ranks."""
    reference = torch.zeros(7, 1)
    counts = torch.zeros(4)
    for seed in range(300):
        one = Monitor(Scored(reference), seed=seed)
        one.update(torch.zeros(1, 1))
        counts += torch.tensor(one.state["counts"][""][0]) - torch.tensor([1.0, 1, 2, 4])
    shares = torch.tensor([1.0, 1, 2, 4]) / 8
    errors = (shares * (1 - shares) / 300).sqrt()
    assert ((counts / 300 - shares).abs() < 5 * errors).all()


def test_a_state_continues_and_an_alarm_stays_until_reset():
    la, x = Scored(draw(99, 1)), inputs(120)
    whole, first = Monitor(la, 0.05), Monitor(la, 0.05)
    whole.update(x[:60])
    first.update(x[:60])
    second = Monitor(la, 0.05)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert whole.update(x[60:]) == second.update(x[60:]) and whole.state == second.state
    assert not second.alarm and "no alarm" in repr(second)
    assert second.update(x[:10] + 5) and second.alarm
    since = second.state["since"]
    assert f"alarm since input {since}" in repr(second) and 120 < since <= 130
    second.update(x)
    assert second.alarm and second.state["since"] == since and second.state["seen"] == 250
    second.reset()
    assert not second.alarm and second.state["seen"] == 0
    for other in (
        Monitor(la, 0.1),
        Monitor(Scored(draw(99, 1, seed=1)), 0.05),
        Monitor(la, seed=3),
    ):
        with pytest.raises(ValueError, match="not the state"):
            other.load_state_dict(first.state_dict())
    for _ in range(1100):
        second.update(x[:1])
    assert len(second.state["history"]) <= 1000


def test_threads_lose_no_inputs():
    one, x = Monitor(Scored(draw(50, 1))), inputs(40)
    threads = [Thread(target=lambda: [one.update(part) for part in x.split(2)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert one.state["seen"] == 160 and sum(one.state["counts"][""][0]) == 51 + 160


def test_posteriors_ensembles_and_students_have_monitors():
    case, la = fitted("classification", em_steps=2)
    x, y = draw(600, 2, seed=3), torch.arange(600) % 3
    with pytest.raises(ValueError, match="no"):
        la.monitor()
    la.calibrate(x[:200], y[:200])
    ensemble = LaplaceEnsemble([la, la]).calibrate(x[:200], y[:200])
    student = la.distil(case.x, steps=5, num_inputs=100, progress_bar=False).calibrate(
        x[:200], y[:200]
    )
    for own in (la, ensemble, student):
        one = own.monitor(rate=0.01)
        assert not one.update(x[200:400], y[200:400])
        p = own.predict(x[200:400])
        assert one.state["flags"] == (p.p_value <= 0.05).tolist()
        other = own.monitor(rate=0.01)
        other.update(p, y[200:400])
        assert other.state == one.state
        inside = p.prediction_set(0.9).gather(1, y[200:400, None])[:, 0]
        assert one.state["inside"] == inside.tolist()
        assert "flagged" in repr(one) and "coverage" in repr(one)
        scores, among = p.compared().scores, p.compared().reference
        assert scores.shape[1] == among.shape[1] and len(among) == 100 * (1 + (own is student))
    assert la.monitor().update(20 * x[400:])
    la.calibrate(x[:200], y[:200], groups=GROUPS)
    one = la.monitor(0.01)
    assert not one.update(x[200:400], groups=GROUPS)
    assert {*one.state["counts"]} == {"0", "1"}
    with pytest.raises(ValueError, match="every input needs its group"):
        one.update(x[200:400])
    la.calibrate(x[:300], y[:300])
    with pytest.raises(ValueError, match="calibrated again"):
        one.update(x[400:])
    la.calibrate(x[:200], y[:200], weights=torch.ones(200))
    with pytest.raises(ValueError, match="weights are not exact"):
        la.monitor()


def test_what_does_not_fit_is_refused_and_nothing_is_lost():
    case, la = fitted("classification", em_steps=2)
    x, y = draw(300, 2, seed=3), torch.arange(300) % 3
    one = la.calibrate(x[:200], y[:200]).monitor()
    one.update(x[200:250], y[200:250])
    state = deepcopy(one.state_dict())
    for labels in (y[:7], y[:50, None], y[:50] + 3):
        with pytest.raises(ValueError, match="Class labels"):
            one.update(x[250:], labels)
    with pytest.raises(ValueError, match="no inputs"):
        one.update(x[:0])
    with pytest.raises(ValueError, match="rate must lie between"):
        la.monitor(rate=1)
    assert one.state_dict() == state
    one.update(x[250:], torch.where(torch.arange(50) < 20, -100, y[250:]))
    assert len(one.state["inside"]) == 50 + 30
    assert one.update(x[:20] * torch.nan)
    with torch.no_grad():
        case.model[2].bias += 1
    with pytest.raises(NotFittedError, match="weights have changed"):
        one.update(x[200:250])
    case, la = known("bernoulli")
    one = deepcopy(la).calibrate(x[:, :2], (la.predict(x[:, :2]).probs > 0.5).double()).monitor()
    with pytest.raises(TypeError, match="without y"):
        one.update(case.x, case.y)
    assert not one.update(x[:50, :2]) and one.state["seen"] == 50
    case, la = known("regression")
    la = deepcopy(la)
    y = la.predict(x).expectation
    one = la.calibrate(x[:200], y[:200]).monitor()
    one.update(x[200:], y[200:])
    assert len(one.state["inside"]) == 200  # the last of 300 outputs
    with pytest.raises(ValueError, match="NaN"):
        one.update(x[200:], y[200:] * torch.nan)


def test_intervals_of_shares_are_exact():
    """Their ends have tails of 2.5 %; of none it is 1 - .025^(1/n)."""
    low, high = clopper_pearson(0, 20)
    assert low == 0 and high == pytest.approx(1 - 0.025 ** (1 / 20), abs=1e-3)
    low, high = clopper_pearson(7, 20)
    tails = [
        torch.distributions.Binomial(20, torch.tensor(p).double())
        .log_prob(torch.arange(21.0))
        .exp()
        for p in (low, high)
    ]
    assert tails[0][7:].sum().item() == pytest.approx(0.025, abs=2e-3)
    assert tails[1][:8].sum().item() == pytest.approx(0.025, abs=2e-3)
    assert clopper_pearson(20, 20)[1] == 1 and inf > low > 0
