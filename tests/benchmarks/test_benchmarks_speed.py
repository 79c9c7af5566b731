"""The benchmark of speed measures what it says, and writes its page."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def speed(monkeypatch):
    pytest.importorskip("torchvision")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import speed

    return speed


@pytest.mark.slow
def test_a_run_writes_a_record_and_a_page(speed, tmp_path, monkeypatch):
    options = ["--networks", "lenet", "--batch", "4", "--columns", "1", "2", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["speed.py", *options, "--out", str(tmp_path)])
    speed.main()
    run = json.loads((tmp_path / "speed.jsonl").read_text())
    (record,) = run["records"]
    assert record["weights"] == 61706 and record["rows"] == 4
    for count, took in record["columns"].items():
        assert took["ratio"] == pytest.approx(
            took["product"] / took["forward"] / (1 + 4 * int(count))
        )
        assert took["peak_bytes"] > 1e8
    speed.report(tmp_path, tmp_path / "speed.md")
    page = (tmp_path / "speed.md").read_text()
    assert "| lenet | 61,706 | 4 | eager | 2 |" in page and run["commit"] in page


def test_failures_are_rows(speed):
    (row,) = speed._rows({"network": "vit_s", "means": "tf32", "error": "no such card"})
    assert "failed: no such card" in row


def test_what_misses_the_aim_is_named(speed):
    record = {
        "network": "net",
        "means": "eager",
        "rows": 2,
        "columns": {"1": {"ratio": 1.37}, "8": {"ratio": 1.204}},
    }
    runs = [{"records": [record, {"network": "vit_s", "means": "eager", "error": "no card"}]}]
    assert speed._above_aim(runs).endswith("means: net with 2 rows, K = 1 (1.37).")


def test_the_plain_pass_is_the_same_product(speed):
    import torch
    from methods.plain_pass import plain_product
    from tiny import tiny

    case = tiny("classification")
    problem = case.problem()
    w = torch.randn(3, problem.size, dtype=case.x.dtype)
    torch.testing.assert_close(
        plain_product(case.model, problem.linear_model.layout.names, case.x)(w),
        problem.ggn_product(w),
    )
