"""The benchmark of servers, the figures of the gallery, and the charts run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "benchmarks"


@pytest.mark.slow
def test_every_predictor_is_asked_in_both_ways(tmp_path):
    out = tmp_path / "serving.jsonl"
    script = [sys.executable, SCRIPTS / "serving.py", "--tiny", "--out", out]
    subprocess.run(script, check=True, timeout=300)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 12 and {line["way"] for line in lines} == {"alone", "batched"}
    assert all(line["requests/s"] > 0 and line["p99 ms"] > 0 for line in lines)


@pytest.mark.slow
def test_the_gallery_is_drawn(tmp_path):
    script = [sys.executable, SCRIPTS / "gallery.py", "--tiny", "--out", tmp_path]
    subprocess.run(script, check=True, timeout=300)
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert pictures == {path.name for path in (ROOT / "docs/images/gallery").glob("*.png")}


def test_charts_are_drawn_from_the_stored_results(tmp_path):
    subprocess.run([sys.executable, SCRIPTS / "charts.py", "--out", tmp_path], check=True)
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert pictures == {path.name for path in (ROOT / "docs/images/charts").glob("*.png")}
