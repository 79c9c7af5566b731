"""What a fit spends and is going to: stages, the plan, the bar."""

import logging
import time

import pytest
import torch
from tiny import tiny
from torch.utils.data import DataLoader, Dataset

from torch_lla_em import Compute, LinearisedLaplace
from torch_lla_em.problem import Cost


def made(**options):
    case = tiny("classification")
    options = {"num_samples": 4, "curvature": "network", **options}
    return case, LinearisedLaplace(case.model, "classification", **options)


def test_stages_hold_their_own_columns_and_add_up():
    cost = Cost()
    with cost.stage("outer"):
        cost.columns += 2
        with cost.stage("inner"):
            cost.columns += 3
        cost.columns += 1
    stages = cost.stages()
    assert stages["outer"].columns == 3 and stages["inner"].columns == 3
    assert all(spent.seconds >= 0 for spent in stages.values())


def test_history_tells_seconds_and_columns_by_stage():
    case, la = made()
    la.fit([(case.x, case.y)], progress_bar=False)
    stages = la.history[-1]["stages"]
    assert {"noise", "basis", "mode", "samples"} <= set(stages)
    assert stages["noise"][1] == 4 and stages["basis"][1] > 0
    # what the last samples took is there too, though no step of EM came after them
    assert sum(columns for _, columns in stages.values()) >= la.history[-1]["columns"]


def test_a_plan_tells_passes_seconds_and_memory_and_runs_nothing():
    case, la = made()
    loader = [(case.x[:15], case.y[:15]), (case.x[15:], case.y[15:])]
    plan = la.plan(loader)
    assert "columns in" in str(plan) and "read 3 times" in str(plan) and "bytes" not in str(plan)
    assert plan.forecast.seconds > 0 and plan.forecast.reading.rows == len(case.x)
    assert la.w_lin is None
    la.fit(loader, progress_bar=False)
    plan = la.plan(loader)  # and leaves what is fitted as it is
    assert la.w_lin is not None and "columns in" in str(plan)


def test_a_precision_for_each_tensor_is_known_to_take_many_passes():
    case, la = made(prior="layerwise")
    _, plain = made()
    loader = [(case.x, case.y)]
    assert la.plan(loader).forecast.columns == 5 * plain.plan(loader).forecast.columns


class Slow(Dataset):
    def __init__(self, case):
        self.case = case

    def __len__(self):
        return len(self.case.x)

    def __getitem__(self, index):
        time.sleep(0.02)
        return self.case.x[index], self.case.y[index]


def test_a_slow_loader_that_is_read_at_every_pass_is_told(caplog):
    case, la = made(compute=Compute(keep_data=False))
    with caplog.at_level(logging.WARNING, "torch_lla_em"):
        plan = la.plan(DataLoader(Slow(case), 5))
    assert plan.forecast.reads_slowly and "Reading takes longer" in str(plan)
    case, la = made()
    assert not la.plan(DataLoader(Slow(case), 5)).forecast.reads_slowly


def test_a_loader_without_a_length_is_planned_for():
    case, la = made()

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from zip(case.x, case.y)

    assert "no length" in str(la.plan(DataLoader(Stream(), 5)))


@pytest.mark.parametrize("curvature", ["network", "variational"])
def test_the_bar_counts_passes_and_columns_within_them(curvature, capsys, monkeypatch):
    monkeypatch.setattr("torch_lla_em.session._UPDATE", 0.0)
    case, la = made(curvature=curvature)
    loader, K = list(zip(case.x.split(5), case.y.split(5))), la.num_samples
    whole = la.fit(loader, progress_bar=False).w_samples
    la.fit(loader)
    shown = capsys.readouterr().err
    assert "EM step 1, pass" in shown and "residual=" in shown
    # the noise is drawn in the first pass, batch by batch
    drawn = [part for part in shown.split("\r") if "noise, pass 1 " in part]
    columns = [
        float(part.split("columns=")[1].split("]")[0]) for part in drawn if "columns=" in part
    ]
    assert len(columns) > 2 and columns[-1] == K and columns == sorted(columns)
    assert torch.equal(la.w_samples, whole)
