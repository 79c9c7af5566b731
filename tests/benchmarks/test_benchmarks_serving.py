"""The benchmark of servers, and the gallery, run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


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
    assert len([*tmp_path.glob("*.png")]) == 8
