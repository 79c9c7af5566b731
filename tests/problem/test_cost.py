"""What a fit costs: the plan, the seconds, the bar."""

import pytest
import torch
from tiny import tiny

from torch_lla_em import Compute, LinearisedLaplace


def made(**options):
    case = tiny("classification")
    options = {"num_samples": 4, "curvature": "network", **options}
    return case, LinearisedLaplace(case.model, "classification", **options)


def test_a_plan_tells_memory_and_runs_nothing():
    case, la = made()
    loader = [(case.x[:15], case.y[:15]), (case.x[15:], case.y[15:])]
    assert "4 samples of" in str(la.plan(loader)) and la.w_lin is None
    la.fit(loader, progress_bar=False)
    la.plan(loader)  # and leaves what is fitted as it is
    assert la.w_lin is not None


def test_the_summary_shows_the_seconds_of_em():
    case, la = made()
    la.fit([(case.x, case.y)], progress_bar=False)
    assert f"passes, {la.history[-1]['seconds']:.3g} s" in " ".join(repr(la).split())


@pytest.mark.parametrize("curvature", ["network", "variational"])
@pytest.mark.parametrize("length", [True, False])
def test_the_bar_counts_columns_and_shares_of_passes(curvature, length, capsys, monkeypatch):
    monkeypatch.setattr("torch_lla_em.session._SECONDS_BETWEEN_UPDATES", 0.0)
    compute = Compute(keep_data=False, rows=5)
    case, la = made(curvature=curvature, compute=compute)
    loader = list(zip(case.x.split(5), case.y.split(5)))
    whole = la.fit(loader, progress_bar=False).w_samples

    class Stream:
        def __iter__(self):
            return iter(loader)

    la.fit(loader if length else Stream())
    drawn = [part for part in capsys.readouterr().err.split("\r") if " columns [" in part]
    columns = [int(part.partition(" columns")[0].split()[-1]) for part in drawn]
    assert columns == sorted(columns) and columns[-1] >= la.history[-1]["columns"] - 0.5
    # the noise is drawn in the first pass, batch by batch
    shares = [part for part in drawn if "random probes, pass 1 (" in part]
    assert [part.split("(")[1].split(")")[0] for part in shares] == [
        f"{n / 6:.0%}" for n in range(1, 7) if length
    ]
    assert any("1 EM steps done" in part and "error=" in part for part in drawn)
    assert "fitted: " in drawn[-1] and torch.equal(la.w_samples, whole)


def test_a_batch_that_is_cut_is_not_done_after_its_first_piece():
    case = tiny("classification")
    problem, shares = case.problem(), []
    problem.sweep.batch_rows, problem.sweep.report = 10, shares.append
    problem.ggn_product(torch.zeros(1, problem.size).double())
    assert shares == [1 / 3, 2 / 3, 1.0]
