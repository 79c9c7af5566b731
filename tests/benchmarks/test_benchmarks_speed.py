"""The benchmark of speed measures what it says."""

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
def test_a_run_writes_lines(speed, tmp_path, monkeypatch):
    options = ["--networks", "lenet", "--batch", "4", "--columns", "1", "2", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["speed.py", *options, "--out", str(tmp_path)])
    speed.main()
    lines = [json.loads(line) for line in (tmp_path / "speed.jsonl").read_text().splitlines()]
    for line, count in zip(lines, (1, 2), strict=True):
        assert line["weights"] == 61706 and line["rows"] == 4 and line["columns"] == count
        assert line["ratio"] == pytest.approx(line["product"] / line["forward"] / (1 + 4 * count))
        assert line["peak_gb"] > 0.1 and line["commit"]


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
